package doctor

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// step is how far bwrap, or what was tried in its place, came.
type step string

const (
	stepOther    step = "other"        // not recognised
	stepStart    step = "start"        // bwrap itself was not executed
	stepIdentity step = "identity"     // root could not become the run's uid
	stepCaps     step = "capabilities" // bwrap found itself with some
	stepCreate   step = "create"       // a namespace was not made
	stepSetup    step = "setup"        // what is done in new namespaces was refused
	stepPivot    step = "pivot"        // the new root
	stepProc     step = "proc"         // a fresh /proc
	stepNetlink  step = "netlink"      // the socket for the network namespace's lo
	stepSysctl   step = "sysctl"       // user.max_user_namespaces of the room
	stepPayload  step = "payload"      // all is set up, but the command is not there

	stepKernel   step = "kernel"   // the version
	stepChildren step = "children" // lists of children in /proc
	stepProcSys  step = "proc-sys" // /proc/sys
	stepCall     step = "call"     // a system call of our own
	stepStaged   step = "staged"   // a path that only root can reach
	stepMapped   step = "mapped"   // what is root's, as the sandbox's own
	stepCgroups  step = "cgroups"  // cgroups are mounted read-only

	stepTasks    step = "tasks"     // the room for a run
	stepStateDir step = "state-dir" // where sandboxes are recorded

	stepServer      step = "server"       // its program
	stepServerDir   step = "server-dir"   // where it keeps what it stores
	stepServerTasks step = "server-tasks" // its share of a bound
	stepServerFiles step = "server-files" // descriptors
)

// failure is what went wrong, as far as it is understood.
type failure struct {
	step  step
	errno syscall.Errno // 0 if not known
	text  string        // in bwrap's words or the kernel's
	open  string        // a directory of the user's own that others can enter
}

func (f failure) Error() string { return f.text }

// Unwrap returns the kernel's error, nil if it is not known.
func (f failure) Unwrap() error {
	if f.errno == 0 {
		return nil
	}
	return f.errno
}

// phrases are parts of bwrap's messages. The first that occurs decides.
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

// understand reads bwrap's last words. bwrap runs without a locale.
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
		// Of these bwrap tells the meaning and not the error.
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

// lastLine is the last line that says something, without the program's name.
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

// errnoOf is the error a message ends with in the C library's words, 0 if none.
// Go's table has the same words with a small first letter.
func errnoOf(text string) syscall.Errno {
	words := strings.TrimSpace(text[strings.LastIndex(text, ": ")+1:])
	for e := syscall.Errno(1); e < 134; e++ { // the last is EHWPOISON, 133
		if strings.EqualFold(words, e.Error()) {
			return e
		}
	}
	return 0
}
