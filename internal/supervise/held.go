package supervise

import (
	"context"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Held is a payload that waits for its release, and all that can be done with
// it: a [bwrap.Sandbox], or a [nsenter.Exec].
type Held interface {
	Ends() *proc.Kept
	Release()
	Running() <-chan struct{} // closed when the payload runs
	Exited() <-chan struct{}  // closed when it has ended, or never came to be
	// InitEnding says whether init was about to end when the payload did. After Exited,
	// and before ExitStatus, which may be what lets it end.
	InitEnding() bool
	// ExitStatus is the payload's end; or [result.ErrSetup], [result.ErrUnknown],
	// or a *[result.Error] if it was never executed.
	ExitStatus(deadline time.Time) (*result.Payload, error)
	Strays() (n int, used proc.Usage)
	Used() proc.Usage
	Signal(syscall.Signal) error    // to the payload alone
	SignalAll(syscall.Signal) error // to everything but init
	Close()
}

// Start makes a held payload. An error is a *[result.Error], and nothing is left.
type Start func(context.Context) (Held, error)

// InSandbox is the start of a plan, in a sandbox of its own. forked is called as
// soon as the sandbox has its copies of stdio.
func InSandbox(plan *bwrap.Plan, stdio [3]*os.File, tty *proc.Terminal, forked func()) Start {
	return func(ctx context.Context) (Held, error) {
		sb, err := plan.Start(ctx, stdio, tty, forked)
		if err != nil {
			return nil, err
		}
		return sandbox{sb}, nil
	}
}

// sandbox adds what bwrap cannot do from outside.
type sandbox struct{ *bwrap.Sandbox }

func (sb sandbox) SignalAll(sig syscall.Signal) error {
	return nsenter.Signal(nsenter.Target{Init: sb.Init, Cred: sb.Cred, HostNet: sb.HostNet}, sig)
}

// Inside is the start of an entry, in a sandbox that runs.
func Inside(entry *nsenter.Entry, stdio [3]*os.File, tty *proc.Terminal, forked func()) Start {
	return func(ctx context.Context) (Held, error) {
		x, err := entry.Start(ctx, stdio, tty, forked)
		if err != nil {
			return nil, err
		}
		return x, nil
	}
}
