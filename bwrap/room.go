package bwrap

import (
	"context"
	"os"
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

	run  *supervise.Command
	room *sandbox.Room // the same, after Start
	way  nsenter.Room
}

// Start builds the room. The room ends, with all commands in it, when ctx is done, at its timeout, or when Close is
// called, which the caller must do in any case. An error is an [*Error], and all processes have exited. Start blocks
// while bubblewrap builds the room, at most thirty seconds, or until ctx is done; after an error it waits until
// all processes have exited.
func (r *Room) Start(ctx context.Context) error {
	if err := r.run.Started(); err != nil {
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
	a := built.Access
	r.way = nsenter.Room{
		Init: built.Init, User: os.Geteuid(), Group: os.Getegid(), HostNetwork: a.Net == string(room.NetHost), Filter: a.Filter, Cgroups: a.Cgroups, Env: a.Env, Dir: a.Workdir, Limits: nsenter.Limits(a.Limits),
	}
	if c := a.Cred; c != nil {
		r.way.User, r.way.Group = int(c.UID), int(c.GID)
	}
	r.run, r.room = built.Command, built
	return nil
}

// Command returns a command to run in the room. The caller may set further fields before starting it. It ends with
// the room at the latest.
func (r *Room) Command(args ...string) *nsenter.Command {
	return &nsenter.Command{Room: &r.way, Args: args}
}

// Way returns how to enter the room, for programs that pass it on. Close closes its pidfd.
func (r *Room) Way() nsenter.Room { return r.way }

// Signal sends a signal to all processes of all commands in the room atomically.
func (r *Room) Signal(sig syscall.Signal) error { return r.run.Signal(sig) }

// Ended returns a channel that is closed when the room ends; nil before Start.
func (r *Room) Ended() <-chan struct{} { return r.run.Ended() }

// Close kills the room and all commands in it, and returns when all processes have exited, which the result's Verdict
// confirms. The error is an [*Error] if that could not be proven. Later calls return the same values.
func (r *Room) Close() (*Result, error) {
	if r.run == nil {
		return r.run.Wait() // an error
	}
	return r.room.Close()
}
