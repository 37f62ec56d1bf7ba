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

// recorded is the common part of a sandbox and a detached exec: a record and logs, by which other processes
// know it, and an end that they can request.
type recorded struct {
	claim *state.Claim

	logMax       int64 // maximum bytes of each log
	killAtLogMax bool
	logs         [2]*stream.Log // stdout, stderr

	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{}
	now    func() // closes hurry

	mu     sync.Mutex // protects record
	record state.Record
}

func newRecorded(ctx context.Context, claim *state.Claim, logMax int64, killAtLogMax bool) *recorded {
	r := &recorded{claim: claim, logMax: logMax, killAtLogMax: killAtLogMax, hurry: make(chan struct{})}
	r.now = sync.OnceFunc(func() { close(r.hurry) })
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	return r
}

// ID returns the unique ID.
func (r *recorded) ID() string { return r.claim.ID }

// End ends it. A second request can only shorten the grace period of the first.
func (r *recorded) End(q supervise.Request) {
	if r.ctx.Err() == nil {
		r.cancel(q)
		return
	}
	// It is ending already, but this request may have a shorter grace period.
	time.AfterFunc(q.Grace, r.now)
}

// Asked ends it as requested in kill.json, which sbxrun kill writes, or without that file by the received signal.
func (r *recorded) Asked(sig syscall.Signal) {
	q := supervise.Request{Cause: result.Canceled, Signal: sig}
	if kill, err := r.claim.ReadKill(); err == nil && kill != nil {
		q = supervise.Request{Cause: result.Killed, Signal: signalNumber(kill.Signal), Grace: time.Duration(kill.GraceMS * float64(time.Millisecond))}
	}
	r.End(q)
}

// doomed reports whether there is a request to kill it. sbxrun kill may then have killed it itself, if this
// process was stopped.
func (r *recorded) doomed() bool {
	kill, err := r.claim.ReadKill()
	return err == nil && kill != nil
}

// signalNumber returns the signal named by [result.SignalName]; 0 for none.
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

// identity returns the identity of PID 1 of a namespace with this inode.
func identity(init *proc.Process, ns uint64) (proc.Identity, error) {
	id, err := proc.IdentifyInit(init.PID, ns)
	if err == nil && init.Exited() {
		err = proc.ErrGone // the PID may have been reused
	}
	return id, err
}

// Logs are the names of the files with the stdout and stderr of a sandbox's or a detached exec's command,
// byte for byte.
var Logs = [2]string{"stdout.log", "stderr.log"}

// openLogs creates the logs.
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

// log returns a function that writes a stream to its log, and ends the sandbox or exec at the limit if
// requested.
func (r *recorded) log(i int) func([]byte) {
	cut := false
	return func(b []byte) {
		_, _ = r.logs[i].Write(b) // never fails
		if r.logs[i].Truncated() && !cut {
			cut = true
			_ = r.write(func(rec *state.Record) { rec.Logs = r.written() }) // fails on a full disk, which also truncates logs
			if r.killAtLogMax {
				r.End(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
			}
		}
	}
}

// written returns the amount of output so far.
func (r *recorded) written() *state.Logs {
	return &state.Logs{StdoutBytes: r.logs[0].Len(), StderrBytes: r.logs[1].Len(), StdoutTruncated: r.logs[0].Truncated(), StderrTruncated: r.logs[1].Truncated()}
}

// conclude records how it ended.
func (r *recorded) conclude(report result.Report) error {
	return r.write(func(rec *state.Record) {
		rec.Phase, rec.Report, rec.Refused = state.Ended, &report, nil
		rec.Logs = r.written()
	})
}
