package main

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

func runCommand(args []string, begin time.Time) int {
	r := runner{}
	r.job = job{id: newID(), where: "in the sandbox", ends: &r.flags.Ends, tells: &r.flags.Tells, begin: begin}
	var err error
	if r.command, err = cli.Parse(&r.flags, args); err != nil {
		return failUsage(&r.flags, err)
	}
	if r.flags.Version {
		return printLine("sbxrun " + version)
	}
	return r.run()
}

// runner is one run of the run command.
type runner struct {
	job
	flags cli.Run
	plan  *room.Plan
}

func (r *runner) run() int {
	var err error
	// The report's place first, so that every later failure can be written there.
	if r.report, err = openReport(r.flags.Report); err != nil {
		return fail(err)
	}
	if err = r.checkFlags(); err != nil {
		return r.notStarted(err)
	}
	if !r.flags.PrintCommand {
		if err = r.admit(&r.flags.Busy, r.flags.Pids); err != nil {
			return r.notStarted(err)
		}
	}
	r.signals = watchSignals()
	if err = r.prepare(); err != nil {
		return r.notStarted(err)
	}
	defer r.plan.Close()
	if r.flags.PrintCommand {
		return printLine(r.plan.ShellCommand())
	}
	r.bwrap = &result.ReportBwrap{Path: r.plan.Program.Path, Version: r.plan.Program.Version}
	start := func(s *streams, bounds proc.Bounds, terms supervise.Terms) (*supervise.Command, error) {
		r.plan.Bounds = bounds
		return supervise.Build(r.signals.ctx, r.plan, s.payload, s.terminal, terms)
	}
	return r.carryOut(start, func() { sweepSoon("") }, func(res *result.Result) {
		r.plan.Close() // descriptors may be few
		r.diagnose(res)
	})
}

// diagnose finds out why a sandbox could not be set up, if it is this machine.
func (r *runner) diagnose(res *result.Result) {
	const bound = 1500 * time.Millisecond
	const tight = 16 << 20 // of memory
	if res.Err == nil || res.Err.Code != "setup" {
		return
	}
	if m := r.flags.Memory; m > 0 && m < tight {
		res.Err.Hint = "does --memory leave enough for the command to start?"
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
	if err := checkBusy(&r.flags.Busy); err != nil {
		return usageError(err)
	}
	return nil
}

// prepare turns the flags into a policy, and that into a plan.
func (r *runner) prepare() error {
	policy, err := policyOf(&r.flags.View, &r.flags.Limits, r.command)
	if err == nil && len(r.command) == 0 {
		err = errors.New("no command given")
	}
	if err != nil {
		return usageError(err)
	}
	if policy.Meminfo, err = fakeMeminfo(r.flags.FakeMeminfo, &r.flags.Limits); err != nil {
		return err
	}
	policy.Terminal = r.flags.Tty
	if r.limits, err = planLimits(&r.flags.Limits, nil); err != nil {
		return err
	}
	r.plan, err = room.Prepare(policy, thisCaller())
	if e := (*result.Error)(nil); errors.As(err, &e) && e.Code == "not-found" && e.Hint == "" {
		e.Hint = timeoutHint(r.command[0], r.flags.Tty)
	}
	return err
}

// timeoutHint is the remedy where the command that was not found is a time, as in
// timeout(1), whose first word that is; "" if it is none.
func timeoutHint(word string, tty bool) string {
	if new(values.Duration).UnmarshalText([]byte(word)) != nil {
		return ""
	}
	hint := "for a deadline write --timeout " + word
	if tty {
		hint = "-t is --tty; " + hint
	}
	return hint
}
