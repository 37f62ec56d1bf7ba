package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/version"
)

func runCommand(args []string, begin time.Time) int {
	r := runner{}
	r.command = command{Job: job.Job{ID: job.NewID()}, where: "in the sandbox", ends: &r.flags.Ends, tells: &r.flags.Tells}
	r.Terms.Begin = begin
	var err error
	if r.argv, err = parse(&r.flags, args); err != nil {
		return r.refuse(&r.flags, err)
	}
	if r.flags.Version {
		return printLine("sbxrun " + version.String())
	}
	return r.run()
}

// runner is one run of the run command.
type runner struct {
	command
	flags cli.Run
}

func (r *runner) run() int {
	var err error
	// The report's place first, so that every later failure can be written there.
	if r.report, err = openReport(r.flags.Report); err != nil {
		return r.notStarted(err)
	}
	if err = r.checkFlags(); err != nil {
		return r.notStarted(err)
	}
	r.signals = watchWaiting()
	if !r.flags.PrintCommand {
		if r.Leave, err = admit(r.signals.ctx, &r.flags.Busy, r.flags.Pids, r.flags.Quiet); err != nil {
			diesOf(err)
			return r.notStarted(err)
		}
	}
	close(r.signals.admitted)
	caller := thisCaller()
	if !r.flags.PrintCommand {
		if err = r.prepare(r.Terms.Begin); err != nil {
			return r.notStarted(err)
		}
		caller.Errors = r.Streams.Payload[2]
		<-r.signals.ready // before anything is started
	}
	if err = r.plan(caller); err != nil {
		return r.notStarted(err)
	}
	plan := r.Place.Plan
	defer plan.Close()
	if r.flags.PrintCommand {
		if err = plan.Program.Whole(); err != nil {
			return r.notStarted(err)
		}
		return r.printCommand(plan)
	}
	r.bwrap = &result.ReportBwrap{Path: plan.Program.Path, Version: plan.Program.Version}
	var network *counters
	if r.start() {
		sweepSoon("")
		network = r.openCounters(r.flags.Net, r.Kept().Room)
	}
	res, delivered := r.wait()
	if f, ok := r.failure(res, network); ok {
		what, remedy := recordMeant(r.argv)
		if what == "" {
			what, remedy = plan.Obstacle(f, thisCaller())
		}
		advise(what, remedy)
	}
	plan.Close() // descriptors may be few
	r.diagnose(&res)
	return r.end(res, delivered)
}

// printCommand prints the plan as a command, and writes its filter to where that is wanted.
func (r *runner) printCommand(plan *room.Plan) int {
	from, place := "", r.flags.PrintFilter
	if place != "" {
		var err error
		if from, err = writeFilter(place, plan.FilterBytes()); err != nil {
			return fail(err)
		}
	}
	return printLine(plan.ShellCommand(from))
}

// diagnose finds out why a sandbox could not be set up, if it is this machine.
func (r *runner) diagnose(res *result.Result) {
	const bound = 1500 * time.Millisecond
	const tight = 16 << 20 // of memory
	if res.Err == nil || res.Err.Code != "setup" {
		return
	}
	if m := r.flags.Memory; m > 0 && m < tight {
		res.Err.Hint = "--memory may be too small for the command to start"
		return
	}
	// What is scarce for us is scarce for the diagnosis.
	for _, scarce := range []error{unix.EMFILE, unix.ENFILE, unix.EAGAIN, unix.ENOMEM, unix.ENOSPC} {
		if errors.Is(res.Err, scarce) {
			return
		}
	}
	ctx, cancel := context.WithTimeout(r.signals.ctx, bound)
	defer cancel()
	if e := doctor.Diagnose(ctx, thisCaller()); e != nil && ctx.Err() == nil {
		res.Err = e
	}
}

// checkFlags finds what is wrong with the flags for everybody.
func (r *runner) checkFlags() error {
	r.tty = r.flags.Tty
	if err := r.checkOutput(); err != nil {
		return err
	}
	if err := busyTerms(&r.flags.Busy).Check(); err != nil {
		return usageError(err)
	}
	switch {
	case r.flags.PrintFilter == "":
	case !r.flags.PrintCommand:
		return usageError(errors.New("--print-filter: goes with --print-command"))
	case r.flags.Seccomp == "off":
		return usageError(errors.New("--print-filter: with --seccomp off there is no filter"))
	}
	return nil
}

// plan turns the flags into a policy, and that into a plan.
func (r *runner) plan(caller room.Caller) error {
	policy, err := policyOf(&r.flags.View, &r.flags.Limits, r.argv)
	if err == nil && len(r.argv) == 0 {
		err = errors.New("no command given")
	}
	if err != nil {
		return usageError(err)
	}
	if policy.Meminfo, err = fakeMeminfo(r.flags.FakeMeminfo, &r.flags.Limits); err != nil {
		return err
	}
	policy.Terminal = r.flags.Tty
	if r.Limits, err = planLimits(&r.flags.Limits, nil); err != nil {
		return err
	}
	if r.Limits.Moves() {
		caller.Errors = nil // no bwrap yet
	}
	r.Place.Plan, err = room.Prepare(policy, caller)
	if err == nil && !r.flags.Quiet {
		warnOfOther(r.Place.Plan, r.argv)
	}
	if e := (*result.Error)(nil); errors.As(err, &e) && e.Code == "not-found" && e.Hint == "" {
		e.Hint = meant(r.argv[0], r.flags.Tty)
	}
	return err
}

// warnOfOther warns if the command is a different program from the one that the caller's PATH
// names on the host. A command given by its path is what the caller meant, and gets no warning.
func warnOfOther(plan *room.Plan, argv []string) {
	if plan.Instead != "" {
		tellWarning(fmt.Sprintf("%s is %s in the sandbox, but %s outside; use that one with --tools, or name this one by its full path", argv[0], plan.Found, plan.Instead))
	}
}

// meant is the remedy where the command that was not found is a word that other tools take
// there: a time, as timeout(1), a subcommand, as docker, or a whole command line; "" if it
// is none.
func meant(word string, tty bool) string {
	switch word {
	case "stop":
		return "to end a sandbox write sbxrun kill"
	case "completion":
		return "completions are files, which the packages install, and ./setup.sh completions writes"
	}
	if slices.ContainsFunc(cli.Commands(), func(c cli.Command) bool { return c.Name == word }) {
		return "a command of sbxrun's own is its first word: sbxrun " + word
	}
	if strings.ContainsAny(word, " \t\n") {
		return "a command line in one word is for a shell: write sh -c before it"
	}
	if new(values.Duration).UnmarshalText([]byte(word)) != nil {
		return ""
	}
	hint := "for a deadline write --timeout " + word
	if tty {
		hint = "-t is --tty; " + hint
	}
	return hint
}
