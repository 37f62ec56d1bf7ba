package proc

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// ProgramAt is the address of the first byte of an [Executable] after its headers. It is far above the
// addresses that mmap_min_addr forbids.
const ProgramAt = programBase + programHeaders

const (
	programBase    = 0x400000
	programHeaders = 64 + 56
)

// Executable returns an ELF file for this machine's processor (elf(5)) with one read-only segment.
// It starts at the byte entry of code.
func Executable(code []byte, entry int) []byte {
	machine := uint16(62) // EM_X86_64
	if runtime.GOARCH == "arm64" {
		machine = 183 // EM_AARCH64
	}
	size := uint64(programHeaders + len(code))
	b := []byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	le := binary.LittleEndian
	b = le.AppendUint16(b, 2) // an executable
	b = le.AppendUint16(b, machine)
	b = le.AppendUint32(b, 1)
	b = le.AppendUint64(b, ProgramAt+uint64(entry))
	b = le.AppendUint64(b, 64) // offset of the program headers
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 0)
	for _, n := range []uint16{64, 56, 1, 0, 0, 0} {
		b = le.AppendUint16(b, n)
	}
	b = le.AppendUint32(b, 1) // PT_LOAD
	b = le.AppendUint32(b, 5) // read, execute
	for _, n := range []uint64{0, programBase, programBase, size, size, 0x10000} {
		b = le.AppendUint64(b, n)
	}
	return append(b, code...)
}

// MemoryFile returns a program as a sealed file in memory (memfd_create(2)).
func MemoryFile(name string, program []byte, mode uint32) (*os.File, error) {
	// MFD_EXEC exists since Linux 6.3; before that, all memfds can be executed.
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err == unix.EACCES {
		return nil, fmt.Errorf("memfd_create of a program (is the sysctl vm.memfd_noexec 2?): %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create of a program: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err = unix.Write(fd, program); err != nil {
		err = fmt.Errorf("write to a memfd: %w", err)
	} else if err = unix.Fchmod(fd, mode); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
