package job

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Room is a room that stays, for commands to be run in.
type Room struct {
	*Run
	Init   *os.File     // a pidfd of its PID 1, closed by Close
	Access state.Access // how it is entered, but for who Init is
}

// NewRoom has bubblewrap build the room of a plan without a command, and returns when it is
// complete. It ends as a [Run] does. After an error nothing is left but the spec's parts.
func NewRoom(ctx context.Context, plan *room.Plan, s Spec) (*Room, error) {
	const most = 4096
	words := stream.NewBuffer(most) // of bubblewrap
	s.Stderr, s.Shared = words, true
	run, err := NewRun(ctx, supervise.Place{Plan: plan}, s)
	if err != nil {
		e, known := errors.AsType[*result.Error](err)
		if text, _ := words.Text(); known && strings.TrimSpace(text) != "" {
			told := *e
			told.Message += " (" + strings.TrimSpace(text) + ")"
			return nil, &told
		}
		return nil, err
	}
	entry := plan.Entry()
	r := &Room{Run: run, Access: state.Access{
		Cred: entry.Cred, Net: string(room.NetNone), Workdir: entry.Workdir, Filter: entry.Filter.Name(), Cgroups: run.Cgroups, Env: entry.Env, Limits: s.Limits.OfProcesses(),
	}}
	if entry.HostNet {
		r.Access.Net = string(room.NetHost)
	}
	if r.Init, err = run.Room().File(); err != nil {
		run.End()
		_, _ = run.Wait() // the first error says more
		return nil, err
	}
	return r, nil
}

// Start runs a command in the room. env is NAME=VALUE for each variable beside the room's own, and
// dir is "" for the room's own.
func (r *Room) Start(ctx context.Context, args, env []string, dir string, s Spec) (*Run, error) {
	init, err := proc.FromPidfd(r.Init)
	if errors.Is(err, proc.ErrGone) || errors.Is(err, os.ErrClosed) {
		return nil, sandbox.ErrEnded
	}
	if err != nil {
		return nil, err
	}
	return Enter(ctx, &sandbox.Use{Access: r.Access, Room: init}, args, env, dir, s)
}

// Enter runs a command where use is, which it takes over. The rest is as for [Room.Start].
func Enter(ctx context.Context, use *sandbox.Use, args, env []string, dir string, s Spec) (_ *Run, err error) {
	defer func() {
		if err != nil {
			use.Close()
		}
	}()
	if err := room.CheckWorkdir(dir); err != nil {
		return nil, err
	}
	all := use.Env()
	if err := all.PutPairs(env); err != nil {
		return nil, err
	}
	s.Use = use
	at := supervise.Place{Room: use.Room}
	if at.Entry, err = use.Entry(args, all, dir, false); err != nil {
		return nil, err
	}
	return NewRun(ctx, at, s)
}

// Close ends the room and all commands in it at once, and returns when nothing of it is left, which
// the result's Verdict says. Later calls return the same.
func (r *Room) Close() (*result.Result, error) {
	r.End()
	res, err := r.Wait()
	r.Init.Close()
	return res, err
}
