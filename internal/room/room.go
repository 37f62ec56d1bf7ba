package room

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// SetupBound is how long bwrap may take to build a room: mounting hangs if a file
// system does.
const SetupBound = 30 * time.Second

// Room is a room that bwrap has built, with a PID 1 that is known for certain and only
// waits. Whoever started it ends it: package supervise.
type Room struct {
	proc.Kept
	Cred    *proc.Cred  // who it runs as; nil if as sbxrun
	HostNet bool        // it has the caller's network namespace
	Exec    *enter.Exec // the plan's command, held; nil if it has none

	info  *os.File // read end
	ready *os.File // likewise
}

// Start forks the keeper, with bwrap below it and, if the plan has a command, what
// enters the room for that as soon as it is built. It returns once the room's PID 1 is
// verified and held by a pidfd, and so is the command's init; the payload waits for its
// release. Without a command it returns when the room is built. stdio stays the caller's,
// who may close it; bwrap speaks on stdio[2]. An error is a *[result.Error], and nothing is
// left.
func (p *Plan) Start(ctx context.Context, stdio [3]*os.File, tty *proc.Terminal, confirm bool) (*Room, error) {
	mounts, err := p.detach()
	if err != nil {
		return nil, err
	}
	defer closeAll(mounts) // the keeper has copies
	r := &Room{Cred: p.cred, HostNet: p.hostNet}
	err = p.start(ctx, r, mounts, stdio, tty, confirm)
	for _, f := range []*os.File{r.info, r.ready} {
		if f != nil {
			f.Close()
		}
	}
	if err != nil {
		return nil, r.abandon(err)
	}
	return r, nil
}

// Entry is the plan's command.
func (p *Plan) Entry() *enter.Entry {
	return &enter.Entry{Cred: p.cred, HostNet: p.hostNet, Command: p.command, Path: p.path, Env: values.Pairs(p.env), Workdir: p.Workdir,
		Terminal: p.terminal, Bounds: p.Bounds, Filter: p.filter}
}

// start leaves it to its caller to bring an unfinished room to an end.
func (p *Plan) start(ctx context.Context, r *Room, mounts []*os.File, stdio [3]*os.File, tty *proc.Terminal, confirm bool) error {
	// Each word ends with a NUL, the last one too: it may be empty.
	args, err := memory("args", []byte(strings.Join(append(slices.Clone(p.words), "--chdir", "/"), "\x00")+"\x00"))
	if err != nil {
		return err
	}
	defer args.Close()
	hold, err := HoldFile()
	if err != nil {
		return err
	}
	defer hold.Close()
	var infoEnd, readyEnd *os.File
	if r.info, infoEnd, err = pipe("info", true); err != nil {
		return err
	}
	defer infoEnd.Close()
	if r.ready, readyEnd, err = pipe("ready", false); err != nil {
		return err
	}
	defer readyEnd.Close()
	cmd := proc.Command{
		Program: &proc.Program{
			Path: p.Program.Path,
			Args: []string{"bwrap", "--args", strconv.Itoa(argsFD), "--info-fd", strconv.Itoa(infoFD), "--as-pid-1", "--", holdPath},
			// bwrap needs but a place for its errors.
			Files: append([]*os.File{stdio[2], stdio[2], stdio[2], args, infoEnd, readyEnd, hold}, p.copies...),
			Stage: mounts,
		},
		Cred: p.cred, Terminal: tty, Remove: p.Bounds.Remove,
	}
	entry, furnishing := p.Entry(), p.furnishing()
	entry.Confirm, furnishing.Ready = confirm, r.ready
	var idle *enter.Furnisher
	if len(p.command) > 0 {
		r.Exec, cmd.Way, err = entry.Prepare(stdio, furnishing)
	} else {
		idle, cmd.Way, err = entry.PrepareIdle(furnishing)
	}
	if err != nil {
		return err
	}
	if idle != nil {
		defer idle.Close()
	}
	r.Keeper, err = proc.Keep(cmd)
	// bwrap's must be the only writers left, so that its death ends the streams.
	infoEnd.Close()
	readyEnd.Close()
	if err != nil {
		return err
	}
	deadline := time.Now().Add(SetupBound)
	if err := r.identify(ctx, deadline); err != nil {
		return err
	}
	outer, err := r.mountsOwner()
	if err != nil {
		return err
	}
	defer outer.Close()
	if idle != nil {
		idle.Entered()
		return idle.Furnish(ctx, r.Room, outer, deadline)
	}
	r.Exec.Entered()
	r.Exec.Keeper = r.Keeper
	if err := r.Exec.EnterNew(r.Room, outer); err != nil {
		return err
	}
	if err := r.Exec.Identify(ctx, deadline); err != nil {
		return err
	}
	r.Init, r.InitNS = r.Exec.Init, r.Exec.InitNS
	return nil
}

