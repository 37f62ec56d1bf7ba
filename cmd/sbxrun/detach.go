package main

import (
	"errors"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/detach"
	"github.com/sbxrun/sbxrun/internal/state"
)

// caller is who waits for our word; nil if we are not in the background.
var caller *detach.Caller

var errDetachedOnTerminal = errors.New("--detach and --tty do not go together: nobody is there any more for what is written")

// inBackground has a command carried out in the background, and prints what comes of it.
func inBackground(command string, args []string, asJSON bool, print func(detach.Handover) error) int {
	var said detach.Handover
	if err := state.CheckProc(); err != nil {
		said = detach.Handover{Error: asError(err).Report(), Code: result.ExitNotStarted}
	} else if said, err = detach.Spawn(command, args); err != nil {
		var none *admission.Leave
		return fail(none.Explain(&result.Error{Code: "detach", Message: "cannot start the supervisor: " + err.Error(), Err: err}))
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
	if err := print(said); err != nil {
		return fail(printError(err))
	}
	return 0
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
