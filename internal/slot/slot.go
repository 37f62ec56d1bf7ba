// Package slot is the interface between the server and the sandboxes in which its calls run. A sandbox is
// either built on demand or comes from a pool. The server takes a slot, runs commands in it, accesses its
// files, and gives it back.
package slot

import (
	"context"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Kind is the origin of a slot, as in the report of a call.
type Kind string

// Origins of a slot.
const (
	Cold Kind = "cold" // built on demand
	Warm Kind = "warm" // from the pool
)

// Policy is the configuration of a slot: what it shows, and the limits for all of its commands together.
// Slots with equal policies are interchangeable.
type Policy struct {
	room.Policy
	Limits   limits.Request // for the whole slot
	Lifetime time.Duration  // 0 for no limit
	// ProofTimeout limits the wait for the proof of the slot's end, and of the end of each command that does not
	// set one; 0 for 5 s.
	ProofTimeout time.Duration
	// Commands are the limits that its commands will need, which not every slot can enforce.
	Commands limits.Request
	// Parts, if not nil, has the overlays, volumes, snapshot and network of the policy. Such a slot is cold.
	// Take ends the parts if it fails; otherwise they end with the slot.
	Parts *sandbox.Parts
	// Program, if not nil, is the only command of the slot. A source may have started its interpreter in
	// advance, which then gets the text in [Command.Program].
	Program *Program
}

// Program describes how to run a program in a single file.
type Program struct {
	Args   []string // including the path of the file
	File   string   // name in the workspace
	Limits limits.Request
	Ahead  int // interpreters to start in advance
}

// Source provides slots.
type Source interface {
	// Take returns a slot for the exclusive use of a tenant, or a *[result.Error]. It blocks until one is
	// available or ctx is done. The slot does not end with ctx.
	Take(ctx context.Context, tenant string, p Policy) (Slot, error)
	// Rooms returns the number of idle sandboxes in the pool, of all sandboxes including those in use or
	// being built or ended, and of those whose end was unproven.
	Rooms() (idle, all, left int)
}

// Slot is a sandbox for calls.
type Slot interface {
	Kind() Kind
	// Start starts a command, as [bwrap.Command.Start] does.
	Start(ctx context.Context, c Command) (Running, error)
	// Files returns the initial directory of commands. It stays open as long as the slot.
	Files() (*workspace.Dir, error)
	// Ended is closed when the slot has ended, by itself or because of its lifetime.
	Ended() <-chan struct{}
	// Give returns the slot. It is called once, ends everything that still runs there, and returns when all
	// of it has exited. Of the result, the verdict and the survivors count. A slot with an unproven command
	// must not be reused.
	Give() (*result.Result, error)
}

// Running is a started command.
type Running interface {
	Wait() (*result.Result, error)
	Signal(sig syscall.Signal) error
	SignalAlone(sig syscall.Signal) error // only to the command's own process
}

// Command is a command.
type Command struct {
	Args    []string
	Env     []string // additional variables, NAME=VALUE
	Dir     string   // "" for the default
	Program string   // content of the file, in a slot with a program
	supervise.Options
}
