package main

import (
	"cmp"
	"context"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/files"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

// superviseSandbox runs as long as a started sandbox. Requests arrive as SIGTERM, with details in the sandbox's record.
func superviseSandbox(args []string, begin time.Time) int {
	requests := watchRequests()
	box, stateDir, err := newSandbox(requests.ctx, args, begin)
	if err != nil {
		return fail(err)
	}
	requests.made(box)
	if err := box.Start(); err != nil {
		return fail(err)
	}
	warnPut(box.Parts.Files)
	if caller.Tell(sandbox.Handover{ID: box.ID(), Name: box.Name(), Status: string(state.Running)}) != nil {
		requests.abandon()
	}
	time.AfterFunc(soonSwept, func() {
		sweepQuickly(stateDir)
		// It will be idle for a long time. It keeps its threads, because the task limit may be reached when it has to
		// end the sandbox.
		debug.FreeOSMemory()
	})
	if err := box.Wait(); err != nil {
		return fail(err)
	}
	return 0
}

// newSandbox prepares a sandbox without starting a process, and returns it with the state directory.
func newSandbox(ctx context.Context, args []string, begin time.Time) (box *sandbox.Sandbox, stateDir string, err error) {
	var parts *sandbox.Parts
	defer func() {
		if err != nil {
			parts.Unused()
			parts.End()
		}
	}()
	flags, err := parseStart(args)
	if err != nil {
		return nil, "", err
	}
	var policy room.Policy
	argv := flags.Command
	var leave *admission.Permit
	admitted := func() (err error) {
		if leave == nil {
			leave, err = admit(ctx, &flags.AdmissionFlags, flags.Pids, false)
		}
		return err
	}
	policy, parts, err = policyOf(ctx, &flags.View, &flags.LimitFlags, argv, admitted)
	if err != nil {
		return nil, "", cli.UsageError(&flags.Start, err)
	}
	policy.Captured = len(argv) > 0
	if err := useStored(ctx, &flags.View, parts, &policy, true, admitted); err != nil {
		return nil, "", err
	}
	command := &supervise.Command{Begin: begin, Options: supervise.Options{
		Timeout: time.Duration(flags.Timeout), Signal: syscall.Signal(flags.Signal), Grace: period(&flags.DeadlineFlags), ProofTimeout: time.Duration(flags.ProofTimeout),
	}}
	spec := sandbox.Spec{
		Command: command, Argv: argv, Tags: flags.tags, Parts: parts, Net: flags.Net, Hostname: flags.Hostname,
		IdleTimeout: time.Duration(flags.IdleTimeout), Remove: flags.Rm, LogMax: cmp.Or(int64(flags.MaxOutput), maxLog), KillAtLogMax: flags.OutputLimit == outputKill, Probe: flags.probe,
	}
	if command.Planned, err = planLimits(&flags.LimitFlags, state.Room{}); err != nil {
		return nil, "", err
	}
	if command.Place.Plan, err = room.Prepare(policy, room.ThisCaller()); err != nil {
		return nil, "", err
	}
	warnOf(command.Place.Plan, argv, parts.Allowed())
	if parts.Files, err = files.Open(flags.Put, nil, flags.FollowLinks, command.Place.Plan.Workdir, values.SplitColon); err != nil {
		return nil, "", err
	}
	if err = admitted(); err != nil {
		return nil, "", err
	}
	command.Permit = leave
	dir, err := state.Open(state.Mine())
	if err != nil {
		return nil, "", err
	}
	// Drop the caller's variables, and its current directory so that it can be unmounted.
	os.Clearenv()
	if err := os.Chdir("/"); err != nil {
		return nil, "", err
	}
	claim, err := dir.Create(safeopen.RandomName(), flags.Name)
	if err != nil {
		return nil, "", err
	}
	return sandbox.New(ctx, claim, spec), dir.Path(), nil
}
