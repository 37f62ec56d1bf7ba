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
	"github.com/sbxrun/sbxrun/internal/detach"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// caller is who waits for our word; nil if we are not in the background.
var caller *detach.Caller

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

// inBackground has a command carried out in the background. describe returns the result once it runs.
func inBackground(command string, args []string, describe func(detach.Handover) (output.Result, error)) (output.Result, error) {
	var said detach.Handover
	err := state.CheckVisible()
	if err == nil {
		if said, err = detach.Spawn(command, args); err != nil {
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

// requests are what a process in the background is asked for: by signals, and by the end of
// the caller that waits for its word.
type requests struct {
	ctx    context.Context
	giveUp context.CancelCauseFunc
	of     atomic.Pointer[asked] // once there is something to end
}

// asked is what is asked for its end by a signal, and finds the rest on its record.
type asked interface{ Asked(syscall.Signal) }

func watchRequests() *requests {
	// Before anybody can know of us: SIGTERM is a request, and would end us.
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

// made says what signals are about from here on.
func (r *requests) made(of asked) { r.of.Store(&of) }

// abandon ends what nobody knows of.
func (r *requests) abandon() {
	r.giveUp(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL})
}

// background is a process in the background.
func background(begin time.Time) int {
	var command string
	var args []string
	var err error
	if caller, command, args, err = detach.Receive(); err != nil {
		return result.ExitNotStarted // nobody is there
	}
	switch command {
	case "start":
		return superviseSandbox(args, begin)
	case "exec":
		return execCommand(args, begin)
	}
	return result.ExitNotStarted
}
