package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

func execCommand(args []string, begin time.Time) int {
	var x execution
	x.command = command{Job: job.Job{ID: job.NewID()}, where: "of the command", ends: &x.flags.Ends, tells: &x.flags.Tells}
	x.Terms.Begin = begin
	words, err := cli.Parse(&x.flags, args)
	if err != nil {
		return failUsage(&x.flags, err)
	}
	var name string
	if name, x.argv, err = cli.SplitExec(words); err != nil {
		return fail(usageError(err))
	}
	return x.run(name, args)
}

// execution is one run of the exec command.
type execution struct {
	command
	flags   cli.Exec
	sandbox *state.Entry
	access  state.Access
}

func (x *execution) run(name string, args []string) int {
	x.tty = x.flags.Tty
	err := x.checkOutput()
	switch {
	case err != nil:
		return fail(err)
	case room.CheckWorkdir(x.flags.Workdir) != nil:
		return fail(room.CheckWorkdir(x.flags.Workdir))
	case x.flags.Detach && x.flags.Tty:
		return fail(usageError(errDetachedOnTerminal))
	case x.flags.Detach && (strings.HasPrefix(x.flags.Report, "fd:") || descriptor(x.flags.Report) != ""):
		return fail(usageError(errors.New("--detach: the report cannot go to a descriptor, which ends with us; name a file")))
	case busyTerms(&x.flags.Busy).Check() != nil:
		return fail(usageError(busyTerms(&x.flags.Busy).Check()))
	case x.flags.Detach && caller == nil:
		return detach("exec", args, x.flags.JSON, x.printStarted)
	}
	x.flags.JSON = x.flags.JSON && !x.flags.Detach // printStarted has seen to that
	if x.report, err = openReport(x.flags.Report); err != nil {
		return fail(err)
	}
	// Its limit on tasks is within the sandbox's. Before there are threads, which a wait would be too long for.
	if x.Leave, err = admit(context.Background(), &x.flags.Busy, 0, x.flags.Quiet); err != nil {
		return x.notStarted(err)
	}
	x.signals = watchSignals()
	release, err := x.find(name)
	if err != nil {
		return x.notStarted(err)
	}
	defer release()
	if x.Place.Entry, err = x.entry(); err != nil {
		return x.notStarted(err)
	}
	if x.Limits, err = planLimits(&x.flags.Limits, x.access.Cgroups); err != nil {
		return x.notStarted(err)
	}
	if caller != nil {
		// Somebody may want to unmount the caller's directory.
		if err := os.Chdir("/"); err != nil {
			return x.notStarted(err)
		}
		caller.orElse(func() { x.signals.cancel(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL}) })
	}
	if err = x.prepare(x.Terms.Begin); err != nil {
		return x.notStarted(err)
	}
	if x.start() {
		x.released()
	}
	res, delivered := x.wait()
	x.settle(&res)
	return x.end(res, delivered)
}

// settle names the cause where the command has ended because its sandbox was to
// end: first all that is in a sandbox is signalled, and what the command made of that
// does not matter.
func (x *execution) settle(res *result.Result) {
	if res.Cause == result.Lost && x.doomed() {
		res.Cause = result.Killed
	}
	if res.Err == nil {
		x.released() // if it was over before that could be told
	}
	if res.Cause != result.Signaled && res.Cause != result.Exited {
		return
	}
	if x.sandbox.Ending() {
		res.Cause = result.Killed
	}
}

// find finds the sandbox, marks it as used, and takes hold of its PID 1.
func (x *execution) find(name string) (release func(), err error) {
	dir, err := state.Look(state.Mine())
	if err != nil {
		return nil, err
	}
	sandbox, access, ok := dir.Access(name)
	if !ok {
		// Perhaps the beginning of an id. Or there is nothing to enter.
		e, err := dir.Find(name)
		if err != nil {
			return nil, err
		}
		if sandbox, access, ok = dir.Access(e.ID); !ok {
			return nil, cannotEnter(e)
		}
	}
	if x.Place.Room, err = access.Init.Open(); errors.Is(err, proc.ErrGone) {
		err = &result.Error{Code: "ended", Message: "the sandbox " + name + " has just ended"}
	}
	if err != nil {
		return nil, err
	}
	x.sandbox, x.access = sandbox, access
	return sandbox.HoldActivity()
}

// cannotEnter says why there is nothing to enter.
func cannotEnter(e *state.Entry) error {
	switch {
	case !lives(e):
		return &result.Error{Code: "ended", Message: "the sandbox " + title(e) + " has ended: " + e.Status()}
	case e.Record.Phase == state.Starting:
		return &result.Error{Code: "starting", Message: "the sandbox " + title(e) + " is still being set up", Hint: "try again in a moment"}
	}
	return &result.Error{Code: "enter", Message: "the sandbox " + title(e) + " cannot be entered: what is needed for that is damaged"}
}

// entry is what is run in the sandbox, and as whom.
func (x *execution) entry() (*enter.Entry, error) {
	var set values.Environment
	for _, pair := range x.access.Env {
		if name, value, ok := strings.Cut(pair, "="); ok {
			set.Put(values.Var{Name: name, Value: value})
		}
	}
	if x.flags.InheritEnv {
		inherit(&set, true)
	}
	if err := addVariables(&set, &x.flags.Vars, float64(x.flags.Cpus)); err != nil {
		return nil, usageError(err)
	}
	workdir := x.flags.Workdir
	if workdir == "" {
		workdir = x.access.Workdir
	}
	set.Put(values.Var{Name: "PWD", Value: workdir})
	path, _ := set.Lookup("PATH")
	filter, err := seccomp.ByName(x.access.Filter)
	if err != nil {
		return nil, err
	}
	return &enter.Entry{
		Cred:     x.access.Cred,
		HostNet:  x.access.Net == "host",
		Command:  x.argv,
		Path:     path,
		Env:      values.Pairs(set.Vars()),
		Workdir:  workdir,
		Terminal: x.flags.Tty,
		Filter:   filter,
	}, nil
}

// doomed says whether the sandbox has ended, and the command with it. The
// command's end is seen first: the room's PID 1 waits for it (pid_namespaces(7)).
func (x *execution) doomed() bool {
	const moment = 500 * time.Millisecond
	return x.Place.Room.Wait(time.Now().Add(moment)) == nil
}

// released tells the caller of a detached command that it runs.
func (x *execution) released() {
	if caller != nil && caller.tell(handover{ID: x.ID, Status: "running"}) != nil {
		x.signals.cancel(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL})
	}
}

func (x *execution) printStarted(said handover) error {
	if x.flags.JSON {
		return json.NewEncoder(os.Stdout).Encode(said)
	}
	_, err := fmt.Println(said.ID)
	return err
}
