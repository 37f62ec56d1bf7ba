package room

import (
	"bytes"
	"encoding/binary"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// The program of a room's PID 1 consists of a few instructions and needs no library or file in the room. It sets its
// name for ps(1), reports that the room is built, closes all descriptors, and waits forever. bwrap executes it from
// memory (memfd_create(2)), by its descriptor.
//
// Compared with a shell or sleep(1), it starts 0.2 ms faster and takes only two pages of memory.

// holdPath is the program's path in the sandbox.
var holdPath = "/proc/self/fd/" + strconv.Itoa(holdFD)

// holdName is the name of a room's PID 1 in ps(1); at most 15 bytes (prctl(2)).
const holdName = "sbxrun-room"

// hold returns the program for this machine's processor, an ELF file for one segment.
func hold() []byte {
	if runtime.GOARCH == "arm64" {
		return proc.Executable(holdARM64(), 0)
	}
	return proc.Executable(holdAMD64(), 0)
}

// holdAMD64 is x86-64: the number of a call in EAX, its arguments in EDI, ESI, EDX.
func holdAMD64() []byte {
	code := []byte{
		0xb8, 157, 0, 0, 0, // mov eax, prctl
		0xbf, unix.PR_SET_NAME, 0, 0, 0, // mov edi
		0x48, 0x8d, 0x35, 51, 0, 0, 0, // lea rsi, name
		0x0f, 0x05, // syscall
		0xb8, 1, 0, 0, 0, // mov eax, write
		0xbf, readyFD, 0, 0, 0, // mov edi
		0x48, 0x8d, 0x35, 32, 0, 0, 0, // lea rsi, name
		0xba, 1, 0, 0, 0, // mov edx, 1
		0x0f, 0x05, // syscall
		0xb8, 0xb4, 1, 0, 0, // mov eax, close_range
		0x31, 0xff, // xor edi, edi
		0xbe, 0xff, 0xff, 0xff, 0xff, // mov esi, ~0
		0x31, 0xd2, // xor edx, edx
		0x0f, 0x05, // syscall
		0xb8, 34, 0, 0, 0, // wait: mov eax, pause
		0x0f, 0x05, // syscall
		0xeb, 0xf7, // jmp wait
	}
	return append(append(code, holdName...), 0)
}

// holdARM64 is AArch64: the number of a call in X8, its arguments from X0 on.
func holdARM64() []byte {
	const svc = 0xd4000001
	mov := func(register, value uint32) uint32 { return 0xd2800000 | value<<5 | register } // movz
	const adrX1 = 0x10000001                                                               // adr x1, forward by a multiple of 4
	words := []uint32{
		mov(0, unix.PR_SET_NAME), 0, mov(8, 167), svc, // prctl
		mov(0, readyFD), 0, mov(2, 1), mov(8, 64), svc, // write
		mov(0, 0), 0x92800001, mov(2, 0), mov(8, 436), svc, // close_range; movn x1, #0
		mov(0, 0), mov(1, 0), mov(2, 0), mov(3, 0), mov(8, 73), svc, // wait: ppoll
		0x14000000 | 0x3ffffff&^5, // b wait: six instructions back
	}
	for _, at := range []int{1, 5} {
		words[at] = adrX1 | uint32(len(words)-at)<<5
	}
	var code []byte
	for _, w := range words {
		code = binary.LittleEndian.AppendUint32(code, w)
	}
	return append(append(code, holdName...), 0)
}

// HoldFile returns the program of a room's PID 1 as a file that can be executed.
func HoldFile() (*os.File, error) {
	return proc.MemoryFile("room", hold(), 0o555)
}

// TrialFiles returns the descriptors, in order, of a bwrap that tries something and builds no room.
// [Holds] recognizes its child by hold, which is from [HoldFile].
func TrialFiles(stdin, stdout, stderr, hold *os.File) []*os.File {
	files := []*os.File{stdin, stdout, stderr}
	for len(files) <= holdFD {
		files = append(files, hold)
	}
	return files
}

// Holds reports whether a process executes the program of a room's PID 1, or is the bwrap that is about to, which has
// the program open as descriptor holdFD. It compares the files byte by byte and does not rely on names. It does not
// block, whatever the process executes or has open. The caller verifies that the PID still belongs to the process.
func Holds(pid int) bool {
	own, err := HoldFile()
	if err != nil {
		return false
	}
	defer own.Close()
	var want unix.Statx_t
	if unix.Statx(proc.Descriptor(own), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &want) != nil {
		return false
	}
	// Check exe again at the end: between the first two checks the process may have executed the program, which closes
	// the descriptor.
	for _, name := range []string{"exe", "fd/" + strconv.Itoa(holdFD), "exe"} {
		if fd, err := proc.OpenFile(pid, name); err == nil {
			same := isHold(fd, &want)
			unix.Close(fd)
			if same {
				return true
			}
		}
	}
	return false
}

// isHold compares a file, opened with O_PATH, with our own memfd. All memfds of a machine are on one device, which
// contains only anonymous memory, so reading does not block. AT_STATX_DONT_SYNC keeps the kernel from asking a
// FUSE server about files on other devices.
func isHold(path int, want *unix.Statx_t) bool {
	var st unix.Statx_t
	err := unix.Statx(path, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &st)
	if err != nil || st.Dev_major != want.Dev_major || st.Dev_minor != want.Dev_minor || st.Size != want.Size || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false
	}
	text, err := proc.ReadFile("/proc/self/fd/" + strconv.Itoa(path))
	return err == nil && bytes.Equal(text, hold())
}
