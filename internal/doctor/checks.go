package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// env is what the checks share.
type env struct {
	ctx       context.Context
	caller    room.Caller
	uid, gid  int // of a run, outside of the sandbox
	firstOnly bool
	bound     time.Duration // of one trial with bwrap

	program   room.Program  // after check "bwrap"
	roundTrip time.Duration // after check "run"
}

func newEnv(ctx context.Context, caller room.Caller) *env {
	e := &env{ctx: ctx, caller: caller, uid: caller.UID, gid: caller.GID, bound: probeBound}
	if caller.UID == 0 {
		e.uid, e.gid = room.Nobody, room.Nobody
	}
	return e
}

func (e *env) machine() machine {
	return thisMachine(e.uid, e.gid, e.caller.UID == 0, e.program.Path)
}

// failed is the finding for a failure.
func (e *env) failed(f failure) Finding {
	a := explain(f, e.machine())
	return Finding{Verdict: Failed, Detail: f.text, Cause: a.cause, Fix: a.fix}
}

// warned is the finding for the failure of something a run can do without.
func (e *env) warned(f failure, without string) Finding {
	finding := e.failed(f)
	finding.Verdict, finding.Cause = Warning, without+": "+finding.Cause
	return finding
}

func ok(format string, args ...any) Finding {
	return Finding{Verdict: OK, Detail: fmt.Sprintf(format, args...)}
}

// check is one line of the table. Names are for people and programs, and stay.
type check struct {
	name  string
	needs []string // earlier checks; if one of them failed, this is skipped
	whole bool     // a whole run
	run   func(*env) Finding
}

const (
	kernelCheck     = "kernel"
	procCheck       = "process table"
	pidfdCheck      = "pidfd"
	closeRangeCheck = "close_range"
	subreaperCheck  = "subreaper"
	bwrapCheck      = "bwrap"
	uidCheck        = "unprivileged uid"
	userCheck       = "user namespace"
	pidCheck        = "PID namespace"
	freshProcCheck  = "fresh /proc"
	netCheck        = "network namespace"
	otherCheck      = "other namespaces"
	filesCheck      = "file tree"
	nestedCheck     = "no nested sandboxes"
	stagedCheck     = "root's own paths"
	runCheck        = "run"
	deadlineCheck   = "deadline"
	graceCheck      = "grace period"
	execCheck       = "exec"
)

// checks is the table, in the order in which a run needs things. asRoot adds
// what only a run started by root does.
func checks(asRoot bool) []check {
	var uid, staged []check
	if asRoot {
		uid = []check{{name: uidCheck, needs: []string{bwrapCheck}, run: checkUID}}
		staged = []check{{name: stagedCheck, whole: true, needs: []string{closeRangeCheck, freshProcCheck, netCheck, otherCheck, filesCheck, nestedCheck}, run: checkStaged}}
	}
	list := []check{
		{name: kernelCheck, run: checkKernel},
		{name: procCheck, run: checkProc},
		{name: pidfdCheck, run: checkPidfd},
		{name: closeRangeCheck, run: checkCloseRange},
		{name: subreaperCheck, run: checkSubreaper},
		{name: bwrapCheck, needs: []string{pidfdCheck, subreaperCheck}, run: checkBwrap},
	}
	list = append(list, uid...)
	list = append(list,
		check{name: userCheck, needs: []string{procCheck, bwrapCheck, uidCheck}, run: sandboxCheck("made by bwrap", "--unshare-user")},
		check{name: pidCheck, needs: []string{userCheck}, run: sandboxCheck("with an init of bwrap's", "--unshare-user", "--unshare-pid")},
		check{name: freshProcCheck, needs: []string{pidCheck}, run: sandboxCheck("mounted in the PID namespace", "--unshare-user", "--unshare-pid", "--proc", "/proc")},
		check{name: netCheck, needs: []string{userCheck}, run: sandboxCheck("with loopback up", "--unshare-user", "--unshare-net")},
		check{name: otherCheck, needs: []string{userCheck}, run: sandboxCheck("IPC, UTS and cgroup", "--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", "sandbox")},
		check{name: filesCheck, needs: []string{userCheck}, run: sandboxCheck("read-only binds, /dev, a tmpfs with a size", "--unshare-user", "--dev", "/dev", "--size", "65536", "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/")},
		check{name: nestedCheck, needs: []string{userCheck}, run: checkNested},
	)
	list = append(list, staged...)
	list = append(list,
		check{name: runCheck, whole: true, needs: []string{closeRangeCheck, freshProcCheck, netCheck, otherCheck, filesCheck, nestedCheck}, run: checkRun},
		check{name: deadlineCheck, whole: true, needs: []string{runCheck}, run: checkDeadline},
		check{name: graceCheck, whole: true, needs: []string{deadlineCheck}, run: checkGrace},
		check{name: execCheck, whole: true, needs: []string{deadlineCheck}, run: checkExec},
	)
	return append(list, limitChecks()...)
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "" // EFAULT only, which cannot be
	}
	return unix.ByteSliceToString(u.Release[:])
}

// checkKernel only warns: distributions bring features to older kernels, and
// whether they are there is tried below.
func checkKernel(*env) Finding { return judgeKernel(kernelRelease()) }

