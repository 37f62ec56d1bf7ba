package nsenter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
)

// Command is a command to be run in a room that is there. It is used once. Once Start has
// returned, Signal and Wait may be called by any goroutine.
type Command struct {
	// Sandbox is the name or the id of a sandbox that the caller has started with
	// `sbxrun start`. It counts as used as long as the command runs.
	Sandbox string
	// Room is the room in place of a Sandbox, see [github.com/sbxrun/sbxrun/bwrap.Room.Command].
	Room *Room

	Args []string // the command and its arguments
	// Env is NAME=VALUE for each variable that is added to the room's own, which has a
	// PATH, a HOME and a USER; nothing comes from the environment of this process.
	Env []string
	Dir string // in the room, absolute; "" for the room's own

	// The command's streams, as in os/exec: nil is /dev/null, an *os.File is given to the
	// command as it is, of others a goroutine reads or writes through a pipe. An error of
	// theirs ends the command. When it has ended nobody waits for a Read of Stdin, and for a Write
	// ten seconds at most: then the rest is lost, and the Write may still be going on.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// MaxOutput is how many bytes the command may write to Stdout, and to Stderr, or to both
	// together if they are the same writer: more end it, with the cause "output-limit". 0 is
	// no bound; a buffer in memory wants one.
	MaxOutput int64

	Limits  Limits
	Timeout time.Duration // from when the command begins; 0 for none
	// Grace is from SIGTERM, which goes to all processes of the command, to SIGKILL; 0 for
	// SIGKILL at once. When ctx is cancelled SIGTERM goes to the command alone.
	Grace time.Duration
	// ProofTimeout is how long is waited for the proof that nothing is left; 0 for 5 s.
	ProofTimeout time.Duration

	run *job.Run
}

// Limits are what a command may use; what is zero is not limited. What cannot be enforced on
// this machine is an error of Start, and docs/concepts/limits.md says what it takes.
type Limits struct {
	Memory int64 // bytes, of all processes and the page cache they fill
	// MemorySwap is memory and swap together; -1 is unlimited. Without it there is no swap.
	MemorySwap  int64
	Pids        int64 // processes and threads, four at least
	CPUs        float64
	CPUTime     time.Duration // of all processes together
	FSize       int64         // bytes, of one file
	NoFile      int64         // descriptors of one process; with Memory, 1,024 by default
	Stack       int64         // bytes, of one thread
	Nice        *int
	OOMScoreAdj *int
}

// A Room says how a room is entered that another part of the program has built. Its fields
// are for that part to fill, and for programs that hand a room on to another process.
type Room struct {
	// Init is a pidfd of the room's PID 1. It stays the caller's, and must be that of a room
	// of package bwrap: any other process is refused.
	Init *os.File
	// User and Group are the ids that the room runs under, seen from outside.
	User, Group int
	HostNetwork bool     // it has the network of who has built it
	Filter      string   // for system calls: "default", "namespaces" or "off"
	Cgroups     []string // directories of its own, if it has limits
	Limits      Limits   // of each process: FSize, NoFile, Stack, Nice and OOMScoreAdj; and CPUs, which they see
	Env         []string // NAME=VALUE
	Dir         string   // where commands begin
}

// Result is how a command has ended, and what proves that nothing of it is left.
type Result = result.Result

// Error is a failure that is not the command's: what happened, in Message, and what to do
// about it, in Hint. Code is stable, and for programs.
type Error = result.Error

// Run starts the command and waits for its end. See Wait for the error.
func (c *Command) Run(ctx context.Context) (*Result, error) {
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	return c.Wait()
}

// Start starts the command, and returns when it was executed, with its limits in force. The
// command ends when ctx is done: with the cause "timeout" if its deadline has passed, or else
// "canceled", whether or not Wait was called. An error is an [*Error]: the command never ran,
// and nothing of it is left. Start blocks for as long as the way in takes, ten seconds at most,
// and then the command's execve(2), thirty, or until ctx is done; and after an error until nothing
// is left, as Wait does.
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
		use, err = c.Room.use()
	}
	if err != nil {
		return result.AsError(err, "enter", cannotEnter)
	}
	c.run, err = job.Enter(ctx, use, c.Args, c.Env, c.Dir, job.Spec{
		Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, MaxOutput: c.MaxOutput,
		Limits: limits.Request(c.Limits), Timeout: c.Timeout, Grace: c.Grace, ProofTimeout: c.ProofTimeout,
	})
	if err != nil {
		return result.AsError(err, "enter", cannotEnter)
	}
	return nil
}

// use is the room as package sandbox knows it.
func (r *Room) use() (*sandbox.Use, error) {
	ended := &Error{Code: "ended", Message: "the room has ended, or is none"}
	if uint64(r.User) >= math.MaxUint32 || uint64(r.Group) >= math.MaxUint32 { // that one leaves an id as it is (setresuid(2))
		return nil, &Error{Code: "usage", Message: fmt.Sprintf("nsenter: User %d and Group %d of the Room are no ids", r.User, r.Group)}
	}
	init, err := proc.FromPidfd(r.Init)
	switch {
	case r.Init == nil:
		return nil, &Error{Code: "usage", Message: "nsenter: the room was not started"}
	case errors.Is(err, proc.ErrGone), errors.Is(err, os.ErrClosed):
		return nil, ended
	}
	if err != nil {
		return nil, err
	}
	// Any other process is not ours to enter, and this is the kernel's word: it executes our
	// program, and has not ended meanwhile.
	if !room.Holds(init.PID) || init.Exited() {
		init.Close()
		return nil, ended
	}
	a := state.Access{Net: string(room.NetNone), Workdir: r.Dir, Filter: r.Filter, Cgroups: r.Cgroups, Env: r.Env, Limits: limits.Request(r.Limits).OfProcesses()}
	if r.HostNetwork {
		a.Net = string(room.NetHost)
	}
	if r.User != os.Geteuid() {
		a.Cred = &proc.Cred{UID: uint32(r.User), GID: uint32(r.Group)}
	}
	return &sandbox.Use{Access: a, Room: init}, nil
}

const cannotEnter = "cannot enter the sandbox"

// Wait waits for the command's end, and returns when nothing of it is left, which the
// result's Verdict says, and its output is passed on. Later calls return the same. The error
// is nil however the command has ended: look at the result's Cause, ExitCode and Status. It
// is an [*Error] if the proof could not be had, or output was lost; then there is a result as
// well.
func (c *Command) Wait() (*Result, error) { return c.run.Wait() }

// Signal sends a signal to all processes of the command, in one step of the kernel's. An
// error means that it has ended, or that there is no such signal.
func (c *Command) Signal(sig syscall.Signal) error { return c.run.Signal(sig) }

// SignalAlone sends a signal to the command's own process, and not to those that it has
// started. When it returns the kernel has taken the signal. An error means that the process has
// ended, or that this process may not signal it.
func (c *Command) SignalAlone(sig syscall.Signal) error { return c.run.SignalAlone(sig) }
