package cells

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/stream"
)

// Kernel runs cells in one interpreter, and replaces it if it is lost. It is safe for concurrent use.
type Kernel struct {
	spec Spec
	ctx  context.Context // of the interpreters; canceled by Close
	end  context.CancelFunc

	running sync.Mutex     // held by a cell; guards the rest
	live    *interpreter   // nil if none was started
	earlier *result.Result // the previous interpreter's end, if not reported yet
}

// renew starts an interpreter.
func (k *Kernel) renew(ctx context.Context, deadline time.Time) (err error) {
	if k.live, err = k.spec.launch(k.ctx, ctx, deadline); err == nil {
		return nil
	}
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: "cannot start the interpreter: " + err.Error(), Err: err}
	}
	return e
}

// Run runs a cell, starting an interpreter if there is none. It returns soon after the deadline or the end of
// ctx, whatever the code does, and also during the interpreter's start. While another cell runs, it returns
// an error with the code "busy-session".
//
// The end of the cell is described by the answer and is not an error. Errors are [*result.Error]: without an
// answer nothing has run; with one, the teardown of a lost interpreter is unproven.
func (k *Kernel) Run(ctx context.Context, c Cell) (*Answer, error) {
	if !k.running.TryLock() {
		return nil, &result.Error{Code: "busy-session", Message: "a cell is running in this interpreter", Hint: "wait for its answer, or use another session"}
	}
	defer k.running.Unlock()
	if k.ctx.Err() != nil {
		return nil, &result.Error{Code: "ended", Message: "the interpreter was closed"}
	}
	if k.live != nil && !k.live.alive() { // between two cells
		k.earlier = k.live.result
		k.live.close()
		k.live = nil
	}
	begin := time.Now()
	var deadline time.Time
	if c.Timeout > 0 {
		deadline = begin.Add(c.Timeout)
	}
	if k.live == nil {
		if err := k.renew(ctx, deadline); err != nil {
			return nil, err
		}
	}
	if c.Begun != nil {
		c.Begun()
	}
	i := k.live
	i.number++
	answer := &Answer{State: Kept, Number: i.number, Earlier: k.earlier}
	k.earlier = nil
	size := cmp.Or(max(0, c.MaxOutput), maxOutput)
	for _, o := range []*output{i.out, i.err} {
		_, dropped := o.swap(stream.NewBuffer(size))
		answer.Dropped += dropped
	}
	t := newTurn(c)
	if answer.Cause = result.Timeout; !i.late {
		answer.Cause = i.converse(ctx, t, i.number, deadline)
	}
	if answer.Cause != Done && (i.late || answer.Cause != result.Timeout && answer.Cause != result.Canceled || !i.interrupt(t)) {
		i.kill()
		k.live, answer.State, answer.Ended = nil, Lost, i.result
		answer.Cause = cmp.Or(answer.Cause, i.result.Cause)
	}
	out, _ := i.out.swap(nil)
	err, _ := i.err.swap(nil)
	answer.Stdout, answer.Stderr = out.Stream(), err.Stream()
	answer.Results, answer.Truncated, answer.Error = t.results, t.truncated, t.err
	answer.Duration = time.Since(begin)
	if k.live == nil {
		i.close()
		return answer, i.failure
	}
	return answer, nil
}

// Close ends the interpreter, everything it started, and the current cell, and waits for that. The error is a
// [*result.Error] if the teardown is unproven.
func (k *Kernel) Close() error {
	k.end()
	k.running.Lock()
	defer k.running.Unlock()
	if k.live == nil {
		return nil
	}
	<-k.live.ended.Done()
	k.live.close()
	defer func() { k.live = nil }()
	return k.live.failure
}
