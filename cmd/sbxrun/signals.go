package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/quit"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// signals cancels a context at the first signal and closes a channel at the second.
type signals struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{} // closed by the second
	ready  chan struct{} // closed when signals are handled
	// admitted is closed when a command may be started. Only then is Ctrl-Z handled.
	admitted chan struct{}
	stop     chan os.Signal
}

// signaled is closed at the first signal.
var signaled = make(chan struct{})

var closeSignaled = sync.OnceFunc(func() { close(signaled) })

// watchWaiting starts to handle signals in the background, because package signal takes a few tenths of a
// millisecond. Until ready is closed a signal ends sbxrun, which must not have started anything.
func watchWaiting() *signals {
	ctx, cancel := context.WithCancelCause(context.Background())
	s := &signals{ctx: ctx, cancel: cancel, hurry: make(chan struct{}), ready: make(chan struct{}), admitted: make(chan struct{}), stop: make(chan os.Signal, 1)}
	go s.listen()
	return s
}

func (s *signals) cancelBy(sig syscall.Signal) {
	s.cancel(supervise.Request{Cause: result.Canceled, Signal: sig})
}

func (s *signals) listen() {
	got := make(chan os.Signal, 2)
	notifyEnds(got)
	// With a closed stdout write(2) fails, and sbxrun still ends the sandbox. The command gets the default action.
	signal.Ignore(syscall.SIGPIPE)
	close(s.ready)
	var sig os.Signal
	select {
	case sig = <-got:
	case <-s.admitted:
		// Package signal takes 0.1 ms for each signal. Until the command starts, Ctrl-Z may stop sbxrun alone.
		if !ignoresStop() { // as in a shell without job control
			signal.Notify(s.stop, syscall.SIGTSTP)
		}
		sig = <-got
	}
	s.cancelBy(sig.(syscall.Signal))
	closeSignaled()
	<-got
	close(s.hurry)
}

// notifyEnds sends the signals that end sbxrun to got.
func notifyEnds(got chan<- os.Signal) {
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		// SIGINT and SIGHUP stay ignored if the caller ignores them, like nohup(1). The Go runtime has replaced the
		// actions of SIGTERM and SIGQUIT, which timeout(1) always handles as well.
		if !signal.Ignored(sig) {
			notify(got, sig)
		}
	}
}

// after returns a context for copying files after the command has ended. The next signal cancels it, and the one after
// that ends sbxrun.
func (s *signals) after() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	got := make(chan os.Signal, 1)
	notifyEnds(got)
	go func() {
		select {
		case sig := <-got:
			cancel(fmt.Errorf("interrupted by SIG%s", result.SignalName(sig.(syscall.Signal))))
			closeSignaled()
			signal.Reset(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(nil)
	}
}

// suspends stops the command together with sbxrun at Ctrl-Z, and continues both at fg, like any job of a shell. The
// deadline stays the same.
func (s *signals) suspends(command *supervise.Command) {
	go func() {
		for range s.stop {
			if orphaned() {
				continue // like the kernel, because no process could continue sbxrun
			}
			// An error means that it has ended.
			_ = command.Signal(syscall.SIGSTOP)
			stopSelf()
			_ = command.Signal(syscall.SIGCONT)
		}
	}()
}

// stopSelf stops sbxrun until it is continued. The signal goes to this thread, which therefore stops before the call
// returns. Another thread could take a signal to the process a moment later.
func stopSelf() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGSTOP)
}

// ignoresStop reports whether sbxrun was started with SIGTSTP ignored. The Go runtime does not change that, and
// [signal.Ignored] does not report it.
func ignoresStop() bool {
	const ignore = 1                                     // SIG_IGN
	var old struct{ handler, flags, more, mask uintptr } // struct sigaction of the kernel
	_, _, errno := syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGTSTP), 0, uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	return errno == 0 && old.handler == ignore
}

// orphaned reports whether no process of the session could continue sbxrun: no ancestor in its process group has a
// parent in another group of the session (setpgid(2)). SIGTSTP does not stop such a group, and SIGSTOP would be final.
func orphaned() bool {
	session, _ := unix.Getsid(0) // neither can fail for this process
	group, _ := unix.Getpgid(0)
	for parent := os.Getppid(); parent > 0; {
		if s, err := unix.Getsid(parent); err != nil || s != session {
			return true
		}
		if g, err := unix.Getpgid(parent); err != nil || g != group {
			return err != nil
		}
		st, err := proc.ReadStat(parent)
		if err != nil {
			return true
		}
		parent = st.Parent
	}
	return true
}

// diesOf ends sbxrun if err is a signal that kept it from starting anything, as if that signal were not handled.
func diesOf(err error) {
	var request supervise.Request
	if !errors.As(err, &request) {
		return
	}
	if request.Signal == syscall.SIGQUIT {
		os.Exit(128 + int(syscall.SIGQUIT)) // see package quit
	}
	signal.Reset(request.Signal)
	for unix.Kill(unix.Getpid(), request.Signal) == nil {
		time.Sleep(time.Millisecond) // another thread may receive it
	}
}

// notify is [signal.Notify] for signals that may include SIGQUIT, which package quit handles until then.
func notify(c chan<- os.Signal, signals ...os.Signal) {
	signal.Notify(c, signals...)
	if slices.Contains(signals, os.Signal(syscall.SIGQUIT)) {
		quit.Listened()
	}
}
