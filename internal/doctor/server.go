package doctor

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
)

// Needs of a server with the default configuration: 4,096 connections, 64 concurrent calls and 32 warm rooms, with a
// few tasks and descriptors each, and some spare.
const (
	serverTasks       = 512
	serverDescriptors = 8192
)

// server checks the additional needs of `sbxrun serve` and `sbxrun mcp`. Failures are warnings, because a run does not
// depend on them.
func (e *exam) server() {
	e.warn("server program", checkServerProgram)
	e.warn("server directory", func() (string, error) { return checkDir(stepServerDir, state.ServerDir()) })
	e.warn("server tasks", checkServerTasks)
	e.warn("server descriptors", checkServerDescriptors)
}

// checkServerProgram checks the sibling binary sbxrund.
func checkServerProgram() (string, error) {
	program, err := safeopen.Sibling()
	if err != nil {
		return "", failed(stepServer, "", err)
	}
	err = unix.Faccessat(unix.AT_FDCWD, program, unix.X_OK, unix.AT_EACCESS)
	return program, failed(stepServer, program+": ", err)
}

func checkServerTasks() (string, error) {
	r, err := admission.Look()
	if err != nil {
		return "", failed(stepServerTasks, "", err)
	}
	if b, lacks := r.Lacking(serverTasks); lacks {
		return "", failure{step: stepServerTasks, text: inUse(b) + fmt.Sprintf(": a server needs about %d", serverTasks)}
	}
	return inUse(r.Tightest()), nil
}

// checkServerDescriptors checks the hard limit, because package os raises the soft limit to it.
func checkServerDescriptors() (string, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return "", failed(stepServerFiles, "getrlimit: ", err)
	}
	if limit.Max < serverDescriptors {
		return "", failure{step: stepServerFiles, text: fmt.Sprintf("at most %d open files (ulimit -Hn): a server needs about %d", limit.Max, serverDescriptors)}
	}
	return fmt.Sprintf("at most %d open files", limit.Max), nil
}
