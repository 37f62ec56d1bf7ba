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
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Spec describes a sandbox to start. Its command is idle without Argv.
type Spec struct {
	*supervise.Command // with its plan, limits, permit and times
	Argv               []string
	Tags               map[string]string
	Parts              *Parts        // ended by the sandbox
	Net, Hostname      string        // as recorded
	IdleTimeout        time.Duration // 0 means none
	Remove             bool          // whether to remove the record at the end, unless the teardown is unproven

	LogMax       int64 // maximum bytes of each log
	KillAtLogMax bool  // whether to end the sandbox if it writes more

	Probe Probe
}

// Sandbox is a sandbox from its creation to its end. Other processes know it by its record, through which they
// also request its end ([Sandbox.Asked]).
type Sandbox struct {
	*recorded
	Spec

	matched chan struct{} // closed when a log line matches the probe
	match   func()        // closes matched
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
	s := &Sandbox{recorded: newRecorded(ctx, claim, spec.LogMax, spec.KillAtLogMax), Spec: spec, matched: make(chan struct{})}
	s.match = sync.OnceFunc(func() { close(s.matched) })
	s.unwatch = func() {}
	return s
}

// Name returns the sandbox's name, or "".
func (s *Sandbox) Name() string { return s.claim.Name }

// Start builds the sandbox, and returns when its command has been executed and it can be entered. After an
// error nothing is left and Wait must not be called. If the sandbox was ended during the start, its record
// shows that.
func (s *Sandbox) Start() error {
	c := s.Command
	// hold records the sandbox before the command may start, so that cleanup finds it whatever dies from there on.
	c.ID, c.Shared, c.Confirm, c.Attended, c.Hurry, c.Held = s.claim.ID, true, true, true, s.hurry, s.hold
	if err := s.make(); err != nil {
		c.Refuse(err)
	}
	err := c.Start(s.ctx)
	s.Place.Plan.Close()
	if err != nil || c.Cause() != "" {
		return s.finish()
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
	if refused := s.Parts.Refused(); refused != nil {
		go s.recordRefused(refused)
	}
	if s.record.Ready != nil {
		s.probing.Go(s.becomeReady)
	}
	if s.IdleTimeout > 0 {
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
	s.Watch()
	s.unwatch()
	s.endExecs()
	s.Command.End()
	s.cancel(nil) // ends the probe before its process is released
	s.probing.Wait()
	return s.finish()
}

// endExecs tells the execs in the sandbox that it is about to end, if they get a grace period. Those in an
// idle sandbox get it here, because only they can use it.
func (s *Sandbox) endExecs() {
	grace, request := time.Duration(0), s.Command.Request()
	switch s.Command.Cause() {
	case result.Timeout:
		request.Signal, grace = cmp.Or(s.Options.Signal, unix.SIGTERM), s.Grace
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		grace = request.Grace
	}
	if grace == 0 || len(s.Argv) == 0 && (s.Command.Cause() == result.IdleTimeout || s.claim.EndUse()) {
		return // there are no execs, and none can start
	}
	_ = s.claim.MarkEnding() // on a full disk they do not learn why they end
	s.Spare(time.Now().Add(grace))
	if len(s.Argv) > 0 || s.Command.Signal(request.Signal) != nil {
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

// make creates everything needed before the sandbox: record, logs, proxy, streams.
func (s *Sandbox) make() (err error) {
	if s.record, err = s.firstRecord(); err != nil {
		return err
	}
	if err := s.openLogs(); err != nil {
		return err
	}
	if err := s.claim.Write(s.record); err != nil {
		return err
	}
	if err := s.Parts.Begin(s.Place.Plan.Cred()); err != nil {
		return err
	}
	s.record.Published = s.Parts.Published()
	s.Streams, err = stream.Open(nil, taker(s.reading(0)), taker(s.reading(1)), stream.Bound{}, nil) // a taker never fails
	return err
}

// firstRecord returns the record before the sandbox exists.
func (s *Sandbox) firstRecord() (state.Record, error) {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return state.Record{}, err
	}
	r := state.Record{
		Tags: s.Tags, Argv: s.Argv, CreatedAt: s.Begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self, Image: s.Parts.Image,
		Workdir: s.Place.Plan.Workdir, Net: s.Net, Hostname: s.Hostname, Devices: s.Place.Plan.Devices,
		TimeoutMS: result.Milliseconds(s.Timeout), IdleTimeoutMS: result.Milliseconds(s.IdleTimeout),
	}
	if r.Argv == nil {
		r.Argv = []string{}
	}
	if cred := s.Place.Plan.Cred(); cred != nil {
		r.UID, r.GID = &cred.UID, &cred.GID
	}
	if p := s.Probe.String(); p != "" {
		r.Ready = &state.Ready{Probe: p}
	}
	return r, nil
}

// net returns the network mode in the access file.
func (s *Sandbox) net() string {
	if s.Parts.Listed() {
		return netListed
	}
	return s.Net
}

// netListed is the mode of a network with allowed hosts.
const netListed = "allow"

// hold writes the identity of the sandbox's PID 1 to disk, before the command may start.
func (s *Sandbox) hold(ctx context.Context, c *supervise.Command) error {
	init, err := identity(c.Kept().Room, c.Kept().RoomNS)
	if err != nil {
		return err
	}
	access := accessOf(c.Place.Plan, c.Group, c.Planned.OfProcesses())
	access.Net = s.net()
	if err := s.claim.WriteAccess(init, access); err != nil {
		return err
	}
	s.Parts.Overlays = c.TakeOverlays()
	if err := recordable(s.Parts.Overlays); err != nil {
		return err
	}
	err = s.write(func(r *state.Record) {
		r.Overlays, r.Init = s.onRecord(), &init
		if c.Planned != nil {
			r.Limits = c.Planned.Limits
		}
	})
	if err != nil {
		return err
	}
	return s.Parts.Held(ctx, c)
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
	timeout := s.IdleTimeout
	for ctx.Err() == nil {
		wait, err := s.claim.EndIfIdle(timeout)
		if err != nil {
			wait = min(timeout, time.Second) // unknown; try again later
		} else if wait <= 0 {
			s.End(supervise.Request{Cause: result.IdleTimeout, Signal: cmp.Or(s.Options.Signal, unix.SIGTERM), Grace: s.Grace})
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
func (s *Sandbox) finish() error {
	s.cancel(nil) // releases the caller's context
	r, _ := s.Command.Wait()
	res := *r
	if res.Cause == result.Lost && s.doomed() {
		res.Cause = result.Killed
	}
	s.forgetOverlays()
	if !res.Started && !s.running && res.Verdict != result.Unproven {
		s.Parts.Unused()
	}
	used, lost := s.Parts.End()
	if res.Err == nil {
		res.Err = lost
	}
	for _, log := range s.logs {
		log.Close()
	}
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !s.running { // no other process knows it
		return result.All(s.because(res.Err), s.claim.Remove())
	}
	report := res.Report(s.claim.ID, s.Argv)
	report.Network, report.Devices, report.Image = used, s.Place.Plan.Devices, s.Parts.Image
	report.Bwrap = &result.ReportBwrap{Path: s.Place.Plan.Program.Path, Version: s.Place.Plan.Program.Version}
	err := result.All(s.conclude(report), s.claim.DropAccess())
	if s.Remove && res.Verdict != result.Unproven {
		err = s.claim.Leave(s.record) // earlier errors, such as from a full disk, do not matter
	} else {
		err = result.All(err, s.claim.Close())
	}
	if !s.running { // by a process other than the one that starts it
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
