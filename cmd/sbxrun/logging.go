package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/logfile"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// openLog makes a stream's log, 0 for stdout and 1 for stderr, and the pipe that
// leads there.
func (s *supervisor) openLog(i int) (r, w *os.File, err error) {
	file, err := s.own.OpenFile([2]string{stdoutFile, stderrFile}[i], os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND)
	if err != nil {
		return nil, nil, err
	}
	if r, w, err = pipe(); err != nil {
		return nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	s.logs[i] = logfile.NewWriter(file, int64(s.flags.LogMax))
	return r, w, nil
}

// log returns what takes the pieces of a stream: it writes them to the log, looks in
// them for the line of --ready-log, and ends the sandbox if there is too much.
func (s *supervisor) log(i int) func([]byte) {
	seen := func([]byte) {}
	if s.flags.probe.log != nil {
		seen = s.matching()
	}
	cut := false
	return func(b []byte) {
		_, _ = s.logs[i].Write(b) // it never fails
		if s.logs[i].Truncated() && !cut {
			cut = true
			_ = s.write(func(r *state.Record) { r.Logs = s.written() }) // a full disk: they are cut for that
			if s.flags.OutputLimit == outputKill {
				s.cancel(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
			}
		}
		seen(b)
	}
}

// written is how much there was of both streams, up to now.
func (s *supervisor) written() *state.Logs {
	return &state.Logs{StdoutBytes: s.logs[0].Len(), StderrBytes: s.logs[1].Len(), StdoutTruncated: s.logs[0].Truncated(), StderrTruncated: s.logs[1].Truncated()}
}
