// Package sandbox runs long-lived sandboxes: it keeps their records and logs, probes whether they are
// ready, and ends them in time. sbxrun start has one per process; other processes can have many.
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

// Spec describes a sandbox to start.
type Spec struct {
	Command       []string // nil for an idle sandbox
	Plan          *room.Plan
	Limits        *limits.Plan // or nil
	Leave         *admission.Permit
	Tags          map[string]string
	Parts         *Parts    // ended by the sandbox
	Net, Hostname string    // as recorded
	Begin         time.Time // time of the request

	Timeout, Grace, ProofTimeout time.Duration
	Signal                       syscall.Signal // first signal at the deadline; 0 means SIGTERM
	IdleTimeout                  time.Duration  // 0 means none
	Remove                       bool           // whether to remove the record at the end, unless the teardown is unproven

	LogMax       int64 // maximum bytes of each log
	KillAtLogMax bool  // whether to end the sandbox at more output

	Probe Probe
}

// Sandbox is a sandbox from its creation to its end. Other processes know it by its record, through which they
// also request its end ([Sandbox.Asked]).
type Sandbox struct {
	*recorded
	spec  Spec
	group *limits.Group // or nil

	relays  stream.Relays // to the logs
	matched chan struct{} // closed when a log line matches the probe
	match   func()        // closes matched

	command *supervise.Command
	room    *proc.Process // its PID 1, once it exists
	probing sync.WaitGroup
	unwatch func() // ends endWhenIdle, which uses the claim
	running bool   // recorded as running
}

// New returns a sandbox that has only a claim so far. It takes over the claim, and the plan and the permit of
// the spec. The sandbox ends when ctx is done; its cause may be a [supervise.Request].
func New(ctx context.Context, claim *state.Claim, spec Spec) *Sandbox {
	if spec.Parts == nil {
		spec.Parts = new(Parts)
	}
	s := &Sandbox{recorded: newRecorded(ctx, claim, spec.LogMax, spec.KillAtLogMax), spec: spec, matched: make(chan struct{})}
	s.match = sync.OnceFunc(func() { close(s.matched) })
	s.unwatch = func() {}
	return s
}

// Parts returns the parts of its [Spec].
func (s *Sandbox) Parts() *Parts { return s.spec.Parts }

// Name returns the sandbox's name, or "".
func (s *Sandbox) Name() string { return s.claim.Name }

