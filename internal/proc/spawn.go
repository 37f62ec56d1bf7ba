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

// spawnArgs are what spawn needs. Its child reads them until the exec, so they must not be freed before.
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
	syscall.ForkLock.Lock()
	pid = spawnNow(a)
	syscall.ForkLock.Unlock()
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
