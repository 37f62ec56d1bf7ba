package volumes

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// holders returns the processes that have locked a file, according to /proc/locks (proc(5)). They may
// have ended since, and a keeper may hold the lock.
func holders(fd int) []int {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return nil
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return nil
	}
	device := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	var pids []int
	for line := range strings.Lines(string(locks)) {
		pids = appendHolder(pids, line, device)
	}
	return pids
}

// appendHolder appends the PID in a line such as
//
//	1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
func appendHolder(pids []int, line, device string) []int {
	words := strings.Fields(line)
	if len(words) < 6 || words[1] != "FLOCK" || words[5] != device {
		return pids
	}
	pid, err := strconv.Atoi(words[4])
	if err != nil || pid <= 0 || slices.Contains(pids, pid) { // 0 means another PID namespace
		return pids
	}
	return append(pids, pid)
}
