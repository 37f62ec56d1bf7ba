// Package sandbox keeps a sandbox that lives on: its record, its logs, whether it is ready,
// when it has to end. sbxrun start has one in a process of its own; a process can have
// many.
package sandbox

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Spec is a sandbox that is to be started.
type Spec struct {
	Command       []string // nil for a room that idles
	Plan          *room.Plan
	Limits        *limits.Plan // nil for none
	Leave         *admission.Permit
	Tags          map[string]string
	Parts         *Parts    // which the sandbox ends
	Net, Hostname string    // as they are on record
	Begin         time.Time // when it was asked for

	Timeout, Grace, ProofTimeout time.Duration
	Signal                       syscall.Signal // that comes first when the time is over; 0 for SIGTERM
	IdleTimeout                  time.Duration  // 0 for none
	Remove                       bool           // its record goes when it has ended, unless that is unproven

	LogMax       int64 // bytes of each log
	KillAtLogMax bool  // the sandbox ends when there is more

	Probe Probe
}

// Sandbox is one from its making to its end. All that others know of it is in its record,
// and they ask for its end there, too ([Sandbox.Asked]).
type Sandbox struct {
	*recorded
	spec  Spec
	group *limits.Group // nil for none

	relays  stream.Relays // into the logs
	matched chan struct{} // closed when a line of them says that it is ready
	match   func()        // closes matched

	command *supervise.Command
	room    *proc.Process // its PID 1, once it is held
	probing sync.WaitGroup
	unwatch func() // ends endWhenIdle, which uses the claim
	running bool   // it is on record that it runs
}

// New makes a sandbox of which there is nothing yet but the record's place. It takes over
// own, and plan and leave of the spec. When ctx is done the sandbox ends; its cause may be
// a [supervise.Request].
func New(ctx context.Context, claim *state.Claim, spec Spec) *Sandbox {
	if spec.Parts == nil {
		spec.Parts = new(Parts)
	}
	s := &Sandbox{recorded: newRecorded(ctx, claim, spec.LogMax, spec.KillAtLogMax), spec: spec, matched: make(chan struct{})}
	s.match = sync.OnceFunc(func() { close(s.matched) })
	s.unwatch = func() {}
	return s
}

// Parts are those of its [Spec].
func (s *Sandbox) Parts() *Parts { return s.spec.Parts }

// Name is "" if it was given none.
func (s *Sandbox) Name() string { return s.claim.Name }

// Start builds the sandbox, and returns when its command was executed and it can be
// entered. After an error there is nothing to wait for, and nothing left; but if somebody has
// ended it meanwhile, that is on record.
func (s *Sandbox) Start() error {
	stdio, pipes, err := s.make()
	if err != nil {
		for _, f := range append(stdio[:], pipes[:]...) {
			f.Close() // nil is an error, and no more
		}
		s.spec.Plan.Close()
		return s.finish(supervise.NotStarted(context.Background(), err, supervise.Terms{Begin: s.spec.Begin}))
	}
	terms := supervise.Terms{
		Timeout:      s.spec.Timeout,
		Signal:       s.spec.Signal,
		Grace:        s.spec.Grace,
		ProofTimeout: s.spec.ProofTimeout,
		Begin:        s.spec.Begin,
		Hurry:        s.hurry,
		Limits:       s.group,
		SpareOOM:     true, // execs have their own end
		Shared:       true,
		Confirm:      true,
	}
	s.command, err = supervise.Hold(s.ctx, supervise.Place{Plan: s.spec.Plan}, stdio, nil, terms)
	for _, f := range stdio {
		f.Close() // the payload has its own
	}
	s.spec.Plan.Close()
	for i, r := range pipes {
		s.relays.Add(r, s.reading(i))
	}
	if err != nil {
		return s.finish(supervise.NotStarted(s.ctx, err, terms))
	}
	// On record before the command may start: whatever dies from here on, cleanup finds it.
	err = s.hold(s.command.Kept())
	if err != nil && s.ctx.Err() == nil { // or Release says who ended it
		s.command.Refuse(err)
	}
	if !s.command.Release(s.ctx) {
		return s.Wait()
	}
	if len(s.spec.Command) > 0 {
		s.spec.Leave.Running()
	} else {
		s.spec.Leave.Idling()
	}
	err = s.claim.GrantAccess()
	if err == nil {
		err = s.write(func(r *state.Record) { r.Phase = state.Running })
	}
	if err != nil {
		s.End(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL}) // nobody could find it
		return result.All(err, s.Wait())
	}
	s.running = true
	if refused := s.spec.Parts.Refused(); refused != nil {
		go s.recordRefused(refused)
	}
	if s.record.Ready != nil {
		s.probing.Go(s.becomeReady)
	}
	if s.spec.IdleTimeout > 0 {
		ctx, cancel := context.WithCancel(s.ctx)
		over := make(chan struct{})
		s.unwatch = func() { cancel(); <-over }
		go func() {
			defer close(over)
			s.endWhenIdle(ctx)
		}()
	}
	return nil
}

