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

// Room is an idle room in which commands can be run.
type Room struct {
	*Run
	Init   *os.File     // a pidfd of its PID 1, closed by Close
	Access state.Access // how to enter it, without the identity of Init
}

// NewRoom builds the room of a plan without a command and waits until it is complete. The room ends as a [Run] does.
// After an error only the spec's parts remain.
func NewRoom(ctx context.Context, plan *room.Plan, s Spec) (*Room, error) {
	const most = 4096
	words := stream.NewBuffer(most) // bubblewrap's stderr
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
		_, _ = run.Wait() // the first error is returned
		return nil, err
	}
	return r, nil
}

// Start starts a command in the room. env are NAME=VALUE pairs in addition to the room's; dir "" is the room's working
// directory.
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

// Enter starts a command in the sandbox of use, which it takes over. See [Room.Start].
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

// Close ends the room with all its commands at once and waits for the proof, which is the result's Verdict. Later
// calls return the same result.
func (r *Room) Close() (*result.Result, error) {
	r.End()
	res, err := r.Wait()
	r.Init.Close()
	return res, err
}