// Start builds the sandbox, and returns when its command has been executed and it can be entered. After an
// error nothing is left and Wait must not be called. If the sandbox was ended during the start, its record
// shows that.
func (s *Sandbox) Start() error {
	stdio, pipes, err := s.make()
	if err != nil {
		for _, f := range append(stdio[:], pipes[:]...) {
			f.Close() // closing nil only returns an error
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
		SpareOOM:     true, // execs end separately
		Shared:       true,
		Confirm:      true,
	}
	s.command, err = supervise.Hold(s.ctx, supervise.Place{Plan: s.spec.Plan}, stdio, nil, terms)
	for _, f := range stdio {
		f.Close() // the command has copies
	}
	s.spec.Plan.Close()
	for i, r := range pipes {
		s.relays.Add(r, s.reading(i))
	}
	if err != nil {
		return s.finish(supervise.NotStarted(s.ctx, err, terms))
	}
	// Record it before the command may start, so that cleanup finds it whatever dies from here on.
	err = s.hold(s.command.Kept())
	if err != nil && s.ctx.Err() == nil { // otherwise Release returns the cause
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
		s.End(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL}) // other processes could not find it
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

// Wait waits for the sandbox's end, and returns when all its processes have exited and the record is final. An
// error is about the record.
func (s *Sandbox) Wait() error {
	s.command.Watch(s.ctx)
	s.unwatch()
	s.endExecs()
	res := s.command.End(s.ctx)
	if res.Cause == result.Lost && s.doomed() {
		res.Cause = result.Killed
	}
	s.cancel(nil) // ends the probe before its process is released
	s.probing.Wait()
	_ = s.command.Collect() // an abandoned keeper reaps its processes
	s.command.Close()
	return s.finish(res)
}

// endExecs tells the execs in the sandbox that it is about to end, if they get a grace period. Those in an
// idle sandbox get it here, because only they can use it.
func (s *Sandbox) endExecs() {
	grace, request := time.Duration(0), s.command.Request()
	switch s.command.Cause() {
	case result.Timeout:
		request.Signal, grace = cmp.Or(s.spec.Signal, unix.SIGTERM), s.spec.Grace
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		grace = request.Grace
	}
	if grace == 0 || len(s.spec.Command) == 0 && (s.command.Cause() == result.IdleTimeout || s.claim.EndUse()) {
		return // there are no execs, and none can start
	}
	_ = s.claim.MarkEnding() // on a full disk they do not learn why they end
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

// make creates everything needed before the sandbox: record, logs, pipes, cgroups.
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

// firstRecord returns the record before the sandbox exists.
func (s *Sandbox) firstRecord() (state.Record, error) {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return state.Record{}, err
	}
	r := state.Record{
		Tags: s.spec.Tags, Argv: s.spec.Command, CreatedAt: s.spec.Begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self,
		Workdir: s.spec.Plan.Workdir, Net: s.spec.Net, Hostname: s.spec.Hostname, Devices: s.spec.Plan.Devices,
		TimeoutMS: result.Milliseconds(s.spec.Timeout), IdleTimeoutMS: result.Milliseconds(s.spec.IdleTimeout),
	}
	if s.spec.Parts != nil {
		r.Image = s.spec.Parts.Image
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

// net returns the network mode in the access file.
func (s *Sandbox) net() string {
	if s.spec.Parts.Listed() {
		return netListed
	}
	return s.spec.Net
}

// netListed is the mode of a network with allowed hosts.
const netListed = "allow"

// hold writes the identity of the sandbox's PID 1 to disk, before the command may start.
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

// maxRefused is the maximum number of refused hosts in the record of a running sandbox.
const maxRefused = 20

// recordRefused records refused hosts, for hints to those who run commands in the sandbox. The report has all of
// them.
func (s *Sandbox) recordRefused(hosts <-chan result.ReportHost) {
	for range maxRefused {
		h, ok := <-hosts
		if !ok || s.write(func(r *state.Record) { r.Refused = append(r.Refused, state.Refused{Host: h.Host, Reason: h.Reason}) }) != nil {
			return // perhaps a full disk; the report has them
		}
	}
}

// endWhenIdle ends the sandbox when it has been idle for the idle timeout.
func (s *Sandbox) endWhenIdle(ctx context.Context) {
	timeout := s.spec.IdleTimeout
	for ctx.Err() == nil {
		wait, err := s.claim.EndIfIdle(timeout)
		if err != nil {
			wait = min(timeout, time.Second) // unknown; try again later
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

// finish releases everything else that belongs to the sandbox, and records how it ended, or removes the record of
// one that never started.
func (s *Sandbox) finish(res result.Result) error {
	s.cancel(nil) // releases the caller's context
	s.forgetOverlays()
	if !res.Started && !s.running && res.Verdict != result.Unproven {
		s.spec.Parts.Unused()
	}
	used, lost := s.spec.Parts.End()
	if res.Err == nil {
		res.Err = lost
	}
	s.relays.Finish(nil) // a stuck disk would block the record, too
	for _, log := range s.logs {
		log.Close()
	}
	s.spec.Leave.End()
	if s.group != nil { // unless the keeper has removed it; otherwise cleanup does
		_ = s.group.Remove(time.Now().Add(time.Second))
	}
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !s.running { // no other process knows it
		return result.All(s.because(s.spec.Leave.Explain(res.Err)), s.claim.Remove())
	}
	report := res.Report(s.claim.ID, s.spec.Command)
	report.Network, report.Devices = used, s.spec.Plan.Devices
	if s.spec.Parts != nil {
		report.Image = s.spec.Parts.Image
	}
	report.Bwrap = &result.ReportBwrap{Path: s.spec.Plan.Program.Path, Version: s.spec.Plan.Program.Version}
	err := result.All(s.conclude(report), s.claim.DropAccess())
	if s.spec.Remove && res.Verdict != result.Unproven {
		err = s.claim.Leave(s.record) // earlier errors, as of a full disk, do not matter
	} else {
		err = result.All(err, s.claim.Close())
	}
	if !s.running { // by another process than the one that starts it
		err = result.All(&result.Error{Code: "ended", Message: "the sandbox was ended during its start: " + string(res.Cause), ExitCode: res.ExitCode()}, err)
	}
	return err
}

// because adds the first line of bwrap's stderr, which is in the log, to an error.
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