// Wait waits for the sandbox's end, and returns when nothing of it is left and its record
// says so. An error is one of the record.
func (s *Sandbox) Wait() error {
	s.command.Watch(s.ctx)
	s.unwatch()
	s.endExecs()
	res := s.command.End(s.ctx)
	if res.Cause == result.Lost && s.doomed() {
		res.Cause = result.Killed
	}
	s.cancel(nil) // so that the probe ends, as long as its room is ours to look at
	s.probing.Wait()
	_ = s.command.Collect() // a keeper that was left reaps what it has
	s.command.Close()
	return s.finish(res)
}

// endExecs tells the execs in the sandbox that it is about to end, if they get a grace
// period: those in a room that idles are given it here, because only they can use it.
func (s *Sandbox) endExecs() {
	grace, request := time.Duration(0), s.command.Request()
	switch s.command.Cause() {
	case result.Timeout:
		request.Signal, grace = cmp.Or(s.spec.Signal, unix.SIGTERM), s.spec.Grace
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		grace = request.Grace
	}
	if grace == 0 || len(s.spec.Command) == 0 && (s.command.Cause() == result.IdleTimeout || s.claim.EndUse()) {
		return // nobody is there, and nobody comes
	}
	_ = s.claim.MarkEnding() // on a full disk they do not know why they end
	s.command.Spare(time.Now().Add(grace))
	if len(s.spec.Command) > 0 || s.command.Signal(request.Signal) != nil {
		return
	}
	const look = 10 * time.Millisecond
	over := time.After(grace)
	for !s.claim.EndUse() {
		select {
		case <-time.After(look):
		case <-over:
			return
		case <-s.hurry:
			return
		}
	}
}

// make makes what has to be there before the sandbox: record, logs, pipes, cgroups.
func (s *Sandbox) make() (stdio [3]*os.File, pipes [2]*os.File, err error) {
	if s.record, err = s.firstRecord(); err != nil {
		return stdio, pipes, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	if err != nil {
		return stdio, pipes, err
	}
	stdio = [3]*os.File{null}
	if err := s.openLogs(); err != nil {
		return stdio, pipes, err
	}
	for i := range pipes {
		if pipes[i], stdio[i+1], err = stream.Pipe(); err != nil {
			return stdio, pipes, err
		}
	}
	if err := s.claim.Write(s.record); err != nil {
		return stdio, pipes, err
	}
	if s.spec.Limits != nil {
		if s.group, err = s.spec.Limits.Make(s.claim.ID, true); err != nil {
			return stdio, pipes, err
		}
	}
	if err := s.spec.Parts.Begin(s.spec.Plan.Cred()); err != nil {
		return stdio, pipes, err
	}
	s.record.Published = s.spec.Parts.Published()
	s.spec.Leave.Reserved()
	return stdio, pipes, nil
}

// firstRecord is what is known of the sandbox before there is one.
func (s *Sandbox) firstRecord() (state.Record, error) {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return state.Record{}, err
	}
	r := state.Record{
		Tags: s.spec.Tags, Argv: s.spec.Command, CreatedAt: s.spec.Begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self,
		Workdir: s.spec.Plan.Workdir, Net: s.spec.Net, Hostname: s.spec.Hostname,
		TimeoutMS: result.Milliseconds(s.spec.Timeout), IdleTimeoutMS: result.Milliseconds(s.spec.IdleTimeout),
	}
	if r.Argv == nil {
		r.Argv = []string{}
	}
	if cred := s.spec.Plan.Cred(); cred != nil {
		r.UID, r.GID = &cred.UID, &cred.GID
	}
	if p := s.spec.Probe.String(); p != "" {
		r.Ready = &state.Ready{Probe: p}
	}
	return r, nil
}

// net is what those who enter have to know of its network.
func (s *Sandbox) net() string {
	if s.spec.Parts.Listed() {
		return netListed
	}
	return s.spec.Net
}

// netListed is that of a network of its own, with hosts that it may reach.
const netListed = "allow"