// pipe makes a pipe of which our end is the one for reading. It takes deadlines if it is
// pollable; what enters has to wait at its end.
func pipe(name string, pollable bool) (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	if err := unix.SetNonblock(fds[0], pollable); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}

// identify reads who the room's PID 1 is and makes sure of it. Only then may it ever be
// signalled.
func (r *Room) identify(ctx context.Context, deadline time.Time) error {
	stop := proc.ReadUntil(ctx, r.info, deadline)
	child, err := newStatusStream(r.info).child()
	stop()
	if err != nil {
		return err
	}
	if r.Room, err = proc.Open(child.pid); err != nil {
		return fmt.Errorf("bwrap's child %d: %w", child.pid, err)
	}
	r.RoomNS = child.pidNS
	return verify(r.Room, r.Keeper.PID)
}

// verify makes sure that a process is a child of our keeper's child and the first of a PID
// namespace. There is one such: nobody but bwrap has run below the keeper yet.
func verify(room *proc.Process, keeper int) error {
	st, err := proc.ReadStat(room.PID)
	if err != nil {
		return err
	}
	// The keeper's child is not reaped before its own child is dead, or the keeper's:
	// the number is its own as long as the room lives.
	above, err := proc.ReadStat(st.Parent)
	if err != nil {
		return err
	}
	if above.Parent != keeper {
		return fmt.Errorf("process %d is not below our bwrap", room.PID)
	}
	n, err := proc.NSPID(room.PID)
	if err != nil {
		return err
	}
	if n != 1 {
		return fmt.Errorf("process %d is number %d of its PID namespace, not the first", room.PID, n)
	}
	if room.Exited() {
		return proc.ErrGone // so all of the above may have been about another
	}
	return nil
}

// mountsOwner returns the user namespace that the room's mounts belong to.
func (r *Room) mountsOwner() (*os.File, error) {
	mounts, err := proc.OpenNamespace(r.Room.PID, "mnt")
	if err != nil {
		return nil, err
	}
	defer unix.Close(mounts)
	if r.Room.Exited() {
		return nil, proc.ErrGone // so it may be another's
	}
	fd, err := unix.IoctlRetInt(mounts, unix.NS_GET_USERNS) // ioctl_ns(2), Linux 4.9
	if err != nil {
		return nil, fmt.Errorf("ask for the user namespace of the room's mounts: %w", err)
	}
	return os.NewFile(uintptr(fd), "user namespace"), nil
}

// abandon ends a room that did not come to be. Its PID 1 may be unknown, so it is
// the keeper that kills what it has.
func (r *Room) abandon(cause error) error {
	var reapErr error
	if r.Keeper != nil {
		reapErr = r.Abandon(time.Now().Add(SetupBound))
		if err := r.Keeper.StartError(); err != nil {
			cause = err // of bwrap or of what enters, and so the rest
		}
	}
	r.Close()
	e := &result.Error{Code: "setup", Message: "bubblewrap could not set up the sandbox", Err: cause}
	var step *proc.StartError
	switch {
	case errors.As(cause, &step): // which says of what it is
		e.Message = "cannot set up the sandbox: " + step.Error()
	case errors.Is(cause, os.ErrDeadlineExceeded):
		e.Message = fmt.Sprintf("bubblewrap did not set up the sandbox within %v", SetupBound)
	case errors.Is(cause, io.EOF), errors.Is(cause, proc.ErrGone), errors.Is(cause, fs.ErrNotExist), errors.Is(cause, enter.ErrClosed):
		// its own words are on stderr
	default:
		e.Message = "cannot set up the sandbox: " + cause.Error()
	}
	if reapErr != nil {
		e.Message += fmt.Sprintf("; and it could not be ended: %v", reapErr)
	}
	return e
}

// Close gives up all descriptors. Should the keeper still have something, it
// goes on killing it.
func (r *Room) Close() {
	if r.Keeper != nil {
		r.Keeper.Kill()
	}
	if r.Exec != nil {
		r.Exec.Close()
	}
	if r.Room != nil {
		r.Room.Close()
	}
}
