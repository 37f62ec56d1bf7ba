package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// caller is the sbxrun process that waits for this one to start a command in the background; nil in the foreground.
var caller *sandbox.Caller

// fail prints an error, or reports it to the caller of a detached command, and returns the exit code.
func fail(err error) int {
	if caller == nil {
		return output.Fail(err)
	}
	caller.Fail(output.Error(err), output.Code(err))
	return output.Code(err)
}

// warn prints a problem that does not stop the command, or leaves that to the caller of a detached command.
func warn(err error) {
	if caller == nil {
		output.Warn(err)
	} else {
		caller.Warning = strings.TrimPrefix(caller.Warning+"; "+err.Error(), "; ")
	}
}

// inBackground runs a command in the background. describe returns the result once it runs.
func inBackground(command string, args []string, describe func(sandbox.Handover) (output.Result, error)) (output.Result, error) {
	var said sandbox.Handover
	err := state.CheckVisible()
	if err == nil {
		if said, err = sandbox.Spawn(command, args); err != nil {
			var none *admission.Permit
			err = none.Explain(&result.Error{Code: "detach", Message: "cannot start the supervisor: " + err.Error(), Err: err})
		}
	}
	if said.Warning != "" {
		output.Warn(errors.New(said.Warning))
	}
	if e := said.Error; e != nil {
		err = &result.Error{Code: e.Code, Message: e.Message, Hint: e.Hint, ExitCode: said.Code}
	}
	if err != nil {
		said.Error, said.Code = output.Error(err).Report(), output.Code(err)
		return output.Result{Value: said}, err
	}
	return describe(said)
}

// requests passes on requests to end a background process: signals, and the end of a caller that still waits for it.
type requests struct {
	ctx    context.Context
	giveUp context.CancelCauseFunc
	of     atomic.Pointer[asked] // nil until there is something to end
}

// asked is a sandbox or exec that a signal asks to end. The details are in its record.
type asked interface{ Asked(syscall.Signal) }

func watchRequests() *requests {
	// Do this before other processes know this one, because SIGTERM is a request.
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	got := make(chan os.Signal, 4)
	notify(got, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
	r := &requests{}
	r.ctx, r.giveUp = context.WithCancelCause(context.Background())
	caller.OrElse(r.abandon)
	go func() {
		for sig := range got {
			if of := r.of.Load(); of != nil {
				(*of).Asked(sig.(syscall.Signal))
			} else {
				r.giveUp(supervise.Request{Cause: result.Canceled, Signal: sig.(syscall.Signal)})
			}
		}
	}()
	return r
}

// made sets the target of all further signals.
func (r *requests) made(of asked) { r.of.Store(&of) }

func (r *requests) abandon() {
	r.giveUp(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL})
}

// background is the main function of a process in the background.
func background(begin time.Time) int {
	var command string
	var args []string
	var err error
	if caller, command, args, err = sandbox.Receive(); err != nil {
		return result.ExitNotStarted // there is no caller to report to
	}
	switch command {
	case "start":
		return superviseSandbox(args, begin)
	case "exec":
		return execCommand(args, begin)
	}
	return result.ExitNotStarted
}