// hold puts on disk who the room's PID 1 is, before the payload may start.
func (s *Sandbox) hold(kept *proc.Kept) error {
	init, err := identity(kept.Room, kept.RoomNS)
	if err != nil {
		return err
	}
	entry := s.spec.Plan.Entry()
	access := state.Access{Init: init, Cred: entry.Cred, Net: s.net(), Workdir: entry.Workdir, Filter: entry.Filter.Name(), Env: entry.Env, Limits: s.spec.Limits.OfProcesses()}
	if s.group != nil {
		access.Cgroups = s.group.Dirs()
	}
	if err := s.claim.WriteAccess(access); err != nil {
		return err
	}
	s.spec.Parts.Overlays = s.command.TakeOverlays()
	if err := recordable(s.spec.Parts.Overlays); err != nil {
		return err
	}
	err = s.write(func(r *state.Record) {
		r.Overlays = s.onRecord()
		r.Init, s.room = &init, kept.Room
		if s.spec.Limits != nil {
			r.Limits = s.spec.Limits.Limits
		}
	})
	if err != nil {
		return err
	}
	return s.spec.Parts.Held(s.ctx, kept.Room, s.spec.Plan.Cred())
}

// maxRefused is how many hosts that were refused are on record while a sandbox runs.
const maxRefused = 20

// recordRefused puts them on record, for those who have started a command in the sandbox. The
// report has them all.
func (s *Sandbox) recordRefused(hosts <-chan result.ReportHost) {
	for range maxRefused {
		h, ok := <-hosts
		if !ok || s.write(func(r *state.Record) { r.Refused = append(r.Refused, state.Refused{Host: h.Host, Reason: h.Reason}) }) != nil {
			return // a full disk, perhaps: the report will tell
		}
	}
}

// endWhenIdle ends the sandbox when nothing has used it for so long.
func (s *Sandbox) endWhenIdle(ctx context.Context) {
	timeout := s.spec.IdleTimeout
	for ctx.Err() == nil {
		wait, err := s.claim.EndIfIdle(timeout)
		if err != nil {
			wait = min(timeout, time.Second) // not to be told now
		} else if wait <= 0 {
			s.End(supervise.Request{Cause: result.IdleTimeout, Signal: cmp.Or(s.spec.Signal, unix.SIGTERM), Grace: s.spec.Grace})
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// finish puts away what is left beside the room, and records how the sandbox ended, or
// removes one that never was.
func (s *Sandbox) finish(res result.Result) error {
	s.cancel(nil) // or the caller's context would keep what never began
	s.forgetOverlays()
	if !res.Started && !s.running && res.Verdict != result.Unproven {
		s.spec.Parts.Unused()
	}
	used, lost := s.spec.Parts.End()
	if res.Err == nil {
		res.Err = lost
	}
	s.relays.Finish(nil) // a disk that takes nothing any more does not take the record either
	for _, log := range s.logs {
		log.Close()
	}
	s.spec.Leave.End()
	if s.group != nil { // what the keeper has not removed already, or else cleanup does
		_ = s.group.Remove(time.Now().Add(time.Second))
	}
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !s.running { // nobody knows of it
		return result.All(s.because(s.spec.Leave.Explain(res.Err)), s.claim.Remove())
	}
	report := res.Report(s.claim.ID, s.spec.Command)
	report.Network = used
	report.Bwrap = &result.ReportBwrap{Path: s.spec.Plan.Program.Path, Version: s.spec.Plan.Program.Version}
	err := result.All(s.conclude(report), s.claim.DropAccess())
	if s.spec.Remove && res.Verdict != result.Unproven {
		err = s.claim.Leave(s.record) // on a full disk the rest has failed for nothing
	} else {
		err = result.All(err, s.claim.Close())
	}
	if !s.running { // by somebody else than who has started it
		err = result.All(&result.Error{Code: "ended", Message: "the sandbox was ended while it was being set up: " + string(res.Cause), ExitCode: res.ExitCode()}, err)
	}
	return err
}

// because adds to an error what bwrap has said on stderr, which nobody sees.
func (s *Sandbox) because(e *result.Error) error {
	file, err := s.claim.OpenFile(Logs[1], os.O_RDONLY)
	if err != nil {
		return e
	}
	defer file.Close()
	line, _ := bufio.NewReaderSize(file, 512).ReadSlice('\n')
	if line = bytes.TrimSpace(line); len(line) > 0 {
		e.Message += " (" + string(line) + ")"
	}
	return e
}
