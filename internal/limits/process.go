package limits

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// niceness is the least that a process of ours may have: lower needs CAP_SYS_NICE, or
// RLIMIT_NICE (setpriority(2)).
func niceness() int {
	// The system call says 20-nice, and unix.Getpriority leaves it so.
	n, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return 19
	}
	least := 20 - n
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NICE, &own) == nil && own.Cur <= 40 {
		least = min(least, 20-int(own.Cur))
	}
	return least
}

// oomScoreAdj is the least that a process of ours may have: lower needs
// CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5)).
func oomScoreAdj() int {
	data, err := proc.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0
	}
	return n
}

// capable says whether we have a capability.
func capable(capability int) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<capability) != 0
}
