package bwrap

import (
	"context"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Result is how a command has ended, and what proves that nothing of it is left.
type Result = nsenter.Result

// Error is a failure that is not the command's: what happened, in Message, and what to do
// about it, in Hint. Code is stable, and for programs.
type Error = nsenter.Error

// Limits are what a command may use; what is zero is not limited.
type Limits = nsenter.Limits

// Command is a command with a sandbox of its own. It is used once. Once Start has returned,
// Signal and Wait may be called by any goroutine.
type Command struct {
	Policy

	Args []string // the command and its arguments

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

// Run starts the command and waits for its end. See Wait for the error.
func (c *Command) Run(ctx context.Context) (*Result, error) {
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	return c.Wait()
}

// Start builds the sandbox and starts the command, and returns when it was executed, with
// its limits in force. The command ends when ctx is done: with the cause "timeout" if its
// deadline has passed, or else "canceled", whether or not Wait was called. An error is an
// [*Error]: the command never ran, and nothing of it is left. Start blocks for as long as bubblewrap and
// then the command's execve(2) take, thirty seconds at most each, or until ctx is done; and after an error
// until nothing is left, as Wait does.
func (c *Command) Start(ctx context.Context) error {
	if err := c.run.Started(); err != nil {
		return err
	}
	if len(c.Args) == 0 {
		return &Error{Code: "usage", Message: "bwrap: no command given"}
	}
	_, file := c.Stdout.(*os.File)
	plan, err := c.plan(c.Args, c.Stdout != nil && !file)
	if err != nil {
		return supervise.AsError(err)
	}
	defer plan.Close()
	c.run, err = job.NewRun(ctx, supervise.Place{Plan: plan}, job.Spec{
		Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, MaxOutput: c.MaxOutput,
		Limits: limits.Request(c.Limits), Timeout: c.Timeout, Grace: c.Grace, ProofTimeout: c.ProofTimeout,
	})
	if err != nil {
		return supervise.AsError(err)
	}
	return nil
}

// Wait waits for the command's end, and returns when nothing of it is left, which the
// result's Verdict says, and its output is passed on. Later calls return the same. The error
// is nil however the command has ended: look at the result's Cause, ExitCode and Status. It
// is an [*Error] if the proof could not be had, or output was lost; then there is a result as
// well.
func (c *Command) Wait() (*Result, error) { return c.run.Wait() }

// Signal sends a signal to all processes of the command, in one step of the kernel's. An
// error means that it has ended, or that there is no such signal.
func (c *Command) Signal(sig syscall.Signal) error { return c.run.Signal(sig) }
