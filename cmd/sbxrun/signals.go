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
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/quit"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// signals turn the first signal into a cancelled context, and the second into
// a closed channel.
type signals struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{} // closed by the second
	ready  chan struct{} // closed when signals are listened to
	// admitted is closed when a command may be started: only then is Ctrl-Z listened to.
	admitted chan struct{}
	stop     chan os.Signal
}

// signaled is closed when the first signal has come.
var signaled = make(chan struct{})

var closeSignaled = sync.OnceFunc(func() { close(signaled) })

// watchWaiting begins to listen, in the background, because that takes package
// signal some tenths of a millisecond. Before ready a signal ends sbxrun, which
// must not have started anything.
func watchWaiting() *signals {
	ctx, cancel := context.WithCancelCause(context.Background())
	s := &signals{ctx: ctx, cancel: cancel, hurry: make(chan struct{}), ready: make(chan struct{}), admitted: make(chan struct{}), stop: make(chan os.Signal, 1)}
	go s.listen()
	return s
}

// cancelBy ends the run as a signal does.
func (s *signals) cancelBy(sig syscall.Signal) {
	s.cancel(supervise.Request{Cause: result.Canceled, Signal: sig})
}

func (s *signals) listen() {
	got := make(chan os.Signal, 2)
	notifyEnds(got)
	// A closed stdout is an error of write(2), and no reason to leave a sandbox
	// behind. (The payload gets the default back.)
	signal.Ignore(syscall.SIGPIPE)
	close(s.ready)
	var sig os.Signal
	select {
	case sig = <-got:
	case <-s.admitted:
		// Each signal takes package signal a tenth of a millisecond, and until there is a
		// command, which takes longer, Ctrl-Z may stop us alone.
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

// notifyEnds has got the signals that end us.
func notifyEnds(got chan<- os.Signal) {
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		// SIGINT and SIGHUP stay ignored where the caller ignores them, as nohup(1) does the
		// latter. For SIGTERM and SIGQUIT the Go runtime has put its own handlers in the place of
		// what was there; timeout(1), too, always listens to these.
		if !signal.Ignored(sig) {
			notify(got, sig)
		}
	}
}

// after returns a context for what is left to do when the command is gone: its files may be many. The
// next signal ends that, whichever came before, and the one after that ends sbxrun.
func (s *signals) after() (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	got := make(chan os.Signal, 1)
	notifyEnds(got)
	go func() {
		select {
		case sig := <-got:
			cancel(fmt.Errorf("SIG%s came before it was done", result.SignalName(sig.(syscall.Signal))))
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

// suspends has Ctrl-Z stop the command together with sbxrun, and fg let both go on, as
// any job of a shell. The deadline is that of the clock, which is not stopped.
func (s *signals) suspends(command *job.Job) {
	go func() {
		for range s.stop {
			if orphaned() {
				continue // as the kernel would: nobody is there to continue us
			}
			// An error means that it has ended, and then there is nothing to stop.
			_ = command.Signal(syscall.SIGSTOP)
			stopSelf()
			_ = command.Signal(syscall.SIGCONT)
		}
	}()
}

// stopSelf stops sbxrun, and comes back when it is continued. The signal goes to this thread, which
// so stops before it comes back from the call; one to the process may be taken by another thread, a
// moment later.
func stopSelf() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGSTOP)
}

// ignoresStop reports whether SIGTSTP was ignored when we were executed. The Go runtime
// leaves it alone, and [signal.Ignored] does not know.
func ignoresStop() bool {
	const ignore = 1                                     // SIG_IGN
	var old struct{ handler, flags, more, mask uintptr } // struct sigaction of the kernel
	_, _, errno := syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGTSTP), 0, uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	return errno == 0 && old.handler == ignore
}

// orphaned reports whether nobody in our session could continue us: no process of our
// group that is above us has a parent in another group of the session (setpgid(2)).
// Then the kernel does not stop a group for SIGTSTP, and SIGSTOP would be for ever.
func orphaned() bool {
	session, _ := unix.Getsid(0) // neither can fail for ourselves
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

// diesOf ends sbxrun of the signal that has kept it from starting anything, if that is the
// error, as if nobody had listened.
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
		time.Sleep(time.Millisecond) // any thread may take it
	}
}

// notify is [signal.Notify] for signals that may include SIGQUIT, which package quit has
// until then.
func notify(c chan<- os.Signal, signals ...os.Signal) {
	signal.Notify(c, signals...)
	if slices.Contains(signals, os.Signal(syscall.SIGQUIT)) {
		quit.Listened()
	}
}
