package main

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/detach"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// caller is who waits for our word; nil if we are not in the background.
var caller *detach.Caller

// inBackground has a command carried out in the background, and prints what comes of it.
func inBackground(command string, args []string, asJSON bool, print func(detach.Handover) error) int {
	var said detach.Handover
	if err := state.CheckVisible(); err != nil {
		said = detach.Handover{Error: asError(err).Report(), Code: result.ExitNotStarted}
	} else if said, err = detach.Spawn(command, args); err != nil {
		var none *admission.Permit
		e := none.Explain(&result.Error{Code: "detach", Message: "cannot start the supervisor: " + err.Error(), Err: err})
		said = detach.Handover{Error: e.Report(), Code: cmp.Or(e.ExitCode, result.ExitNotStarted)}
	}
	if said.Warning != "" {
		warn(errors.New(said.Warning))
	}
	if e := said.Error; e != nil {
		if asJSON {
			if err := printJSON(said); err != nil {
				return fail(printError(err))
			}
		}
		return fail(&result.Error{Code: e.Code, Message: e.Message, Hint: e.Hint, ExitCode: said.Code})
	}
	return printed(print(said))
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
