package main

import (
	"cmp"
	"errors"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/obstacle"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

func execCommand(args []string, begin time.Time) int {
	var x execution
	x.command = command{Command: &supervise.Command{ID: safeopen.RandomName(), Begin: begin}, where: "of the command", leftover: "use exec --detach to keep one running", shared: &x.flags.ForegroundFlags}
	err := cli.Parse(&x.flags, args)
	if err == nil && len(x.flags.Command) == 0 {
		err = errors.New("no command given")
	}
	if err != nil {
		return x.refuse(&x.flags, err)
	}
	x.argv = x.flags.Command
	return x.run(args)
}

type execution struct {
	command
	flags cli.Exec
}

func (x *execution) run(args []string) int {
	x.tty = x.flags.Tty
	err := x.checkFlags()
	switch {
	case err != nil && x.flags.Detach:
		return cli.Finish(&x.flags, output.Result{}, cli.UsageError(&x.flags, err))
	case err != nil:
		return x.refuse(&x.flags, err)
	case x.flags.Detach && caller == nil:
		r, err := inBackground("exec", args, func(said sandbox.Handover) (output.Result, error) {
			return output.Line(said, said.Handle), nil
		})
		return output.Finish(x.flags.JSON, r, err)
	}
	x.asJSON = x.flags.JSON && !x.flags.Detach // the caller prints the handle
	if x.report, err = openReport(&x.flags, x.flags.Report); err != nil {
		return x.notStarted(err)
	}
	var requests *requests
	if caller == nil {
		x.signals = watchWaiting()
	} else {
		requests = watchRequests()
		x.signals = &signals{ctx: requests.ctx, cancel: requests.giveUp, admitted: make(chan struct{})}
	}
	use, err := sandbox.Find(x.flags.Sandbox)
	if err != nil {
		return x.notStarted(err)
	}
	defer use.Close()
	x.Place.Room = use.Room
	if x.Place.Entry, err = x.entry(use); err != nil {
		return x.notStarted(err)
	}
	if x.Planned, err = planLimits(&x.flags.LimitFlags, use.Access); err != nil {
		return x.notStarted(err)
	}
	// Its limit on tasks is within the sandbox's.
	if err = x.admit(&x.flags.AdmissionFlags, 0); err != nil {
		return x.notStarted(err)
	}
	if err = use.Hold(); err != nil { // only now, because a wait for admission does not keep the sandbox alive
		return x.notStarted(err)
	}
	if caller != nil {
		// Do not keep the caller's directory from being unmounted.
		if err := os.Chdir("/"); err != nil {
			return x.notStarted(err)
		}
		if err := x.begin(use, requests); err != nil {
			return x.notStarted(err)
		}
	}
	if err = x.prepare(); err != nil {
		return x.notStarted(err)
	}
	network := x.openCounters(use.Access.Net, use.Room).begin()
	var refused int // before
	if x.advises() {
		refused = len(use.Refused())
	}
	if x.start() {
		if x.record != nil {
			x.record.Running()
		}
		x.released()
	}
	res, delivered := x.wait()
	use.Settle(&res)
	if x.advises() {
		x.hint(use, refused, res, network)
	}
	if res.Err == nil {
		x.released() // in case it ended before the caller was told
	}
	return x.end(res, delivered)
}

// hint prints the hosts that were refused during the exec (all except the first before ones), or else a possible
// obstacle for a command that has failed. The remedy is a flag of sbxrun start.
func (x *execution) hint(use *sandbox.Use, before int, res result.Result, network *counters) {
	f, failed := x.failure(res, network)
	all := use.Refused()
	var used result.ReportNetwork
	for _, r := range all[min(before, len(all)):] {
		used.Hosts = append(used.Hosts, result.ReportHost{Host: r.Host, Refused: 1, Reason: r.Reason})
	}
	what, remedy := refusedHosts(&used)
	if what == "" && failed {
		what, remedy = obstacle.Find(x.Place.Entry, obstacle.Inside{Process: use.Room}, f, room.ThisCaller())
	}
	if strings.HasPrefix(remedy, "-") {
		remedy = "at sbxrun start, " + remedy
	}
	output.Hint(what, remedy)
}

func (x *execution) checkFlags() error {
	switch {
	case x.flags.Detach && x.flags.Tty:
		return errors.New("--detach cannot be combined with --tty: the terminal would have no reader")
	case x.flags.Detach && x.flags.Verbose:
		return errors.New("--verbose: has no effect with --detach, because nobody reads stderr at the end")
	case x.flags.Detach && (strings.HasPrefix(x.flags.Report, "fd:") || descriptor(x.flags.Report) != ""):
		return errors.New("--detach: the report cannot go to a descriptor of the caller; name a file")
	}
	if err := x.checkOutput(); err != nil {
		return err
	}
	if err := room.CheckWorkdir(x.flags.Workdir); err != nil {
		return err
	}
	return busyTerms(&x.flags.AdmissionFlags).Check()
}

func (x *execution) entry(use *sandbox.Use) (*enter.Entry, error) {
	set := use.Env()
	if x.flags.InheritEnv {
		inherit(&set, true)
	}
	if err := addVariables(&set, &x.flags.Vars, float64(x.flags.Cpus)); err != nil {
		return nil, cli.UsageError(&x.flags, err)
	}
	if _, given := set.Lookup("PYTHONUNBUFFERED"); (x.flags.JSON || x.flags.Detach) && !given {
		set.Put(values.Var{Name: "PYTHONUNBUFFERED", Value: "1"}) // as in a sandbox with a command, see room.Policy
	}
	return use.Entry(x.argv, set, x.flags.Workdir, x.flags.Tty), nil
}

// begin creates the record of a detached command before anything is started, so that a full disk is an error.
func (x *execution) begin(use *sandbox.Use, requests *requests) error {
	x.Timeout = time.Duration(x.flags.Timeout)
	record, err := use.NewExec(requests.ctx, x.Command, cmp.Or(int64(x.flags.MaxOutput), maxLog), x.flags.OutputLimit == outputKill)
	if err != nil {
		return err
	}
	x.record = record
	requests.made(record)
	ready := make(chan struct{})
	close(ready)
	x.signals = &signals{ctx: record.Context(), cancel: record.Cancel, hurry: record.Hurry(), ready: ready}
	return record.Begin()
}

// released reports to the caller of a detached command that it runs.
func (x *execution) released() {
	if caller == nil {
		return
	}
	if caller.Tell(sandbox.Handover{ID: x.ID, Handle: x.record.Handle(), Status: string(state.Running)}) != nil {
		x.signals.cancel(supervise.Request{Cause: result.Killed, Signal: syscall.SIGKILL})
	}
}
