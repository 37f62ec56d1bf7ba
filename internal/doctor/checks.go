package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "" // impossible: only EFAULT
	}
	return unix.ByteSliceToString(u.Release[:])
}

// checkKernel only warns: distributions backport features to older kernels, and later checks try them.
func checkKernel(release string) (string, error) {
	var major, minor int
	switch n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); {
	case n < 2:
		return "", warning{error: fmt.Errorf("cannot parse the version %q", release)}
	case major < 5 || major == 5 && minor < 11:
		return "", warning{error: failure{step: stepKernel, text: "Linux " + release}}
	}
	return "Linux " + release, nil
}

// checkProc checks that /proc is mounted, shows processes of all users, and has the lists of children.
func checkProc() (string, error) {
	if err := proc.CheckMount(); err != nil {
		return "", err
	}
	if err := proc.CheckHidden(); err != nil {
		return "", err
	}
	if _, err := os.ReadFile("/proc/thread-self/children"); err != nil {
		return "", failed(stepChildren, "", err)
	}
	// The first file that bwrap reads.
	if _, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err != nil {
		return "", failed(stepProcSys, "", err)
	}
	return "/proc, with lists of children", nil
}

// failed returns a failure of step s; nil if err is nil.
func failed(s step, call string, err error) error {
	if err == nil {
		return nil
	}
	f := failure{step: s, text: call + err.Error()}
	errors.As(err, &f.errno)
	return f
}

// checkPidfd opens a pidfd of this process and sends signal 0.
func checkPidfd() (string, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return "", failed(stepCall, "pidfd_open: ", err)
	}
	defer unix.Close(fd)
	err = unix.PidfdSendSignal(fd, 0, nil, 0)
	return "pidfd_open, pidfd_send_signal", failed(stepCall, "pidfd_send_signal: ", err)
}

// checkOwner checks that the sandbox's identity cannot change the program or its directory. Otherwise a sandbox with
// that directory as a writable mount could replace the program that its caller executes next.
func checkOwner(program string, uid, gid int) error {
	for _, name := range []string{program, filepath.Dir(program)} {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			return &os.PathError{Op: "stat", Path: name, Err: err}
		}
		if int(st.Uid) == uid || st.Mode&0o002 != 0 && st.Mode&unix.S_ISVTX == 0 || st.Mode&0o020 != 0 && int(st.Gid) == gid {
			return &result.Error{Code: "program", Message: fmt.Sprintf("%s is writable for uid %d, the user of sandboxes", name, uid),
				Hint: "sudo install -t /usr/local/bin " + strings.Join(both(program), " ")}
		}
	}
	return nil
}

// both returns the program and, if installed next to it, sbxrund, quoted for a shell.
func both(program string) (words []string) {
	for _, name := range []string{program, filepath.Join(filepath.Dir(program), "sbxrund")} {
		if _, err := os.Stat(name); err == nil {
			words = append(words, "'"+strings.ReplaceAll(name, "'", `'\''`)+"'")
		}
	}
	return words
}

func checkCloseRange() (string, error) {
	err := unix.CloseRange(1<<31-2, 1<<31-2, 0) // a descriptor that cannot be open
	return "close_range", failed(stepCall, "close_range: ", err)
}

func checkSubreaper() (string, error) {
	err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	return "prctl(PR_SET_CHILD_SUBREAPER)", failed(stepCall, "prctl(PR_SET_CHILD_SUBREAPER): ", err)
}

func (e *exam) checkBwrap() (string, error) {
	program, err := room.Find(e.caller, "", nil)
	if err != nil {
		return "", err
	}
	e.program, e.Bwrap = program, &result.ReportBwrap{Path: program.Path, Version: program.Version}
	if e.caller.UID != 0 {
		err = e.tryBwrap(program.Path, "--version")
	}
	detail := program.Path + ", version " + cmp.Or(program.Version, "unknown")
	if program.Version != "" && program.Whole() != nil {
		detail += ", too old for --print-command"
	}
	if program.FollowsLinks() {
		detail += "; CVE-2026-87766 does not affect sandboxes: sbxrun creates mount points in host directories itself"
	}
	return detail, err
}

// checkUID checks that root can start bwrap with an unprivileged uid.
func (e *exam) checkUID() (string, error) {
	return fmt.Sprintf("%d, the uid of bwrap if root runs sbxrun", e.uid), e.tryBwrap(e.program.Path, "--version")
}

// sandbox checks that bwrap can create a sandbox with these options.
func (e *exam) sandbox(name, detail string, options ...string) {
	e.check(name, func() (string, error) { return detail, e.trySandbox(options...) })
}

// checkNested checks that payloads can be kept from creating user namespaces. It is a failure only where a run would
// rely on that.
func (e *exam) checkNested() (string, error) {
	plan, err := e.plan(room.Policy{Command: []string{"true"}})
	if err != nil {
		return "", err
	}
	defer plan.Close()
	if !plan.NoUserns() {
		return "", warning{failure{step: stepSysctl, errno: unix.EROFS, text: "/proc/sys is mounted read-only"},
			"with --seccomp off, the command can create user namespaces and reach more of the kernel"}
	}
	_, err = e.carryOut(plan, &supervise.Command{Options: supervise.Options{Timeout: probeBound}}, result.Exited)
	if step, ok := errors.AsType[*proc.StartError](err); ok && step.Step == enter.StepUserns {
		err = failed(stepSysctl, "", step.Err)
	}
	return "user namespaces are switched off for the command", err
}
