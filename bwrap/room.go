package bwrap

import (
	"context"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Room is a sandbox that runs any number of commands. It can be started once; afterwards, any goroutine may call its
// methods.
type Room struct {
	Policy
	Limits       Limits        // for all its commands together
	Timeout      time.Duration // lifetime of the room; 0 for no limit
	ProofTimeout time.Duration // limits the wait for the proof that all processes have exited; 0 for 5 s

	room sandbox.Room // empty before Start
	way  nsenter.Room
}

// Start builds the room. The room ends, with all commands in it, when ctx is done, at its timeout, or when Close is
// called, which the caller must do in any case. An error is an [*Error], and all processes have exited. Start blocks
// while bubblewrap builds the room, at most thirty seconds, or until ctx is done; after an error it waits until
// all processes have exited.
func (r *Room) Start(ctx context.Context) error {
	if err := r.room.Started(); err != nil {
		return err
	}
	plan, err := r.plan(nil, true)
	if err != nil {
		return supervise.AsError(err)
	}
	defer plan.Close()
	built, err := sandbox.NewRoom(ctx, plan, nil, supervise.Options{Limits: limits.Request(r.Limits), Timeout: r.Timeout, ProofTimeout: r.ProofTimeout})
	if err != nil {
		return supervise.AsError(err)
	}
	a := &built.Access
	r.room, r.way = *built, nsenter.Room{
		Init: a.Init, User: a.User.UID, Group: a.User.GID, HostNetwork: a.Net == string(room.NetHost), Filter: string(a.Filter),
		Limits: nsenter.Limits(a.Limits), Cgroups: a.Cgroups, Env: a.Env, Dir: a.Dir,
	}
	return nil
}

// Command returns a command to run in the room. The caller may set further fields before starting it. It ends with
// the room at the latest.
func (r *Room) Command(args ...string) *nsenter.Command {
	return &nsenter.Command{Room: &r.way, Args: args}
}

// Way returns the values needed to enter the room, for programs that pass them on. Close closes its Init.
func (r *Room) Way() nsenter.Room { return r.way }

// Signal sends a signal to all processes of all commands in the room atomically.
func (r *Room) Signal(sig syscall.Signal) error { return r.room.Signal(sig) }

// Ended returns a channel that is closed when the room ends; nil before Start.
func (r *Room) Ended() <-chan struct{} { return r.room.Ended() }

// Close kills the room and all commands in it, and returns when all processes have exited, which the result's Verdict
// confirms. The error is an [*Error] if that could not be proven. Later calls return the same values.
func (r *Room) Close() (*Result, error) { return r.room.Close() }
