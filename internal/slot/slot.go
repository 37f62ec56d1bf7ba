// Package place is where a call of the server runs: one seam, with rooms that are built for
// the call on one side of it, and rooms that were made ahead on the other. The server asks for
// a place, runs commands in it, reaches its files, and gives it back.
package slot

import (
	"context"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Kind says how a place came to be, as the answer of a call tells it.
type Kind string

// How a place came to be.
const (
	Cold Kind = "cold" // built for the call
	Warm Kind = "warm" // made ahead
)

// Policy is what a place shows, and what all of its commands together may use. Policies that
// are equal can have the same rooms.
type Policy struct {
	room.Policy
	Limits   limits.Request // of the place
	Lifetime time.Duration  // 0 for none
	// Commands are limits that its commands will ask for: not all places can have limits.
	Commands limits.Request
	// Parts, if not nil, are what the policy has of overlays, volumes, layers of a snapshot, and of a
	// network by a list. Such a place is cold. Take ends them if it fails; else they end with the place.
	Parts *sandbox.Parts
	// Program, if not nil, is all that will run there. A source may have its interpreter started
	// ahead, and then starts none: it gets the text by [Command.Program].
	Program *Program
}

// Program is how a program is run that is one file.
type Program struct {
	Args   []string // with the file's path
	File   string   // its name in the workspace
	Limits limits.Request
	Ahead  int // how many interpreters wait for the next ones
}

// Source has places.
type Source interface {
	// Take returns a place for a tenant, which nobody else uses until it is given back, or an
	// error that is a *[result.Error]. It blocks until there is one, or ctx is done; the place
	// does not end with ctx.
	Take(ctx context.Context, tenant string, p Policy) (Slot, error)
	// Rooms is how many rooms made ahead wait for a call, how many there are with those that are in
	// use, or are being made or ended, and of how many something may have been left when they ended.
	Rooms() (idle, all, left int)
}

// Slot is a room, or what stands for one.
type Slot interface {
	Kind() Kind
	// Start starts a command, as [bwrap.Command.Start] does.
	Start(ctx context.Context, c Command) (Running, error)
	// Files is the directory in which commands begin. It is open for as long as the place is.
	Files() (*workspace.Dir, error)
	// Ended is closed when the place has ended, by itself or for its lifetime.
	Ended() <-chan struct{}
	// Give gives the place back, and with it all that still runs there; it is called once, and
	// returns when nothing of that is left. Of the result the verdict and the survivors count.
	// A place that may be used again must not be one whose command was unproven.
	Give() (*result.Result, error)
}

// Running is a command that was started.
type Running interface {
	Wait() (*result.Result, error)
	Signal(sig syscall.Signal) error
	SignalAlone(sig syscall.Signal) error // to the command's own process
}

// Command is a command.
type Command struct {
	Args    []string
	Env     []string // NAME=VALUE for each variable beside the place's own
	Dir     string   // "" for the place's own
	Program string   // of a place with one: the file's content
	job.Spec
}
