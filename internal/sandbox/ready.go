package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Probe tells when a sandbox is ready: when a program in it listens on a port, when a command for /bin/sh exits
// with 0 in it, or when a line of its log matches. At most one of them is set.
type Probe struct {
	Port uint16
	Exec string
	Log  *regexp.Regexp

	Interval time.Duration
	Timeout  time.Duration // 0 means none
}

func (p Probe) String() string {
	switch {
	case p.Port != 0:
		return "tcp:" + strconv.Itoa(int(p.Port))
	case p.Exec != "":
		return "exec:" + p.Exec
	case p.Log != nil:
		return "log:" + p.Log.String()
	}
	return ""
}

// Within returns ctx with a timeout, where 0 means no timeout.
func Within(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// becomeReady waits until the sandbox is ready, and records that.
func (s *Sandbox) becomeReady() {
	ctx, cancel := Within(s.ctx, s.Probe.Timeout)
	defer cancel()
	err := s.awaitReady(ctx)
	if err != nil && s.ctx.Err() != nil || errors.Is(err, proc.ErrGone) {
		return // it is ending, which is recorded
	}
	_ = s.write(func(r *state.Record) { // on a full disk it does not become ready
		switch {
		case err == nil:
			r.Ready.ReadyAt = time.Now().UTC().Format(result.TimeFormat)
		case errors.Is(err, context.DeadlineExceeded):
			r.Ready.Error = fmt.Sprintf("not ready within %v", values.Duration(s.Probe.Timeout))
		default:
			r.Ready.Error = err.Error()
		}
	})
}

func (s *Sandbox) awaitReady(ctx context.Context) error {
	probe := s.Probe
	if probe.Log != nil {
		select {
		case <-s.matched:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	try := s.tryExec
	if probe.Port != 0 {
		try = s.tryPort
	}
	return Poll(ctx, s.Probe.Interval, try)
}

// tryPort checks the tables of the sandbox's own network namespace.
func (s *Sandbox) tryPort(context.Context) (bool, error) {
	found, err := listensOn(s.Kept().Room.PID, s.Probe.Port)
	if s.Kept().Room.Exited() || errors.Is(err, fs.ErrNotExist) {
		// It has ended, so the tables may be another process's; or it is about to end and has released
		// its tables.
		return false, proc.ErrGone
	}
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		err = nil // try again with more descriptors
	}
	return found, err
}

// probeBound is the timeout of one attempt of a command.
const probeBound = 30 * time.Second

// tryExec runs the command in the sandbox as exec does, without counting as a use.
func (s *Sandbox) tryExec(ctx context.Context) (bool, error) {
	// With its own pidfd: the other one is for waiting for the sandbox's end, and allows one wait at a
	// time.
	room, err := s.record.Init.OpenInit()
	if err != nil {
		return false, nil // try again, unless it is ending
	}
	defer room.Close()
	c := supervise.Command{Options: supervise.Options{Timeout: probeBound, ProofTimeout: s.ProofTimeout}, Place: supervise.Place{Entry: s.Place.Plan.Entry(), Room: room}}
	c.Place.Entry.Command = []string{"/bin/sh", "-c", "--", s.Probe.Exec}
	if s.Group != nil { // join the sandbox's cgroups and limits
		if c.Planned, err = limits.For(limits.Request{}, true, s.Group.Dirs(), s.Planned.OfProcesses()); err != nil {
			return false, nil // try again
		}
	}
	res := c.Run(ctx)
	return res.Cause == result.Exited && res.ExitCode() == 0, nil
}

// reading returns a function that writes a stream to its log, and matches its lines if the probe needs
// that.
func (s *Sandbox) reading(i int) func([]byte) {
	log := s.log(i)
	if s.Probe.Log == nil {
		return log
	}
	m := stream.NewMatcher(s.Probe.Log)
	return func(p []byte) {
		log(p)
		if m.Feed(p) {
			s.match()
		}
	}
}
