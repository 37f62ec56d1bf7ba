package sandbox

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Room is an idle room without a record, in which commands can be run.
type Room struct {
	*supervise.Command
	Access state.Room // Close closes its Init
}

// NewRoom builds the room of a plan without a command and waits until it is complete. parts may be nil; they end with the
// room, but after an error the caller ends them.
func NewRoom(ctx context.Context, plan *room.Plan, parts *Parts, o supervise.Options) (*Room, error) {
	const most = 4096
	words := stream.NewBuffer(most) // bubblewrap's stderr
	o.Stderr = words
	c := &supervise.Command{Options: o, Place: supervise.Place{Plan: plan}, Shared: true, Confirm: true}
	if parts != nil {
		if err := parts.Begin(plan.Cred()); err != nil {
			return nil, err
		}
		c.Held = parts.Held
		c.Settle = func(res *result.Result) {
			if !res.Started {
				return
			}
			if _, lost := parts.End(); lost != nil && res.Err == nil {
				res.Err = lost
			}
		}
	}
	if err := c.Start(ctx); err != nil {
		e, known := errors.AsType[*result.Error](err)
		if text, _ := words.Text(); known && strings.TrimSpace(text) != "" {
			told := *e
			told.Message += " (" + strings.TrimSpace(text) + ")"
			return nil, &told
		}
		return nil, err
	}
	r := &Room{Command: c, Access: accessOf(plan, c.Group, o.Limits.OfProcesses())}
	if parts != nil {
		parts.Cgroups = r.Access.Cgroups
	}
	var err error
	if r.Access.Init, err = c.Kept().Room.File(); err != nil {
		c.Kill()
		_, _ = c.Wait() // the first error is returned
		return nil, err
	}
	return r, nil
}

// accessOf returns the values needed to enter a plan's room.
func accessOf(plan *room.Plan, group *limits.Group, processes limits.Request) state.Room {
	entry := plan.Entry()
	a := state.Room{User: proc.Cred{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}, Net: string(room.NetNone), Dir: entry.Workdir, Filter: entry.Filter, Env: entry.Env, Limits: processes}
	if entry.Cred != nil {
		a.User = *entry.Cred
	}
	if entry.HostNet {
		a.Net = string(room.NetHost)
	}
	if group != nil {
		a.Cgroups = group.Dirs()
	}
	return a
}

// Exec starts a command in the room. env are NAME=VALUE pairs in addition to the room's; dir "" is the room's working
// directory.
func (r *Room) Exec(ctx context.Context, args, env []string, dir string, o supervise.Options) (*supervise.Command, error) {
	u, err := in(&r.Access)
	if err != nil {
		return nil, err
	}
	return u.Start(ctx, args, env, dir, o)
}

// Start starts a command in the sandbox, and takes over u. See [Room.Exec].
func (u *Use) Start(ctx context.Context, args, env []string, dir string, o supervise.Options) (*supervise.Command, error) {
	c := &supervise.Command{Options: o, Confirm: true, Settle: func(res *result.Result) {
		if res.Started {
			u.Settle(res)
			u.Close()
		}
	}}
	err := room.CheckWorkdir(dir)
	all := u.Env()
	if err == nil {
		err = all.PutPairs(env)
	}
	c.Place.Room, c.Place.Entry = u.Room, u.Entry(args, all, dir, false)
	if err == nil {
		c.Planned, err = limits.For(o.Limits, true, u.Access.Cgroups, u.Access.Limits)
	}
	if err == nil {
		err = c.Start(ctx)
	}
	if err != nil {
		u.Close()
		return nil, err
	}
	return c, nil
}

// Close ends the room with all its commands at once and waits for the proof, which is the result's Verdict. Later
// calls return the same result. It fails on an empty Room.
func (r *Room) Close() (*result.Result, error) {
	r.Kill()
	res, err := r.Wait()
	r.Access.Init.Close()
	return res, err
}
