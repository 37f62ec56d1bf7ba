package sandbox

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Use is a running sandbox in which the caller runs a command. From Hold until Close it does not count as
// idle.
type Use struct {
	Access state.Room    // without Init
	Room   *proc.Process // the sandbox's PID 1

	// These are nil for a sandbox without a record.
	dir     *state.Dir
	entry   *state.Entry
	release func() // nil unless held
}

// Enter finds a sandbox as [Find] does, and calls Hold.
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

// Find finds the caller's sandbox by name, ID or prefix of the ID. The caller closes it.
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
	var access state.Access
	if u.entry, access, ok = dir.Access(name); !ok {
		// It may be a prefix of an ID. Otherwise the sandbox cannot be entered.
		e, err := dir.Find(name)
		if err != nil {
			return nil, err
		}
		if u.entry, access, ok = dir.Access(e.ID); !ok {
			return nil, cannotEnter(e)
		}
	}
	u.Access = access.Room
	if u.Room, err = access.Init.OpenInit(); errors.Is(err, proc.ErrGone) {
		err = &result.Error{Code: "ended", Message: "sandbox " + name + " has just ended"}
	}
	if err != nil {
		return nil, err
	}
	return u, nil
}

// In finds a room that another program may have described. It refuses a process that is not the PID 1 of a room.
func In(r *state.Room) (*Use, error) {
	const none = math.MaxUint32 // for setresuid(2), it means no change
	switch {
	case r.Init == nil:
		return nil, &result.Error{Code: "usage", Message: "the room was not started"}
	case r.User.UID == none || r.User.GID == none:
		return nil, &result.Error{Code: "usage", Message: fmt.Sprintf("user %d:%d of the room: %d is not a valid ID", r.User.UID, r.User.GID, uint32(none))}
	}
	u, err := in(r)
	if err == nil && (!room.Holds(u.Room.PID) || u.Room.Exited()) { // if it has exited, its PID may have been reused
		u.Close()
		return nil, &result.Error{Code: "ended", Message: "the room has ended, or Init is not the PID 1 of a room"}
	}
	return u, err
}

func in(r *state.Room) (*Use, error) {
	init, err := proc.FromPidfd(r.Init)
	if errors.Is(err, proc.ErrGone) || errors.Is(err, os.ErrClosed) {
		err = ErrEnded
	}
	if err != nil {
		return nil, err
	}
	return &Use{Access: *r, Room: init}, nil
}

// Hold keeps the sandbox from counting as idle. It fails if the sandbox is ending.
func (u *Use) Hold() (err error) {
	u.release, err = u.entry.HoldActivity()
	return err
}

// cannotEnter returns the reason why a sandbox cannot be entered.
func cannotEnter(e *state.Entry) error {
	switch {
	case e.IsExec():
		return &result.Error{Code: "usage", Message: e.What() + " is an exec, not a sandbox", Hint: "name only the sandbox"}
	case !e.Lives():
		return &result.Error{Code: "ended", Message: "sandbox " + e.Title() + " has ended: " + e.Status()}
	case e.Record.Phase == state.Starting:
		return &result.Error{Code: "starting", Message: "sandbox " + e.Title() + " is still being set up", Hint: "try again in a moment"}
	}
	return &result.Error{Code: "enter", Message: "cannot enter sandbox " + e.Title() + ": its access file is damaged or of another version"}
}

// Root opens the sandbox's root for copying files, with the rights of the sandbox's own user. The caller
// closes it.
func (u *Use) Root() (*workspace.Root, error) {
	fd, err := u.Room.OpenRoot()
	if errors.Is(err, proc.ErrGone) {
		return nil, ErrEnded
	}
	if err != nil {
		return nil, err
	}
	return workspace.Inside(fd, u.Access.Cred())
}

// ErrEnded means that the sandbox has ended during its use.
var ErrEnded error = &result.Error{Code: "ended", Message: "the sandbox has just ended"}

// Env returns a copy of the sandbox's own environment.
func (u *Use) Env() (set values.Environment) {
	for _, pair := range u.Access.Env {
		if name, value, ok := strings.Cut(pair, "="); ok {
			set.Put(values.Var{Name: name, Value: value})
		}
	}
	return set
}

// Entry returns the entry for a command in the sandbox; workdir "" means the sandbox's own.
func (u *Use) Entry(argv []string, env values.Environment, workdir string, terminal bool) *enter.Entry {
	if workdir == "" {
		workdir = u.Access.Dir
	}
	env.Put(values.Var{Name: "PWD", Value: workdir})
	path, _ := env.Lookup("PATH")
	return &enter.Entry{
		Cred:     u.Access.Cred(),
		HostNet:  u.Access.Net == string(room.NetHost),
		Command:  argv,
		Path:     path,
		Env:      values.Pairs(env.Vars()),
		Workdir:  workdir,
		Terminal: terminal,
		Filter:   u.Access.Filter,
	}
}

// Refused returns the hosts that commands in the sandbox have asked for and that its network list does not
// contain.
func (u *Use) Refused() []state.Refused {
	if u.entry == nil || u.Access.Net != netListed || u.entry.Refresh() != nil {
		return nil
	}
	return u.entry.Record.Refused
}

// Settle corrects the cause if the command ended because its sandbox was ending: everything in a sandbox is
// signalled first, and the command's reaction to that does not matter.
func (u *Use) Settle(res *result.Result) {
	// The command's end is visible first, because the sandbox's PID 1 waits for it (pid_namespaces(7)).
	if res.Cause == result.Lost && u.Room.Wait(time.Now().Add(enter.Dying)) == nil {
		res.Cause = result.Killed
	}
	if u.entry != nil && (res.Cause == result.Signaled || res.Cause == result.Exited) && u.entry.Ending() {
		res.Cause = result.Killed
	}
}

// Close releases the sandbox.
func (u *Use) Close() {
	u.Room.Close()
	if u.release != nil {
		u.release()
	}
	if u.dir != nil {
		u.dir.Close()
	}
}
