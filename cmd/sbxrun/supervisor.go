package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/logfile"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// supervisor is the process that lives as long as a sandbox that was started. All
// it knows is in the sandbox's record; what it is asked to do comes as SIGTERM.
type supervisor struct {
	flags   startFlags
	command []string
	begin   time.Time
	plan    *room.Plan
	limits  *limits.Plan  // nil for none
	group   *limits.Group // nil for none
	dir     *state.Dir
	own     *state.Own
	leave   *admission
	logs    [2]*logfile.Writer // stdout, stderr
	relays  relays             // into the logs
	matched chan struct{}      // closed when a line of them says that it is ready

	signals chan os.Signal

	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{}
	now    func() // closes hurry
	match  func() // closes matched

	probing sync.WaitGroup
	mu      sync.Mutex // of the record
	record  state.Record
	kept    *proc.Kept // once it is held
}

// superviseSandbox is the supervisor of a sandbox from its making to its end.
func superviseSandbox(args []string, begin time.Time) int {
	s := &supervisor{begin: begin, hurry: make(chan struct{}), matched: make(chan struct{})}
	// Before anybody can know of us: SIGTERM is a request, and would end us.
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	s.signals = make(chan os.Signal, 4)
	notify(s.signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
	s.now = sync.OnceFunc(func() { close(s.hurry) })
	s.match = sync.OnceFunc(func() { close(s.matched) })
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	caller.orElse(func() { s.cancel(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL}) })
	err := s.prepare(args)
	if err == nil {
		err = s.run()
	}
	if err != nil {
		return fail(err)
	}
	return 0
}

// prepare does all that can fail before anything is started but the directory.
func (s *supervisor) prepare(args []string) (err error) {
	if s.flags, s.command, err = parseStart(args); err != nil {
		return usageError(err)
	}
	policy, err := policyOf(&s.flags.View, &s.flags.Limits, s.command)
	if err != nil {
		return usageError(err)
	}
	if policy.Meminfo, err = fakeMeminfo(s.flags.FakeMeminfo, &s.flags.Limits); err != nil {
		return err
	}
	if s.limits, err = planLimits(&s.flags.Limits, nil); err != nil {
		return err
	}
	if s.plan, err = room.Prepare(policy, thisCaller()); err != nil {
		return err
	}
	if s.dir, err = state.Open(state.Mine()); err != nil {
		return err
	}
	if s.leave, err = admit(s.ctx, &s.flags.Busy, int64(s.flags.Pids), tellWarning); err != nil {
		return err
	}
	// From here on there is nothing of the caller's in us: neither what its
	// variables hold nor its current directory, which somebody may want to unmount.
	os.Clearenv()
	if err := os.Chdir("/"); err != nil {
		return err
	}
	s.own, err = s.dir.Create(newID(), string(s.flags.Name))
	return err
}

func (s *supervisor) run() error {
	go s.listen()
	stdio, pipes, err := s.start()
	if err != nil {
		return result.All(err, s.own.Remove())
	}
	defer s.plan.Close()
	defer removeGroup(s.group)
	terms := supervise.Terms{
		Timeout:      time.Duration(s.flags.Timeout),
		Grace:        time.Duration(s.flags.Grace),
		ProofTimeout: time.Duration(s.flags.ProofTimeout),
		Begin:        s.begin,
		Hurry:        s.hurry,
		Limits:       s.group,
		SpareOOM:     true, // execs have their own end
		Shared:       true,
		Confirm:      true,
	}
	res := s.carryOut(terms, stdio, pipes)
	return s.finish(res)
}

