package volumes

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// holders returns the processes that have locked a file, according to /proc/locks (proc(5)). They may have ended since,
// and a keeper may hold the lock.
func holders(fd int) []int {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return nil
	}
	locks, _ := os.ReadFile("/proc/locks")
	return holdersIn(string(locks), fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino))
}

// holdersIn returns the PIDs in lines such as
//
//	1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
func holdersIn(locks, device string) (pids []int) {
	for line := range strings.Lines(locks) {
		if words := strings.Fields(line); len(words) >= 6 && words[1] == "FLOCK" && words[5] == device {
			pid, err := strconv.Atoi(words[4])
			if err == nil && pid > 0 && !slices.Contains(pids, pid) { // 0 means another PID namespace
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
