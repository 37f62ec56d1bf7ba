package main

import (
	"fmt"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

func execCommand(args []string, begin time.Time) int {
	var x execution
	x.job = job{id: newID(), where: "of the command", ends: &x.flags.Ends, tells: &x.flags.Tells, begin: begin, signals: watchSignals()}
	words, err := cli.Parse(&x.flags, args)
	if err != nil {
		return fail(usageError(err))
	}
	if x.flags.Help {
		return help("exec")
	}
	var name string
	if name, x.command, err = cli.SplitExec(words); err != nil {
		return fail(usageError(err))
	}
	return x.run(name, args)
}

// execution is one run of the exec command.
type execution struct {
	job
	flags   cli.Exec
	sandbox *state.Entry
	init    *proc.Process
}

func (x *execution) run(name string, args []string) int {
	var err error
	switch {
	case x.flags.JSON && x.flags.Tty:
		return fail(usageError(errJSONOnTerminal))
	case x.flags.Detach && (x.flags.JSON || x.flags.Tty):
		return fail(usageError(errDetached))
	case x.flags.Detach && caller == nil:
		return detach("exec", args, printExec)
	}
	if x.report, err = openReport(x.flags.Report); err != nil {
		return fail(err)
	}
	if x.sandbox, err = find(name); err != nil {
		return x.notStarted(err)
	}
	release, err := x.sandbox.HoldActivity()
	if err != nil {
		return x.notStarted(err)
	}
	defer release()
	if x.init, err = initOf(x.sandbox); err != nil {
		return x.notStarted(err)
	}
	entry, err := x.entry()
	if err != nil {
		return x.notStarted(err)
	}
	x.tty = x.flags.Tty
	if caller != nil {
		caller.orElse(func() { x.signals.cancel(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL}) })
	}
	start := func(s *streams) supervise.Start { return supervise.Inside(entry, s.payload, s.terminal, s.started) }
	return x.carryOut(start, supervise.Options{Doomed: x.doomed, Released: x.released}, nil)
}

// entry is what is run in the sandbox, and as whom.
func (x *execution) entry() (*nsenter.Entry, error) {
	set, err := variables(x.sandbox)
	if err != nil {
		return nil, err
	}
	if x.flags.InheritEnv {
		inherit(&set, true)
	}
	if err := addVariables(&set, &x.flags.Vars); err != nil {
		return nil, usageError(err)
	}
	workdir := x.flags.Workdir
	if workdir == "" {
		workdir = x.sandbox.Record.Workdir
	}
	path, _ := set.Lookup("PATH")
	return &nsenter.Entry{
		Init:     x.init,
		Cred:     credOf(&x.sandbox.Record),
		HostNet:  x.sandbox.Record.Net == "host",
		Command:  x.command,
		Path:     path,
		Env:      pairs(set.Vars()),
		Workdir:  workdir,
		Terminal: x.flags.Tty,
	}, nil
}

// doomed says whether the sandbox has ended, and the command with it. The
// command's end is seen first: the sandbox's init waits for it (pid_namespaces(7)).
func (x *execution) doomed() bool {
	const moment = 500 * time.Millisecond
	return x.init.Wait(time.Now().Add(moment)) == nil
}

// released tells the caller of a detached command that it runs.
func (x *execution) released() {
	if caller != nil && caller.tell(handover{ID: x.id, Status: "running"}) != nil {
		x.signals.cancel(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL})
	}
}

func printExec(said handover) error {
	_, err := fmt.Println(said.ID)
	return err
}
