package sandbox

import (
	"errors"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Use is a sandbox that runs, for somebody who runs a command in it. From Hold until Close the
// sandbox does not count as idle.
type Use struct {
	Access state.Access
	Room   *proc.Process // PID 1 of its room

	// Nil, if it is a room that no record knows of.
	dir     *state.Dir
	entry   *state.Entry
	release func() // nil unless it is held
}

// Enter finds a sandbox as [Find] does, and holds it.
func Enter(name string) (*Use, error) {
	u, err := Find(name)
	if err != nil {
		return nil, err
	}
	if err := u.Hold(); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// Find finds the caller's sandbox of this name, or of this id or its beginning. The caller
// closes it.
func Find(name string) (_ *Use, err error) {
	if err := state.CheckVisible(); err != nil {
		return nil, err
	}
	dir, err := state.Look(state.Mine())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			dir.Close()
		}
	}()
	u := &Use{dir: dir}
	var ok bool
	if u.entry, u.Access, ok = dir.Access(name); !ok {
		// Perhaps the beginning of an id. Or there is nothing to enter.
		e, err := dir.Find(name)
		if err != nil {
			return nil, err
		}
		if u.entry, u.Access, ok = dir.Access(e.ID); !ok {
			return nil, cannotEnter(e)
		}
	}
	if u.Room, err = u.Access.Init.OpenInit(); errors.Is(err, proc.ErrGone) {
		err = &result.Error{Code: "ended", Message: "the sandbox " + name + " has just ended"}
	}
	if err != nil {
		return nil, err
	}
	return u, nil
}

// Hold keeps the sandbox from counting as idle. An error says that it is about to end.
func (u *Use) Hold() (err error) {
	u.release, err = u.entry.HoldActivity()
	return err
}

// cannotEnter says why there is nothing to enter.
func cannotEnter(e *state.Entry) error {
	switch {
	case e.IsExec():
		return &result.Error{Code: "usage", Message: e.What() + " is an exec, not a sandbox", Hint: "name the sandbox alone"}
	case !e.Lives():
		return &result.Error{Code: "ended", Message: "the sandbox " + e.Title() + " has ended: " + e.Status()}
	case e.Record.Phase == state.Starting:
		return &result.Error{Code: "starting", Message: "the sandbox " + e.Title() + " is still being set up", Hint: "try again in a moment"}
	}
	return &result.Error{Code: "enter", Message: "the sandbox " + e.Title() + " cannot be entered: what is needed for that is damaged"}
}

// Root opens the sandbox's root, to copy files from it and to it, with the rights of the
// sandbox's own user. The caller closes it.
func (u *Use) Root() (*workspace.Root, error) {
	fd, err := u.Room.OpenRoot()
	if errors.Is(err, proc.ErrGone) {
		return nil, ErrEnded
	}
	if err != nil {
		return nil, err
	}
	return workspace.Inside(fd, u.Access.Cred)
}

// ErrEnded says that the sandbox has ended while it was used.
var ErrEnded error = &result.Error{Code: "ended", Message: "the sandbox has just ended"}

// Env is the sandbox's own environment, for changes.
func (u *Use) Env() (set values.Environment) {
	for _, pair := range u.Access.Env {
		if name, value, ok := strings.Cut(pair, "="); ok {
			set.Put(values.Var{Name: name, Value: value})
		}
	}
	return set
}

// Entry is a command in the sandbox; workdir is "" for the sandbox's own.
func (u *Use) Entry(argv []string, env values.Environment, workdir string, terminal bool) (*enter.Entry, error) {
	if workdir == "" {
		workdir = u.Access.Workdir
	}
	env.Put(values.Var{Name: "PWD", Value: workdir})
	path, _ := env.Lookup("PATH")
	filter, err := seccomp.ByName(u.Access.Filter)
	if err != nil {
		return nil, err
	}
	return &enter.Entry{
		Cred:     u.Access.Cred,
		HostNet:  u.Access.Net == "host",
		Command:  argv,
		Path:     path,
		Env:      values.Pairs(env.Vars()),
		Workdir:  workdir,
		Terminal: terminal,
		Filter:   filter,
	}, nil
}

// Refused are the hosts that the list of the sandbox's network does not have and that somebody in
// it has asked for by now.
func (u *Use) Refused() []state.Refused {
	if u.entry == nil || u.Access.Net != netListed || u.entry.Refresh() != nil {
		return nil
	}
	return u.entry.Record.Refused
}

// Settle names the cause where the command has ended because its sandbox was to end: first
// all that is in a sandbox is signalled, and what the command made of that does not matter.
func (u *Use) Settle(res *result.Result) {
	// The command's end is seen first: the room's PID 1 waits for it (pid_namespaces(7)).
	if res.Cause == result.Lost && u.Room.Wait(time.Now().Add(enter.Dying)) == nil {
		res.Cause = result.Killed
	}
	if u.entry != nil && (res.Cause == result.Signaled || res.Cause == result.Exited) && u.entry.Ending() {
		res.Cause = result.Killed
	}
}

// Close gives up the sandbox.
func (u *Use) Close() {
	u.Room.Close()
	if u.release != nil {
		u.release()
	}
	if u.dir != nil {
		u.dir.Close()
	}
}