func judgeKernel(release string) Finding {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 {
		return Finding{Verdict: Warning, Detail: release, Cause: "the version is not understood"}
	}
	if major < 5 || major == 5 && minor < 11 {
		return Finding{Verdict: Warning, Detail: "Linux " + release,
			Cause: "older than 5.11: pidfd_open is of 5.3, setns with a pidfd of 5.8, close_range of 5.9",
			Fix:   "boot a newer kernel if one of the checks below fails"}
	}
	return ok("Linux %s", release)
}

// checkProc: /proc is there, shows us, and has the lists of children.
func checkProc(e *env) Finding {
	var mount *proc.MountError
	if err := proc.CheckMount(); errors.As(err, &mount) {
		return Finding{Verdict: Failed, Cause: mount.Cause, Fix: mount.Remedy}
	}
	_, err := os.ReadFile("/proc/thread-self/children")
	switch {
	case errors.Is(err, os.ErrNotExist):
		return Finding{Verdict: Failed, Detail: err.Error(), Cause: "the kernel was built without CONFIG_PROC_CHILDREN", Fix: "boot a kernel with CONFIG_PROC_CHILDREN=y"}
	case err != nil:
		return Finding{Verdict: Failed, Detail: err.Error(), Cause: "/proc cannot be read"}
	}
	// bwrap reads this one first of all.
	if _, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err != nil {
		return Finding{Verdict: Failed, Detail: err.Error(), Cause: "/proc has no /proc/sys: it is mounted with subset=pid, or something hides it",
			Fix: fixes("in the systemd unit: ProcSubset=all", "else: "+e.machine().sudo()+"mount -t proc proc /proc")}
	}
	return ok("/proc, with lists of children")
}

// checkPidfd takes hold of ourselves and sends the signal that is none.
func checkPidfd(e *env) Finding {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return e.refusedCall("pidfd_open", "5.3", err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		return e.refusedCall("pidfd_send_signal", "5.1", err)
	}
	return ok("pidfd_open, pidfd_send_signal")
}

func checkCloseRange(e *env) Finding {
	// A descriptor that cannot be open.
	if err := unix.CloseRange(1<<31-2, 1<<31-2, 0); err != nil {
		return e.refusedCall("close_range", "5.9", err)
	}
	return ok("close_range")
}

func checkSubreaper(e *env) Finding {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return e.refusedCall("prctl(PR_SET_CHILD_SUBREAPER)", "3.4", err)
	}
	return ok("prctl(PR_SET_CHILD_SUBREAPER)")
}

// refusedCall is the finding for a system call of our own.
func (e *env) refusedCall(name, since string, err error) Finding {
	var errno syscall.Errno
	errors.As(err, &errno)
	m := e.machine()
	if errno == unix.ENOSYS && !m.seccomp() {
		return Finding{Verdict: Failed, Detail: name + ": " + err.Error(), Cause: name + " is not in this kernel", Fix: "boot Linux " + since + " or later"}
	}
	return e.failed(failure{step: stepCall, errno: errno, text: name + ": " + err.Error()})
}

func checkBwrap(e *env) Finding {
	program, err := room.Find(e.caller.Path)
	if err != nil {
		return errorFinding(err)
	}
	e.program = program
	if e.caller.UID != 0 {
		if f, ok := e.tryBwrap(program.Path, "--version"); !ok {
			return e.failed(f)
		}
	}
	return ok("%s, version %s", program.Path, program.Version)
}

// checkUID: root starts bwrap under an unprivileged uid.
func checkUID(e *env) Finding {
	if f, ok := e.tryBwrap(e.program.Path, "--version"); !ok {
		return e.failed(f)
	}
	return ok("%d, under which bwrap is started for root", e.uid)
}

// sandboxCheck tries a sandbox with these options.
func sandboxCheck(detail string, options ...string) func(*env) Finding {
	return func(e *env) Finding {
		if f, ok := e.trySandbox(options...); !ok {
			return e.failed(f)
		}
		return ok("%s", detail)
	}
}

// checkNested: whether a payload can be kept from making namespaces. Where a
// run would not even ask for it, it is a warning; where it would, a failure.
func checkNested(e *env) Finding {
	plan, err := e.plan("true")
	if err != nil {
		return errorFinding(err)
	}
	defer plan.Close()
	if !strings.Contains(plan.ShellCommand(), "--disable-userns") {
		const without = "the command can make user namespaces of its own, which shows it more of the kernel"
		if !e.program.DisableUserns {
			return Finding{Verdict: Warning, Detail: "bubblewrap " + e.program.Version + " has no --disable-userns",
				Cause: without, Fix: "install bubblewrap 0.8 or later: " + room.InstallHint()}
		}
		return e.warned(failure{step: stepSysctl, errno: unix.EROFS, text: "/proc/sys is mounted read-only"}, without)
	}
	if f, ok := e.trySandbox("--unshare-user", "--disable-userns"); !ok {
		return e.failed(f)
	}
	return ok("user namespaces are switched off for the command")
}

// errorFinding is the finding for an error of the product's own.
func errorFinding(err error) Finding {
	f := Finding{Verdict: Failed, Cause: err.Error()}
	var e *result.Error
	if errors.As(err, &e) && !strings.HasPrefix(e.Hint, "sbxrun doctor") {
		f.Fix = strings.TrimPrefix(e.Hint, "install it: ")
	}
	return f
}
