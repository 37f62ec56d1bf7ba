package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/files"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/obstacle"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/plain"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/version"
)

func runCommand(args []string, begin time.Time) int {
	r := runner{}
	r.command = command{Command: &supervise.Command{ID: safeopen.RandomName(), Begin: begin}, where: "in the sandbox", shared: &r.flags.ForegroundFlags}
	if err := cli.Parse(&r.flags, args); err != nil {
		return r.refuse(&r.flags, err)
	}
	r.argv = r.flags.Command
	r.asJSON = r.flags.JSON
	if r.flags.Version {
		return output.Finish(false, output.Line(nil, "sbxrun "+version.String()), nil)
	}
	return r.run()
}

type runner struct {
	command
	flags cli.Run
}

func (r *runner) run() int {
	var err error
	// Open the report first, so that it can contain every later failure.
	if r.report, err = openReport(&r.flags, r.flags.Report); err != nil {
		return r.notStarted(err)
	}
	if err = r.checkFlags(); err != nil {
		return r.notStarted(cli.UsageError(&r.flags, err))
	}
	r.signals = watchWaiting()
	caller := room.ThisCaller()
	if r.flags.PrintCommand {
		close(r.signals.admitted)
	}
	if err = r.plan(caller); err != nil {
		if visible := state.CheckVisible(); visible != nil {
			err = visible // the cause of all others
		}
	}
	unused := true
	defer func() {
		if unused {
			r.Parts.Unused()
		}
		r.Parts.End()
	}()
	if err != nil {
		return r.notStarted(err)
	}
	plan := r.Place.Plan
	defer plan.Close()
	if r.flags.PrintCommand {
		if err = plan.Program.Whole(); err == nil {
			// Check the sources only, because --get would create its directory.
			r.Parts.Files, err = files.Open(r.flags.Put, nil, r.flags.FollowLinks, plan.Workdir, values.SplitColon)
		}
		if err != nil {
			return r.notStarted(err)
		}
		return r.printCommand(plan)
	}
	if err = r.begin(); err != nil {
		return r.notStarted(err)
	}
	if err = r.Parts.Begin(plan.Cred()); err != nil {
		return r.notStarted(err)
	}
	if r.Parts.Files, err = files.Open(r.flags.Put, r.flags.Get, r.flags.FollowLinks, plan.Workdir, values.SplitColon); err != nil {
		return r.notStarted(err)
	}
	if f := r.Parts.Files; f != nil {
		f.Got.Max.Bytes, f.Got.Max.Entries = int64(r.flags.GetMaxSize), int(min(r.flags.GetMaxEntries, math.MaxInt32))
	}
	r.bwrap = &result.ReportBwrap{Path: plan.Program.Path, Version: plan.Program.Version}
	var counted *counters
	held := r.Held
	r.Held = func(ctx context.Context, c *supervise.Command) error {
		counted = r.openCounters(r.flags.Net, c.Kept().Init) // a released command may end at once
		return held(ctx, c)
	}
	if r.start() {
		time.AfterFunc(soonSwept, func() { sweepQuickly("") })
		if !r.flags.Quiet {
			warnPut(r.Parts.Files)
		}
	}
	res, delivered := r.wait()
	unused = !res.Started && res.Verdict != result.Unproven
	if overlays := r.Parts.Overlays; len(overlays)+len(r.flags.Get) > 0 {
		ctx, stop := r.signals.after()
		r.collect(ctx, &res)
		r.bringHome(ctx, overlays, &res)
		stop()
	}
	if unused {
		r.Parts.Unused()
	}
	var lost *result.Error
	if r.used, lost = r.Parts.End(); lost != nil {
		addFailure(&res, lost)
	}
	if r.used != nil && r.used.Incomplete {
		warn(errors.New("the sandbox's network proxy ended before the command or could not report; network usage is unknown"))
	}
	f, failed := r.failure(res, counted)
	if what, remedy := refusedHosts(r.used); what != "" && r.advises() {
		output.Hint(what, remedy)
	} else if failed {
		output.Hint(obstacle.Find(plan.Entry(), plan, f, room.ThisCaller()))
	}
	plan.Close() // diagnose needs descriptors
	r.diagnose(&res)
	return r.end(res, delivered)
}

