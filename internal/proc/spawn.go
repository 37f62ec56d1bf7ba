package proc

import (
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// spawnArgs are the arguments of spawn. The child reads them until its exec, so they must not be freed before that.
type spawnArgs struct {
	pidfd   *int32
	socket  uintptr // becomes descriptor 0; not 0 itself
	program uintptr // descriptor
	path    *byte   // "": the program's descriptor is executed (execveat(2), AT_EMPTY_PATH)
	argv    unsafe.Pointer
	envp    unsafe.Pointer
	errno   uintptr // set by the child if the exec fails

	words [2]string // arguments, terminated by NUL
	args  [3]*byte
	env   [1]*byte
	empty [1]byte
	fd    int32
}

// spawn clones a process that shares this one's memory until it executes a program, in a new session, and returns at once.
// The result is the child's PID or a negative errno. The child makes four system calls and uses no stack.
//
// [syscall.ForkExec] would wait for the exec with vfork(2). If another process stopped the child before its exec
// (SIGSTOP), this thread, and with GOMAXPROCS(1) all of this process, would wait with it.
//
//go:noescape
func spawn(a *spawnArgs) int

// The runtime's fork hooks, as syscall.forkExec uses them: no signal is handled between them, and the child starts with all
// signals blocked. The Go linker allows linkname for them (gVisor depends on them).

//go:linkname runtimeBeforeFork syscall.runtime_BeforeFork
func runtimeBeforeFork()

//go:linkname runtimeAfterFork syscall.runtime_AfterFork
func runtimeAfterFork()

// spawnKeeper executes the helper as a keeper with this socket. The caller keeps a until the keeper has ended.
func spawnKeeper(program *os.File, socket int) (a *spawnArgs, pid int, err error) {
	a = &spawnArgs{socket: uintptr(socket), program: uintptr(Descriptor(program)), words: [2]string{KeeperName + "\x00", helper.Keep + "\x00"}, fd: -1}
	for i, word := range a.words {
		a.args[i] = unsafe.StringData(word)
	}
	a.pidfd, a.path, a.argv, a.envp = &a.fd, &a.empty[0], unsafe.Pointer(&a.args), unsafe.Pointer(&a.env)
	restore := handDownCapabilities()
	syscall.ForkLock.Lock()
	pid = spawnNow(a)
	syscall.ForkLock.Unlock()
	restore()
	runtime.KeepAlive(program)
	if pid < 0 {
		return nil, 0, syscall.Errno(-pid)
	}
	return a, pid, nil
}

//go:nosplit
//go:norace
func spawnNow(a *spawnArgs) int {
	runtimeBeforeFork()
	pid := spawn(a)
	runtimeAfterFork()
	return pid
}

// failure returns why the child, which has ended, could not execute the program.
func (a *spawnArgs) failure() error {
	if a == nil {
		return nil
	}
	if errno := atomic.LoadUintptr(&a.errno); errno != 0 {
		return &StartError{Step: "execute the keeper", Err: unix.Errno(errno)}
	}
	return nil
}

// handDownCapabilities makes a child of this thread keep an ordinary user's effective capabilities at an exec, if possible,
// until restore: sbxrun may have them from its file (capabilities(7)). A keeper's programs do not get them.
func handDownCapabilities() (restore func()) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var own [2]unix.CapUserData
	if os.Geteuid() == 0 || unix.Capget(&hdr, &own[0]) != nil || own[0].Effective|own[1].Effective == 0 {
		return func() {}
	}
	runtime.LockOSThread() // capabilities are the thread's
	wide := own
	for i := range wide {
		wide[i].Inheritable |= wide[i].Effective
	}
	if unix.Capset(&hdr, &wide[0]) != nil {
		runtime.UnlockOSThread()
		return func() {}
	}
	ambient := func(operation, c int) (int, error) {
		return unix.PrctlRetInt(unix.PR_CAP_AMBIENT, uintptr(operation), uintptr(c), 0, 0)
	}
	var raised []int
	for c := range 64 {
		if own[c/32].Effective&(1<<(c%32)) == 0 {
			continue
		}
		if set, err := ambient(unix.PR_CAP_AMBIENT_IS_SET, c); err != nil || set != 0 {
			continue
		}
		if _, err := ambient(unix.PR_CAP_AMBIENT_RAISE, c); err == nil {
			raised = append(raised, c)
		}
	}
	return func() {
		err := unix.Capset(&hdr, &own[0])
		for _, c := range raised {
			if _, lowerErr := ambient(unix.PR_CAP_AMBIENT_LOWER, c); lowerErr != nil {
				err = lowerErr
			}
		}
		if err == nil { // otherwise the thread ends with its goroutine
			runtime.UnlockOSThread()
		}
	}
}