// carryOut builds the room and comes back when nothing of it is left.
func (s *supervisor) carryOut(terms supervise.Terms, stdio [3]*os.File, pipes [2]*os.File) result.Result {
	command, err := supervise.Build(s.ctx, s.plan, stdio, nil, terms)
	for _, f := range stdio {
		f.Close() // the payload has its own
	}
	s.plan.Close()
	for i, r := range pipes {
		s.relays.add(r, s.log(i))
	}
	defer s.relays.finish(nil) // a disk that takes nothing any more does not take the record either
	if err != nil {
		return supervise.NotStarted(s.ctx, err, terms)
	}
	defer command.Close()
	// On record before the command may start: whatever dies from here on, cleanup finds it.
	if err := s.hold(command.Kept()); err != nil {
		command.Refuse(err)
	}
	if command.Release(s.ctx) {
		s.released()
	}
	command.Watch(s.ctx)
	s.endExecs(command)
	res := command.End(s.ctx)
	if res.Cause == result.Lost && s.doomed() {
		res.Cause = result.Killed
	}
	s.cancel(nil) // so that the probe ends, as long as its room is ours to look at
	s.probing.Wait()
	_ = command.Collect() // a keeper that was left reaps what it has
	return res
}

// endExecs tells the execs in the sandbox that it is about to end, if they get a grace
// period: those in a room that idles are given it here, because only they can use it.
func (s *supervisor) endExecs(command *supervise.Command) {
	grace, request := time.Duration(0), command.Request()
	switch command.Cause() {
	case result.Timeout:
		request.Signal, grace = unix.SIGTERM, time.Duration(s.flags.Grace)
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		grace = request.Grace
	}
	if grace == 0 || len(s.command) == 0 && (command.Cause() == result.IdleTimeout || s.own.EndUse()) {
		return // nobody is there, and nobody comes
	}
	_ = s.own.MarkEnding() // on a full disk they do not know why they end
	command.Spare(time.Now().Add(grace))
	if len(s.command) > 0 || command.Signal(request.Signal) != nil {
		return
	}
	const look = 10 * time.Millisecond
	over := time.After(grace)
	for !s.own.EndUse() {
		select {
		case <-time.After(look):
		case <-over:
			return
		case <-s.hurry:
			return
		}
	}
}

// start makes what has to be there before the sandbox: record, logs, pipes. Descriptors
// that it leaves open after an error end with us.
func (s *supervisor) start() (stdio [3]*os.File, pipes [2]*os.File, err error) {
	if s.record, err = s.firstRecord(); err != nil {
		return stdio, pipes, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	if err != nil {
		return stdio, pipes, err
	}
	stdio = [3]*os.File{null}
	for i := range pipes {
		if pipes[i], stdio[i+1], err = s.openLog(i); err != nil {
			return stdio, pipes, err
		}
	}
	if err := s.own.Write(s.record); err != nil {
		return stdio, pipes, err
	}
	if s.group, err = makeGroup(s.limits, s.own.ID, true); err != nil {
		return stdio, pipes, err
	}
	s.leave.reserved()
	if s.group != nil {
		s.plan.Bounds = s.group.Bounds()
	}
	return stdio, pipes, nil
}

// firstRecord is what is known of the sandbox before there is one.
func (s *supervisor) firstRecord() (state.Record, error) {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return state.Record{}, err
	}
	r := state.Record{
		Tags: s.flags.tags, Argv: s.command, CreatedAt: s.begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self,
		Workdir: s.plan.Workdir, Net: s.flags.Net, Hostname: s.flags.Hostname,
		TimeoutMS: result.Milliseconds(time.Duration(s.flags.Timeout)), IdleTimeoutMS: result.Milliseconds(time.Duration(s.flags.IdleTimeout)),
	}
	if r.Argv == nil {
		r.Argv = []string{}
	}
	if cred := s.plan.Cred(); cred != nil {
		r.UID, r.GID = &cred.UID, &cred.GID
	}
	if p := s.flags.probe.String(); p != "" {
		r.Ready = &state.Ready{Probe: p}
	}
	return r, nil
}

// hold puts on disk who the room's PID 1 is, before the payload may start.
func (s *supervisor) hold(kept *proc.Kept) error {
	if caller.gone() {
		return errors.New("who has started the sandbox is gone") // and nobody hears that
	}
	init, err := proc.Identify(kept.Room.PID)
	if err == nil && kept.Room.Exited() {
		err = proc.ErrGone // so that may have been another
	}
	if err != nil {
		return err
	}
	access := state.Access{Init: init, Cred: s.plan.Cred(), Net: s.flags.Net, Workdir: s.plan.Workdir, Filter: s.plan.Filter().Name(), Env: pairs(s.plan.Env())}
	if s.group != nil {
		access.Cgroups = s.group.Dirs()
	}
	if err := s.own.WriteAccess(access); err != nil {
		return err
	}
	return s.write(func(r *state.Record) {
		r.Init, s.kept = &init, kept
		if s.limits != nil {
			r.Limits = s.limits.Limits
		}
	})
}