// begin waits for admission, if nothing else has, and opens the streams.
func (r *runner) begin() error {
	if err := r.admitted(); err != nil {
		return err
	}
	if err := r.prepare(); err != nil {
		return err
	}
	<-r.signals.ready
	return nil
}

// admitted waits for admission, the first time.
func (r *runner) admitted() error {
	if r.Permit != nil {
		return nil
	}
	return r.admit(&r.flags.AdmissionFlags, r.flags.Pids)
}

func warnPut(f *files.Files) {
	if f != nil && f.Put.LeftOut.Special.Count > 0 {
		warn(fmt.Errorf("--put: %v", special(f.Put.LeftOut.Special)))
	}
}

func (r *runner) collect(ctx context.Context, res *result.Result) {
	if len(r.flags.Get) == 0 || !res.Started {
		return
	}
	var err error
	var unmatched []string
	if res.Verdict == result.Proven {
		unmatched, err = r.Parts.Files.Collect(ctx)
		if left := r.Parts.Files.Got.LeftOut.Denied; err == nil && left.Count > 0 {
			err = fmt.Errorf("--get: %w", unread(left))
		}
	} else {
		err = errors.New("--get: nothing was copied, because processes may still be writing")
	}
	if err != nil {
		e := &result.Error{Code: "get", Message: err.Error(), Err: err}
		if output.Is(err, "too-large") {
			e.Hint = "raise --get-max-size or --get-max-entries"
		}
		if res.Err == nil || !r.flags.Quiet { // the report has room for one error
			addFailure(res, e)
		}
	}
	if r.flags.Quiet {
		return
	}
	for _, arg := range unmatched {
		warn(fmt.Errorf("--get %s: no such file", arg))
	}
	if left := r.Parts.Files.Got.LeftOut.Special; left.Count > 0 {
		warn(fmt.Errorf("--get: %w", special(left)))
	}
	if out := r.Parts.Files.Got.Outside; out.Count > 0 {
		warn(fmt.Errorf("--get: %w", outside(out)))
	}
}

// addFailure records the failure of a step after the command. The report has room for one error; others are warnings.
func addFailure(res *result.Result, err error) {
	if res.Err != nil {
		warn(err)
		return
	}
	e := *output.Error(err)
	e.ExitCode = result.ExitOutput
	res.Err = &e
}

// printCommand prints the plan as a bwrap command, and writes its filter for --print-filter.
func (r *runner) printCommand(plan *room.Plan) int {
	from, place := "", r.flags.PrintFilter
	if place != "" {
		var err error
		if from, err = writeFilter(&r.flags, place, plan.Plain().Filter); err != nil {
			return fail(err)
		}
	}
	return output.Finish(false, output.Line(nil, plain.ShellCommand(plan, from)), nil)
}

// diagnose replaces the error of a failed setup if the machine is the cause.
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
	// The diagnosis would lack the same resource. It can only check the limit on namespaces.
	if proc.DescriptorsHint(res.Err) != "" {
		return
	}
	step := (*proc.StartError)(nil)
	namespaces := errors.As(res.Err, &step) && step.Step == enter.StepNetwork
	for _, scarce := range []error{unix.EAGAIN, unix.ENOMEM, unix.ENOSPC} {
		if errors.Is(res.Err, scarce) && !namespaces {
			return
		}
	}
	ctx, cancel := context.WithTimeout(r.signals.ctx, bound)
	defer cancel()
	if e := doctor.Diagnose(ctx, room.ThisCaller()); e != nil && ctx.Err() == nil {
		res.Err = e
	}
}

