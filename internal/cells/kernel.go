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

// Kernel runs cells in an interpreter that is kept, and starts another one where it is lost.
// Its methods may be called by any goroutine.
type Kernel struct {
	spec Spec
	ctx  context.Context // of the interpreters; done by Close
	end  context.CancelFunc

	running sync.Mutex     // a cell; the rest is who has it's
	live    *interpreter   // the last one; nil if it could not be started
	earlier *result.Result // how the one before has ended, if nobody was told
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

// Run runs a cell, after it has started an interpreter if there is none, and returns when it is over:
// soon after its deadline, or ctx's end, whatever the code does, and what runs at the interpreter's
// start. One cell at a time: while one runs the error's Code is "busy-session".
//
// However the cell has ended is in the answer, and no error. An error is a [*result.Error]:
// without an answer nothing has run; with one, an interpreter that was lost could not be proven
// gone.
func (k *Kernel) Run(ctx context.Context, c Cell) (*Answer, error) {
	if !k.running.TryLock() {
		return nil, &result.Error{Code: "busy-session", Message: "a cell is running in this interpreter", Hint: "wait for its answer, or use another session"}
	}
	defer k.running.Unlock()
	if k.ctx.Err() != nil {
		return nil, &result.Error{Code: "ended", Message: "the interpreter was closed"}
	}
	if k.live != nil && !k.live.alive() { // since the last cell
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

// Close ends the interpreter and all that it has started, and a cell that runs, and returns
// when nothing is left. An error is a [*result.Error], if that could not be proven.
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
