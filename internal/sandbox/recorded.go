package sandbox

import (
	"context"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// recorded is what a sandbox and a detached exec have in common: a record and logs, by which
// others know of it, and an end that they ask for there.
type recorded struct {
	claim *state.Claim

	logMax       int64 // bytes of each log
	killAtLogMax bool
	logs         [2]*stream.Log // stdout, stderr

	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{}
	now    func() // closes hurry

	mu     sync.Mutex // of the record
	record state.Record
}

func newRecorded(ctx context.Context, claim *state.Claim, logMax int64, killAtLogMax bool) *recorded {
	r := &recorded{claim: claim, logMax: logMax, killAtLogMax: killAtLogMax, hurry: make(chan struct{})}
	r.now = sync.OnceFunc(func() { close(r.hurry) })
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	return r
}

// ID is what nobody else has.
func (r *recorded) ID() string { return r.claim.ID }

// End has it end. A second request can only shorten the grace period of the first.
func (r *recorded) End(q supervise.Request) {
	if r.ctx.Err() == nil {
		r.cancel(q)
		return
	}
	// It is about to end anyway; but here is somebody with less patience.
	time.AfterFunc(q.Grace, r.now)
}

// Asked has it end as kill.json says, which sbxrun kill has written; if there is none, by
// the signal that was to make us look.
func (r *recorded) Asked(sig syscall.Signal) {
	q := supervise.Request{Cause: result.Canceled, Signal: sig}
	if kill, err := r.claim.ReadKill(); err == nil && kill != nil {
		q = supervise.Request{Cause: result.Killed, Signal: signalNumber(kill.Signal), Grace: time.Duration(kill.GraceMS * float64(time.Millisecond))}
	}
	r.End(q)
}

// doomed says whether somebody was to kill it, and so has done it without us: sbxrun kill,
// when we are stopped.
func (r *recorded) doomed() bool {
	kill, err := r.claim.ReadKill()
	return err == nil && kill != nil
}

// signalNumber is the signal that [result.SignalName] has named; 0 for none.
func signalNumber(name string) syscall.Signal {
	if n, err := strconv.Atoi(name); err == nil {
		return syscall.Signal(n)
	}
	return unix.SignalNum("SIG" + name)
}

// write changes the record.
func (r *recorded) write(change func(*state.Record)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.record.Phase == state.Ended {
		return nil // too late
	}
	change(&r.record)
	return r.claim.Write(r.record)
}

// identity is that of PID 1 of a namespace whose inode is known.
func identity(init *proc.Process, ns uint64) (proc.Identity, error) {
	id, err := proc.IdentifyInit(init.PID, ns)
	if err == nil && init.Exited() {
		err = proc.ErrGone // so that may have been another
	}
	return id, err
}

// Logs are the private files of a sandbox, or of a detached exec, that have what its command
// has written, byte for byte, to stdout and stderr.
var Logs = [2]string{"stdout.log", "stderr.log"}

// openLogs makes the logs.
func (r *recorded) openLogs() error {
	for i, name := range Logs {
		file, err := r.claim.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND)
		if err != nil {
			return err
		}
		r.logs[i] = stream.NewLog(file, r.logMax)
	}
	return nil
}

// log returns what takes the pieces of a stream: it writes them to the log, and ends it all
// if there is too much.
func (r *recorded) log(i int) func([]byte) {
	cut := false
	return func(b []byte) {
		_, _ = r.logs[i].Write(b) // it never fails
		if r.logs[i].Truncated() && !cut {
			cut = true
			_ = r.write(func(rec *state.Record) { rec.Logs = r.written() }) // a full disk: they are cut for that
			if r.killAtLogMax {
				r.End(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
			}
		}
	}
}

// written is how much there was of both streams, up to now.
func (r *recorded) written() *state.Logs {
	return &state.Logs{StdoutBytes: r.logs[0].Len(), StderrBytes: r.logs[1].Len(), StdoutTruncated: r.logs[0].Truncated(), StderrTruncated: r.logs[1].Truncated()}
}

// conclude records how it has ended.
func (r *recorded) conclude(report result.Report) error {
	return r.write(func(rec *state.Record) {
		rec.Phase, rec.Report, rec.Refused = state.Ended, &report, nil
		rec.Logs = r.written()
	})
}
