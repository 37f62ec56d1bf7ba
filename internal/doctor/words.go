package doctor

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// step is how far bwrap, or the system call in its place, came.
type step int

const (
	stepOther    step = iota // not recognised
	stepStart                // bwrap itself was not executed
	stepIdentity             // root could not become the run's uid
	stepCaps                 // bwrap found itself with capabilities
	stepCreate               // a namespace was not made
	stepIDMap                // the user namespace's map of ids was not written
	stepMount                // the file tree
	stepPivot                // its new root
	stepProc                 // a fresh /proc
	stepLoopback             // the network namespace's lo
	stepNetlink              // the socket for it
	stepHostname             // the UTS namespace's name
	stepSysctl               // user.max_user_namespaces, for --disable-userns
	stepCall                 // a system call of our own
	stepPayload              // all is set up, but the command is not there
)

// failure is what went wrong, as far as it is understood.
type failure struct {
	step  step
	errno syscall.Errno // 0 if not known
	text  string        // in bwrap's words or the kernel's
}

// phrases are parts of bwrap's messages. The first that occurs decides.
func phrases() []struct {
	text string
	step step
} {
	return []struct {
		text string
		step step
	}{
		{"execvp ", stepPayload},
		{"Unexpected capabilities", stepCaps},
		{"No permissions to creat", stepCreate},
		{"reating new namespace failed", stepCreate},
		{"unshare user ns", stepCreate},
		{"cannot open /proc/sys/user/max_user_namespaces", stepSysctl},
		{"sysctl user.max_user_namespaces", stepSysctl},
		{"creation of new user namespaces was not disabled", stepSysctl},
		{"uid map", stepIDMap},
		{"gid map", stepIDMap},
		{"setgroups", stepIDMap},
		{"NETLINK_ROUTE", stepNetlink},
		{"loopback:", stepLoopback},
		{"set hostname", stepHostname},
		{"mount proc on", stepProc},
		{"pivot_root", stepPivot},
		{"mount", stepMount},
		{"Failed to make", stepMount},
		{"setting up newroot", stepMount},
	}
}

// understand reads bwrap's last words. bwrap runs without a locale.
func understand(words string) failure {
	f := failure{text: lastLine(words)}
	for _, p := range phrases() {
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
	words := text[strings.LastIndex(text, ": ")+1:]
	words = strings.TrimSpace(words)
	for _, e := range []syscall.Errno{
		unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EINVAL, unix.ENOSYS, unix.EAGAIN, unix.ENOMEM, unix.EUSERS,
		unix.EROFS, unix.ENOENT, unix.EBUSY, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ENODEV, unix.EMFILE, unix.ENFILE,
	} {
		if strings.EqualFold(words, e.Error()) {
			return e
		}
	}
	return 0
}
