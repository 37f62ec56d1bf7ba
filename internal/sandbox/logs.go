package sandbox

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/logfile"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Logs are the private files of a sandbox that have what its command has written, byte for
// byte, to stdout and stderr.
var Logs = [2]string{"stdout.log", "stderr.log"}

// openLog makes a stream's log, 0 for stdout and 1 for stderr, and the pipe that
// leads there.
func (s *Sandbox) openLog(i int) (r, w *os.File, err error) {
	file, err := s.own.OpenFile(Logs[i], os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND)
	if err != nil {
		return nil, nil, err
	}
	s.logs[i] = logfile.NewWriter(file, s.spec.LogMax)
	return stream.Pipe()
}

// log returns what takes the pieces of a stream: it writes them to the log, looks in
// them for the line of --ready-log, and ends the sandbox if there is too much.
func (s *Sandbox) log(i int) func([]byte) {
	seen := func([]byte) {}
	if s.spec.Probe.Log != nil {
		seen = s.matching()
	}
	cut := false
	return func(b []byte) {
		_, _ = s.logs[i].Write(b) // it never fails
		if s.logs[i].Truncated() && !cut {
			cut = true
			_ = s.write(func(r *state.Record) { r.Logs = s.written() }) // a full disk: they are cut for that
			if s.spec.KillAtLogMax {
				s.End(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
			}
		}
		seen(b)
	}
}

// written is how much there was of both streams, up to now.
func (s *Sandbox) written() *state.Logs {
	return &state.Logs{StdoutBytes: s.logs[0].Len(), StderrBytes: s.logs[1].Len(), StdoutTruncated: s.logs[0].Truncated(), StderrTruncated: s.logs[1].Truncated()}
}
