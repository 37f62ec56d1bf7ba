package bwrap

import (
	"context"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Room is a sandbox that stays, for commands to be run in. It is started once; its methods
// may then be called by several goroutines.
type Room struct {
	Policy
	Limits       Limits        // of all its commands together
	Timeout      time.Duration // of the room; 0 for none
	ProofTimeout time.Duration // how long is waited for the proof that nothing is left; 0 for 5 s

	run  *job.Run
	room *job.Room // the same, once there is one
	way  nsenter.Room
}

// Start has bubblewrap build the room, and returns when it is complete. It ends, and all
// commands in it, when ctx is done, at its timeout, or by Close, which has to be called in any
// case. An error is an [*Error], and nothing is left. Start blocks for as long as bubblewrap
// takes, thirty seconds at most, or until ctx is done; and after an error until nothing is left.
func (r *Room) Start(ctx context.Context) error {
	if err := r.run.Started(); err != nil {
		return err
	}
	plan, err := r.plan(nil, true)
	if err != nil {
		return supervise.AsError(err)
	}
	defer plan.Close()
	built, err := job.NewRoom(ctx, plan, job.Spec{Limits: limits.Request(r.Limits), Timeout: r.Timeout, ProofTimeout: r.ProofTimeout})
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
	r.run, r.room = built.Run, built
	return nil
}

// Command is a command to be run in the room, which the caller may add to before it is
// started. It ends with the room at the latest.
func (r *Room) Command(args ...string) *nsenter.Command {
	return &nsenter.Command{Room: &r.way, Args: args}
}

// Way says how the room is entered, for a program that hands it on. Its pidfd is the room's,
// and closed with it.
func (r *Room) Way() nsenter.Room { return r.way }

// Signal sends a signal to all processes of all commands in the room, in one step of the
// kernel's.
func (r *Room) Signal(sig syscall.Signal) error { return r.run.Signal(sig) }

// Ended is closed when the room has ended; nil before Start.
func (r *Room) Ended() <-chan struct{} { return r.run.Ended() }

// Close ends the room and all commands in it at once, and returns when nothing of it is
// left, which the result's Verdict says. The error is an [*Error] if that could not be proven.
// Later calls return the same.
func (r *Room) Close() (*Result, error) {
	if r.run == nil {
		return r.run.Wait() // an error
	}
	return r.room.Close()
}
