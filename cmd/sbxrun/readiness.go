package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/logfile"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/ready"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// becomeReady looks whether the sandbox is ready, until it is, and puts it on
// record: so whoever asks later knows at once.
func (s *supervisor) becomeReady() {
	ctx, cancel := context.WithTimeout(s.ctx, time.Duration(s.flags.ReadyTimeout))
	defer cancel()
	err := s.awaitReady(ctx)
	if err != nil && s.ctx.Err() != nil || errors.Is(err, proc.ErrGone) {
		return // it ends, and that is on record
	}
	_ = s.write(func(r *state.Record) { // a full disk: it is not known to be ready
		switch {
		case err == nil:
			r.Ready.ReadyAt = time.Now().UTC().Format(result.TimeFormat)
		case errors.Is(err, context.DeadlineExceeded):
			r.Ready.Error = fmt.Sprintf("not ready within %v", s.flags.ReadyTimeout)
		default:
			r.Ready.Error = err.Error()
		}
	})
}

func (s *supervisor) awaitReady(ctx context.Context) error {
	probe := s.flags.probe
	if probe.log != nil {
		select {
		case <-s.matched:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	try := s.tryExec
	if probe.port != 0 {
		try = s.tryPort
	}
	return ready.Probe(ctx, time.Duration(s.flags.ReadyInterval), try)
}

// tryPort looks into the tables of the sandbox's own network namespace.
func (s *supervisor) tryPort(context.Context) (bool, error) {
	found, err := ready.Listens(s.kept.Room.PID, s.flags.probe.port)
	if s.kept.Room.Exited() {
		// It has given up its tables, though it may not have ended yet; and then whose they
		// were, nobody knows.
		return false, proc.ErrGone
	}
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		err = nil // the next try may have a descriptor
	}
	return found, err
}

// probeBound is how long one try by a command may take.
const probeBound = 30 * time.Second

// tryExec runs the command in the sandbox, as exec does, but does not count as
// its use.
func (s *supervisor) tryExec(ctx context.Context) (bool, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return false, nil // the next try may have one
	}
	defer null.Close()
	// A pidfd of its own: the other one is for the end of the sandbox, and takes one
	// wait at a time.
	room, err := s.record.Init.Open()
	if err != nil {
		return false, nil // likewise; or it is about to end
	}
	defer room.Close()
	bounds, err := s.boundsWithin()
	if err != nil {
		return false, nil // likewise
	}
	entry := s.plan.Entry()
	entry.Command, entry.Bounds = []string{"/bin/sh", "-c", s.flags.probe.exec}, bounds
	terms := supervise.Terms{Timeout: probeBound, ProofTimeout: time.Duration(s.flags.ProofTimeout), Begin: time.Now()}
	res := supervise.Run(ctx, terms, func(ctx context.Context) (*supervise.Command, error) {
		return supervise.Enter(ctx, entry, room, [3]*os.File{null, null, null}, nil, terms)
	})
	return res.Cause == result.Exited && res.ExitCode() == 0, nil
}

// matching looks for the line that says that the sandbox is ready, in one stream.
func (s *supervisor) matching() func([]byte) {
	m := logfile.NewMatcher(s.flags.probe.log)
	return func(p []byte) {
		if m.Feed(p) {
			s.match()
		}
	}
}
