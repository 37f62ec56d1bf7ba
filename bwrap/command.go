package bwrap

import (
	"context"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Result describes how a command ended and whether all its processes are proven to have exited.
type Result = nsenter.Result

// Error is a failure of the sandbox, not of the command. Message says what happened, Hint how to fix it.
// Code is stable and meant for programs.
type Error = nsenter.Error

// Limits bound the resources of a command. A zero field is no limit.
type Limits = nsenter.Limits

// Command runs one command in a new sandbox. It cannot be reused. After Start has returned,
// any goroutine may call Signal and Wait.
type Command struct {
	Policy

	Args []string // the command and its arguments

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

// Run starts the command and waits for its end. See Wait for the error.
func (c *Command) Run(ctx context.Context) (*Result, error) {
	if err := c.Start(ctx); err != nil {
		return nil, err
	}
	return c.Wait()
}

// Start builds the sandbox and starts the command. It returns after the command's execve(2), with the limits in force.
// When ctx is done the command is killed, whether or not Wait was called: with the cause "timeout" if the deadline of
// ctx has passed, and "canceled" otherwise. An error is an [*Error] and means that the command never ran and all
// processes have exited. Start blocks while bubblewrap builds the sandbox and during the execve(2), at most thirty
// seconds each, or until ctx is done; after an error it waits like Wait until all processes have exited.
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
	run := &supervise.Command{Place: supervise.Place{Plan: plan}, Confirm: true, Options: supervise.Options{
		Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, MaxOutput: c.MaxOutput,
		Limits: limits.Request(c.Limits), Timeout: c.Timeout, Grace: c.Grace, ProofTimeout: c.ProofTimeout,
	}}
	if err := run.Start(ctx); err != nil {
		return supervise.AsError(err)
	}
	c.run = run
	return nil
}

// Wait waits until all processes of the command have exited, which the result's Verdict confirms, and its output has
// been copied. Later calls return the same values. The error is nil whether the command succeeded or failed: see the
// result's Cause, ExitCode and Status. It is an [*Error], together with a result, if the proof failed or output
// was lost.
func (c *Command) Wait() (*Result, error) { return c.run.Wait() }

// Signal sends a signal to all processes of the command atomically. An error means that the command has ended or
// that the signal does not exist.
func (c *Command) Signal(sig syscall.Signal) error { return c.run.Signal(sig) }
