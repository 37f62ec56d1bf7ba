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
	"github.com/sbxrun/sbxrun/internal/values"
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
		var e *result.Error
		if text, _ := words.Text(); errors.As(err, &e) && strings.TrimSpace(text) != "" {
			told := *e
			told.Message += " (" + strings.TrimSpace(text) + ")"
			return nil, &told
		}
		return nil, err
	}
	entry := plan.Entry()
	r := &Room{Run: run, Access: state.Access{
		Cred: entry.Cred, Net: string(room.NetNone), Workdir: entry.Workdir, Filter: entry.Filter.Name(), Cgroups: run.Cgroups, Env: entry.Env,
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
func (r *Room) Start(ctx context.Context, args, env []string, dir string, s Spec) (_ *Run, err error) {
	if err := room.CheckWorkdir(dir); err != nil {
		return nil, err
	}
	init, err := proc.FromPidfd(r.Init)
	if errors.Is(err, proc.ErrGone) || errors.Is(err, os.ErrClosed) {
		return nil, sandbox.ErrEnded
	}
	if err != nil {
		return nil, err
	}
	s.Use = &sandbox.Use{Access: r.Access, Room: init}
	defer func() {
		if err != nil {
			s.Use.Close()
		}
	}()
	all := s.Use.Env()
	for _, pair := range env {
		v, err := values.ParsePair(pair)
		if err != nil {
			return nil, &result.Error{Code: "usage", Message: "Env: " + err.Error()}
		}
		all.Put(v)
	}
	at := supervise.Place{Room: init}
	if at.Entry, err = s.Use.Entry(args, all, dir, false); err != nil {
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
