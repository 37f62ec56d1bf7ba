//go:build !amd64 && !arm64

package quit

import "syscall"

// The numbers of rt_sigaction(2) and exit_group(2).
const (
	sysSigaction = syscall.SYS_RT_SIGACTION
	sysExitGroup = syscall.SYS_EXIT_GROUP
)