// write changes the record.
func (s *supervisor) write(change func(*state.Record)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.record.Phase == state.Ended {
		return nil // too late
	}
	change(&s.record)
	return s.own.Write(s.record)
}

// released tells the world that the payload runs, and begins what goes on beside it.
func (s *supervisor) released() {
	s.leave.running()
	err := s.own.GrantAccess()
	if err == nil {
		err = s.write(func(r *state.Record) { r.Phase = state.Running })
	}
	if err == nil {
		err = caller.tell(handover{ID: s.own.ID, Name: s.own.Name, Status: string(state.Running)})
	}
	if err != nil {
		// Nobody knows of the sandbox, or nobody could find it.
		s.cancel(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL})
		return
	}
	if s.record.Ready != nil {
		s.probing.Go(s.becomeReady)
	}
	if s.flags.IdleTimeout > 0 {
		go s.endWhenIdle(time.Duration(s.flags.IdleTimeout))
	}
	sweepSoon(s.dir.Path())
	debug.FreeOSMemory() // it will be idle for a long time
}

// listen waits for requests to end the sandbox: kill.json, and a signal to look.
func (s *supervisor) listen() {
	for sig := range s.signals {
		request := supervise.Request{Cause: result.Canceled, Signal: sig.(syscall.Signal)}
		if kill, err := s.own.ReadKill(); err == nil && kill != nil {
			request = supervise.Request{Cause: result.Killed, Signal: signalNumber(kill.Signal), Grace: time.Duration(kill.GraceMS * float64(time.Millisecond))}
		}
		if s.ctx.Err() == nil {
			s.cancel(request)
			continue
		}
		// It is about to end anyway; but here is somebody with less patience.
		time.AfterFunc(request.Grace, s.now)
	}
}

// doomed says whether somebody was to kill the sandbox, and so has done it without
// us: sbxrun kill, when we are stopped.
func (s *supervisor) doomed() bool {
	kill, err := s.own.ReadKill()
	return err == nil && kill != nil
}

// signalNumber is the signal that [result.SignalName] has named; 0 for none.
func signalNumber(name string) syscall.Signal {
	if n, err := strconv.Atoi(name); err == nil {
		return syscall.Signal(n)
	}
	return unix.SignalNum("SIG" + name)
}

// endWhenIdle ends the sandbox when nothing has used it for so long.
func (s *supervisor) endWhenIdle(timeout time.Duration) {
	for {
		wait, err := s.own.EndIfIdle(timeout)
		if err != nil {
			wait = min(timeout, time.Second) // not to be told now
		} else if wait <= 0 {
			s.cancel(supervise.Request{Cause: result.IdleTimeout, Signal: unix.SIGTERM, Grace: time.Duration(s.flags.Grace)})
			return
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return
		}
	}
}

// finish records how it ended, or removes a sandbox that never was.
func (s *supervisor) finish(res result.Result) error {
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !caller.told.Load() {
		return result.All(s.because(s.leave.explain(res.Err)), s.own.Remove())
	}
	// Ended before its time, by somebody else than its caller.
	caller.fail(&result.Error{Code: "ended", Message: "the sandbox was ended while it was being set up: " + string(res.Cause)}, res.ExitCode())
	report := res.Report(s.own.ID, s.command)
	report.Bwrap = &result.ReportBwrap{Path: s.plan.Program.Path, Version: s.plan.Program.Version}
	err := s.write(func(r *state.Record) {
		r.Phase, r.Report = state.Ended, &report
		r.Logs = s.written()
	})
	return result.All(err, s.own.DropAccess(), s.own.Close())
}

// because adds to an error what bwrap has said on stderr, which nobody sees.
func (s *supervisor) because(e *result.Error) error {
	file, err := s.own.OpenFile(stderrFile, os.O_RDONLY)
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
