// Package quit ends the process with 131, and without a word, when SIGQUIT comes.
//
// The Go runtime's answer to SIGQUIT is a trace of all goroutines and exit code 2, until
// somebody listens by os/signal. sbxrun listens only when it is about to start something,
// and its other commands never do. The default action of the kernel would be a core dump,
// with what the caller's environment holds.
//
// The package imports nothing, and so is initialised first of all (Go specification,
// Program initialization: by import path, once what is imported has been). Only the start
// of the runtime, 0.3 ms or so, comes before, in which SIGQUIT has Go's answer.
package quit

import "unsafe"

// rawSyscall6 is that of package syscall, whose import would come first.
//
//go:linkname rawSyscall6 syscall.RawSyscall6
//go:noescape
func rawSyscall6(trap, a1, a2, a3, a4, a5, a6 uintptr) (r1, r2, errno uintptr)

// action is the kernel's struct sigaction, of rt_sigaction(2).
type action struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

const (
	sigquit    = 3
	onStack    = 0x08000000 // SA_ONSTACK: Go's threads have such a stack; others are small
	restorer   = 0x04000000 // SA_RESTORER: x86-64 delivers nothing without, used or not
	exitCode   = 128 + sigquit
	sizeOfMask = 8
)

// runtimes is Go's own action, handler 0 if it was not replaced.
var runtimes action

func init() {
	f := handle
	at := **(**uintptr)(unsafe.Pointer(&f))
	set(&action{handler: at, flags: onStack | restorer, restorer: at}, &runtimes)
}

// Listened hands SIGQUIT back to os/signal. It is called when [signal.Notify] has been,
// for SIGQUIT: that leaves the handler as it is, because Go has installed its own at start.
//
// [signal.Notify]: https://pkg.go.dev/os/signal#Notify
func Listened() {
	if runtimes.handler != 0 {
		set(&runtimes, nil)
	}
}

func set(to, from *action) {
	// An error leaves it as it was, which is Go's.
	rawSyscall6(sysSigaction, sigquit, uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(from)), sizeOfMask, 0, 0)
}

// handle is called by the kernel, on any thread: there is no Go to call into.
//
//go:nosplit
//go:norace
func handle() {
	for {
		rawSyscall6(sysExitGroup, exitCode, 0, 0, 0, 0, 0)
	}
}
