package nsenter

import (
	"context"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Command runs one command in an existing room. It cannot be reused. After Start has returned,
// any goroutine may call Signal and Wait.
type Command struct {
	// Sandbox is the name or ID of a sandbox that the caller has started with `sbxrun start`. It counts as used while the
	// command runs.
	Sandbox string
	// Room is the room to enter if Sandbox is empty: see [github.com/sbxrun/sbxrun/bwrap.Room.Command].
	Room *Room

	Args []string // the command and its arguments
	// Env adds variables, as NAME=VALUE, to the room's, which include PATH, HOME and USER. Nothing comes from the
	// environment of this process.
	Env []string
	Dir string // absolute path in the room; "" for the room's default

	// The command's streams, as in os/exec: nil is /dev/null, an *os.File is passed to the command directly, and
	// for other values a goroutine copies through a pipe. If copying fails, the command is killed. After the command
	// has ended, Wait does not wait for a pending Read of Stdin, and at most ten seconds for a pending Write;
	// then the remaining output is lost, and the Write may still be running.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// MaxOutput limits the bytes written to Stdout and to Stderr each, or to both together if they are the same
	// writer. A command that writes more is killed, with the cause "output-limit". 0 is no limit;
	// set one if the output goes to memory.
	MaxOutput int64

	Limits  Limits
	Timeout time.Duration // from the start of the command; 0 for none
	// Grace is the time between SIGTERM, which is sent to all processes of the command, and SIGKILL; 0 sends
	// SIGKILL at once. When ctx is cancelled, only the command's own process gets SIGTERM.
	Grace time.Duration
	// ProofTimeout limits the wait for the proof that all processes have exited; 0 for 5 s.
	ProofTimeout time.Duration

	run *supervise.Command
}

// Limits bound the resources of a command. A zero field is no limit. Start fails if this machine cannot enforce a limit;
// docs/concepts/limits.md lists the requirements.
type Limits struct {
	Memory int64 // bytes, of all processes and the page cache they fill
	// MemorySwap limits memory and swap together; -1 is unlimited. Without it, the command gets no swap.
	MemorySwap  int64
	Pids        int64 // processes and threads; at least 4
	CPUs        float64
	CPUTime     time.Duration // of all processes together
	FSize       int64         // bytes, of one file
	NoFile      int64         // descriptors of one process; with Memory, 1,024 by default
	Stack       int64         // bytes, of one thread
	Nice        *int
	OOMScoreAdj *int
}

// Room describes how to enter a room that package bwrap has built: see [github.com/sbxrun/sbxrun/bwrap.Room.Way]. Another
// program can enter it, too, if it gets the fields, and Init with SCM_RIGHTS (unix(7)).
type Room struct {
	// Init is a pidfd of the room's PID 1. The caller closes it. Processes that are not the PID 1 of a room of
	// package bwrap are refused.
	Init *os.File
	// User and Group are the IDs of the room's processes, as seen from outside.
	User, Group uint32
	HostNetwork bool     // the room shares the network of its builder
	Filter      string   // for system calls: "default", "namespaces" or "off"
	Limits      Limits   // of each process: FSize, NoFile, Stack, Nice and OOMScoreAdj; and CPUs, which they see
	Cgroups     []string // the room's cgroup directories, if it has limits
	Env         []string // NAME=VALUE; may contain secrets
	Dir         string   // default working directory
}

func (r *Room) state() *state.Room {
	net := room.NetNone
	if r.HostNetwork {
		net = room.NetHost
	}
	return &state.Room{
		Init: r.Init, User: proc.Cred{UID: r.User, GID: r.Group}, Net: string(net), Filter: seccomp.Filter(r.Filter),
		Limits: limits.Request(r.Limits).OfProcesses(), Cgroups: r.Cgroups, Env: r.Env, Dir: r.Dir,
	}
}

// Result describes how a command ended and whether all its processes are proven to have exited.
type Result = result.Result

// Error is a failure of the sandbox, not of the command. Message says what happened, Hint how to fix it.
// Code is stable and meant for programs.
type Error = result.Error

// Run starts the command and waits for its end. See Wait for the error.
func (c *Command) Run(ctx context.Context) (*Result, error) {
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	return c.Wait()
}

// Start starts the command. It returns after the command's execve(2), with the limits in force. When ctx is done the
// command is killed, whether or not Wait was called: with the cause "timeout" if the deadline of ctx has passed, and
// "canceled" otherwise. An error is an [*Error] and means that the command never ran and all processes have exited.
// Start blocks while it enters the room, at most ten seconds, and during the execve(2), at most thirty, or until ctx is
// done; after an error it waits like Wait until all processes have exited.
func (c *Command) Start(ctx context.Context) error {
	if err := c.run.Started(); err != nil {
		return err
	}
	if len(c.Args) == 0 {
		return &Error{Code: "usage", Message: "nsenter: no command given"}
	}
	var use *sandbox.Use
	var err error
	switch {
	case (c.Room == nil) == (c.Sandbox == ""):
		return &Error{Code: "usage", Message: "nsenter: give either a Sandbox or a Room"}
	case c.Room == nil:
		use, err = sandbox.Enter(c.Sandbox)
	default:
		use, err = sandbox.In(c.Room.state())
	}
	if err != nil {
		return result.AsError(err, "enter", cannotEnter)
	}
	c.run, err = use.Start(ctx, c.Args, c.Env, c.Dir, supervise.Options{
		Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, MaxOutput: c.MaxOutput,
		Limits: limits.Request(c.Limits), Timeout: c.Timeout, Grace: c.Grace, ProofTimeout: c.ProofTimeout,
	})
	if err != nil {
		return result.AsError(err, "enter", cannotEnter)
	}
	return nil
}

const cannotEnter = "cannot enter the sandbox"

// Wait waits until all processes of the command have exited, which the result's Verdict confirms, and its output has
// been copied. Later calls return the same values. The error is nil whether the command succeeded or failed: see the
// result's Cause, ExitCode and Status. It is an [*Error], together with a result, if the proof failed or output
// was lost.
func (c *Command) Wait() (*Result, error) { return c.run.Wait() }

// Signal sends a signal to all processes of the command atomically. An error means that the command has ended or
// that the signal does not exist.
func (c *Command) Signal(sig syscall.Signal) error { return c.run.Signal(sig) }

// SignalAlone sends a signal to the command's own process, but not to its descendants. An error means that the
// process has ended, or that the caller may not signal it.
func (c *Command) SignalAlone(sig syscall.Signal) error { return c.run.SignalAlone(sig) }
