package doctor

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// step is the step that failed, of bwrap or of another check.
type step string

const (
	stepOther    step = "other"        // not recognised
	stepStart    step = "start"        // executing bwrap
	stepIdentity step = "identity"     // switching from root to the run's uid
	stepCaps     step = "capabilities" // bwrap has unexpected capabilities
	stepCreate   step = "create"       // creating a namespace
	stepSetup    step = "setup"        // an operation in the new namespaces
	stepPivot    step = "pivot"        // changing the root
	stepProc     step = "proc"         // mounting /proc
	stepNetlink  step = "netlink"      // the netlink socket for the loopback device
	stepSysctl   step = "sysctl"       // user.max_user_namespaces of the room
	stepPayload  step = "payload"      // the sandbox works, but the command does not exist

	stepKernel   step = "kernel"   // the version
	stepChildren step = "children" // lists of children in /proc
	stepProcSys  step = "proc-sys" // /proc/sys
	stepCall     step = "call"     // a system call of sbxrun
	stepStaged   step = "staged"   // a path that only root can reach
	stepMapped   step = "mapped"   // an idmapped mount of root's files
	stepCgroups  step = "cgroups"  // cgroups are mounted read-only

	stepTasks    step = "tasks"     // the task limit
	stepStateDir step = "state-dir" // the state directory

	stepServer      step = "server"       // the server's program
	stepServerDir   step = "server-dir"   // the server's data directory
	stepServerTasks step = "server-tasks" // the task limit, for a server
	stepServerFiles step = "server-files" // the limit on open files, for a server
)

// failure is an analysed error.
type failure struct {
	step  step
	errno syscall.Errno // 0 if not known
	text  string        // message of bwrap or the kernel
	open  string        // a directory of the user that others can enter
}

func (f failure) Error() string { return f.text }

// Unwrap returns the kernel's error, nil if it is not known.
func (f failure) Unwrap() error {
	if f.errno == 0 {
		return nil
	}
	return f.errno
}

// phrases are parts of bwrap's messages. The first match decides.
var phrases = []struct {
	text string
	step step
}{
	{"execvp ", stepPayload},
	{"Unexpected capabilities", stepCaps},
	{"No permissions to creat", stepCreate},
	{"reating new namespace failed", stepCreate},
	{"unshare user ns", stepCreate},
	{"uid map", stepSetup},
	{"gid map", stepSetup},
	{"setgroups", stepSetup},
	{"NETLINK_ROUTE", stepNetlink},
	{"loopback:", stepSetup},
	{"set hostname", stepSetup},
	{"mount proc on", stepProc},
	{"pivot_root", stepPivot},
	{"mount", stepSetup},
	{"Failed to make", stepSetup},
	{"setting up newroot", stepSetup},
}

// understand analyses bwrap's last message. bwrap runs without a locale.
func understand(words string) failure {
	f := failure{step: stepOther, text: lastLine(words)}
	for _, p := range phrases {
		if strings.Contains(f.text, p.text) {
			f.step = p.step
			break
		}
	}
	f.errno = errnoOf(f.text)
	if f.step == stepCreate && f.errno == 0 {
		// For these, bwrap prints an explanation instead of the error.
		switch {
		case strings.HasPrefix(f.text, "No permissions"):
			f.errno = unix.EPERM
		case strings.Contains(f.text, "ENOSPC"):
			f.errno = unix.ENOSPC
		case strings.Contains(f.text, "does not support user namespaces"):
			f.errno = unix.EINVAL
		}
	}
	return f
}

// lastLine returns the last line that is not empty, without the program's name.
func lastLine(words string) string {
	lines := strings.Split(strings.TrimSpace(words), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	for _, prefix := range []string{"bwrap: ", "error: "} {
		line = strings.TrimPrefix(line, prefix)
	}
	const most = 300 // bwrap's are shorter; a wrapper's may not be
	if len(line) > most {
		line = strings.ToValidUTF8(line[:most], "") + " …"
	}
	return line
}

// errnoOf returns the error at the end of a message, in the C library's words, or 0. Go's table differs only in
// capitalization.
func errnoOf(text string) syscall.Errno {
	words := strings.TrimSpace(text[strings.LastIndex(text, ": ")+1:])
	for e := syscall.Errno(1); e < 134; e++ { // the last is EHWPOISON, 133
		if strings.EqualFold(words, e.Error()) {
			return e
		}
	}
	return 0
}
