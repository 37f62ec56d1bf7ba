package room

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// The program of a room's PID 1 ([helper.HoldProgram]) has no file. bwrap executes it from memory, by its descriptor.

// holdPath is the program's path in the sandbox.
var holdPath = "/proc/self/fd/" + strconv.Itoa(holdFD)

// TrialFiles returns the descriptors, in order, of a trial bwrap, which builds no room. [Holds] recognizes its child
// by hold, which is [helper.HoldFile].
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
	own, err := helper.HoldFile()
	if err != nil {
		return false
	}
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
	return err == nil && string(text) == helper.HoldProgram()
}
