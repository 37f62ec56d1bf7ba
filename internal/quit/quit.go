// Package quit makes the process exit silently with code 131 on SIGQUIT.
//
// The Go runtime prints a trace of all goroutines on SIGQUIT and exits with code 2, unless os/signal handles the signal.
// sbxrun uses os/signal only before it starts a command, and its other commands never do. The kernel's default action would
// be a core dump that contains the caller's environment.
//
// The package imports nothing, so it is initialised first (Go specification, Program initialization: sorted by import path,
// after the imports). Only a SIGQUIT during the start of the runtime, about 0.3 ms, still has Go's effect.
package quit

import "unsafe"

// rawSyscall6 is the function of package syscall, which would be initialised first if it were imported.
//
//go:linkname rawSyscall6 syscall.RawSyscall6
//go:noescape
func rawSyscall6(trap, a1, a2, a3, a4, a5, a6 uintptr) (r1, r2, errno uintptr)

// action is the kernel's struct sigaction for rt_sigaction(2).
type action struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

const (
	sigquit    = 3
	onStack    = 0x08000000 // SA_ONSTACK: Go's threads have a signal stack, and their other stacks are small
	restorer   = 0x04000000 // SA_RESTORER: x86-64 delivers no signal without one, even if it is unused
	exitCode   = 128 + sigquit
	sizeOfMask = 8
)

// runtimes is the Go runtime's action. Its handler is 0 if it was not replaced.
var runtimes action

func init() {
	f := handle
	at := **(**uintptr)(unsafe.Pointer(&f))
	set(&action{handler: at, flags: onStack | restorer, restorer: at}, &runtimes)
}

// Listened hands SIGQUIT back to os/signal. Call it after [signal.Notify] for SIGQUIT, which does not install a handler
// because Go installs its own at the start.
//
// [signal.Notify]: https://pkg.go.dev/os/signal#Notify
func Listened() {
	if runtimes.handler != 0 {
		set(&runtimes, nil)
	}
}

func set(to, from *action) {
	// After an error Go's action remains.
	rawSyscall6(sysSigaction, sigquit, uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(from)), sizeOfMask, 0, 0)
}

// handle is called by the kernel on any thread, so it must not use the Go runtime.
//
//go:nosplit
//go:norace
func handle() {
	for {
		rawSyscall6(sysExitGroup, exitCode, 0, 0, 0, 0, 0)
	}
}