func (r *runner) checkFlags() error {
	r.tty = r.flags.Tty
	if err := r.checkOutput(); err != nil {
		return err
	}
	if err := busyTerms(&r.flags.AdmissionFlags).Check(); err != nil {
		return err
	}
	r.flags.Apply = r.flags.Apply || r.flags.ApplyDelete || r.flags.ApplyAll
	switch {
	case r.flags.Apply && slices.Contains(r.flags.Overlay, "/"):
		return errors.New("--apply: changes to a root directory are not applied; keep them with start and snapshot create")
	case r.flags.PrintCommand && r.flags.Rootfs+r.flags.Image != "":
		return errors.New("--print-command: no bwrap command does the same as --rootfs and --image, which sbxrun mounts itself")
	case r.flags.PrintCommand && (r.flags.From != "" || len(r.flags.Overlay) > 0 || room.Cwd(r.flags.Cwd) == room.CwdOverlay):
		return errors.New("--print-command: cannot be combined with --overlay and --from, which sbxrun mounts itself")
	case r.flags.PrintFilter != "" && r.flags.Seccomp == "off":
		return errors.New("--print-filter: cannot be combined with --seccomp off")
	}
	return nil
}

func (r *runner) plan(caller room.Caller) error {
	admit := func() error {
		if r.flags.PrintCommand {
			return nil
		}
		<-r.signals.ready // signals must be handled before anything starts
		return r.admitted()
	}
	policy, parts, err := policyOf(r.signals.ctx, &r.flags.View, &r.flags.LimitFlags, r.argv, admit)
	r.Parts, r.Held = parts, parts.Held
	if len(r.argv) == 0 {
		r.argv = parts.ImageCommand
		policy.Command = r.argv
	}
	if err == nil && r.flags.PrintCommand && parts.Network() {
		err = errors.New("--print-command: cannot be combined with --net allow=, --publish and --connect, which bwrap does not have")
	}
	if err == nil && len(r.argv) == 0 {
		err = errors.New("no command given")
	}
	if err != nil {
		diesOf(err)
		return cli.UsageError(&r.flags, err)
	}
	policy.Terminal, policy.Alone, policy.Captured = r.flags.Tty, !parts.Network(), r.asJSON
	if r.Planned, err = planLimits(&r.flags.LimitFlags, state.Room{}); err != nil {
		return err
	}
	if r.flags.Apply { // --apply writes a note there
		if err = state.CheckUsable(state.Mine()); err != nil {
			return err
		}
	}
	err = useStored(r.signals.ctx, &r.flags.View, parts, &policy, !r.flags.PrintCommand, admit)
	if err != nil {
		diesOf(err)
		return err
	}
	r.Place.Plan, err = room.Prepare(policy, caller)
	if err == nil && !r.flags.Quiet {
		warnOf(r.Place.Plan, r.argv, parts.Allowed())
	}
	if e := (*result.Error)(nil); errors.As(err, &e) && e.Code == "not-found" && e.Hint == "" {
		e.Hint = meant(r.argv[0], r.flags.Tty)
	}
	return err
}

// warnOf warns about network rules for a whole top-level domain or the sandbox's own addresses, binds that the
// command cannot read, and a command name that means a different program on the host.
func warnOf(plan *room.Plan, argv []string, rules []network.Rule) {
	for _, r := range rules {
		if text := r.TopLevel(); text != "" {
			warn(errors.New(text))
		}
	}
	if text := network.Loopback(rules); text != "" {
		warn(errors.New(text))
	}
	for _, name := range plan.Closed {
		warn(fmt.Errorf("uid %[2]d in the sandbox cannot read %[1]q; copy it with --put, or use --bind, which also lets the command write", name, plan.Cred().UID))
	}
	for _, err := range plan.LeftOut {
		warn(fmt.Errorf("left out: %w", err))
	}
	if plan.Instead != "" {
		warn(fmt.Errorf("%s is %s in the sandbox, but %s outside; use --tools for the latter, or give the full path", argv[0], plan.Found, plan.Instead))
	}
}
