package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// ahead is an interpreter that was started before its program was known, in a warm room of the
// tenant who has run such a program before. The program's file is a FIFO at first: the
// interpreter comes as far as to read it. Then its name is free for the file itself, and the
// program is what is written to the FIFO. Nothing is shared with another call, and the
// interpreter is none the wiser.
type ahead struct {
	source  *Source
	tenant  string
	policy  slot.Policy
	room    *Room
	run     *job.Run
	files   *workspace.Dir
	fifo    *os.File
	out     [2]later
	expires *time.Timer
	used    bool
}

const (
	startBound = 30 * time.Second // for an interpreter to come as far as its program
	aheadIdle  = time.Minute      // after which it is ended

	// answerFirst is how long an interpreter's start is put off, so that the call that has just ended is
	// answered first: to start one takes all of a processor.
	answerFirst = 2 * time.Millisecond

	releaseEvery = 50 * time.Millisecond // until an open that waits for a reader has one
)

// later passes on to a writer that is not known at first.
type later struct {
	mutex sync.Mutex
	to    io.Writer
}

func (l *later) Write(b []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.to == nil {
		return len(b), nil
	}
	return l.to.Write(b)
}

func (l *later) set(to io.Writer) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.to = to
}

// before is a place of a program none of whose interpreters was started ahead.
type before struct {
	slot.Slot
	after func()
}

func (b before) Give() (*result.Result, error) {
	defer b.after()
	return b.Slot.Give()
}

// takeAhead returns an interpreter that waits for such a program; nil for none.
func (s *Source) takeAhead(tenant string, p slot.Policy) *ahead {
	s.aheadMutex.Lock()
	defer s.aheadMutex.Unlock()
	for i, a := range s.ahead {
		if !a.is(tenant, p) {
			continue
		}
		s.ahead = slices.Delete(s.ahead, i, i+1)
		a.expires.Stop()
		select {
		case <-a.run.Ended():
			s.starting.Go(func() { _, _ = a.Give() }) // nobody's: its proof is the room's
			return nil
		default:
			return a
		}
	}
	return nil
}

func (a *ahead) is(tenant string, p slot.Policy) bool {
	return a.tenant == tenant && reflect.DeepEqual(a.policy.Program, p.Program) && reflect.DeepEqual(a.policy.Policy, p.Policy)
}

// prepare has interpreters started for the next programs like this one.
func (s *Source) prepare(tenant string, p slot.Policy) {
	s.aheadMutex.Lock()
	defer s.aheadMutex.Unlock()
	for n := s.count(tenant, p); n < p.Program.Ahead && len(s.ahead)+len(s.pending) < s.pool.sizes.Max/2 && !s.closed; n++ {
		next := &ahead{tenant: tenant, policy: p}
		s.pending = append(s.pending, next)
		s.starting.Go(func() {
			time.Sleep(answerFirst)
			a, err := s.start(tenant, p)
			s.aheadMutex.Lock()
			defer s.aheadMutex.Unlock()
			s.pending = slices.DeleteFunc(s.pending, func(a *ahead) bool { return a == next })
			switch {
			case err != nil:
				s.pool.failed(fmt.Errorf("start %s ahead: %w", p.Program.Args[0], err))
			case a == nil: // there is no room
			case s.closed:
				s.starting.Go(func() { _, _ = a.Give() })
			default:
				s.ahead = append(s.ahead, a)
				a.expires = time.AfterFunc(aheadIdle, func() { s.drop(a) })
			}
		})
	}
}

// count is how many interpreters wait for such a program, or are being started. The mutex is held.
func (s *Source) count(tenant string, p slot.Policy) (n int) {
	for _, list := range [][]*ahead{s.ahead, s.pending} {
		for _, a := range list {
			if a.is(tenant, p) {
				n++
			}
		}
	}
	return n
}

// drop ends one that nobody has taken.
func (s *Source) drop(a *ahead) {
	s.aheadMutex.Lock()
	i := slices.Index(s.ahead, a)
	if i >= 0 {
		s.ahead = slices.Delete(s.ahead, i, i+1)
	}
	s.aheadMutex.Unlock()
	if i >= 0 {
		_, _ = a.Give() // as above
	}
}

// closeAhead ends all that nobody has taken.
func (s *Source) closeAhead() {
	s.aheadMutex.Lock()
	s.closed = true
	list := slices.Clone(s.ahead)
	s.aheadMutex.Unlock()
	for _, a := range list {
		a.expires.Stop()
		s.drop(a)
	}
	s.starting.Wait()
}

// start starts an interpreter, and returns when it reads its program; nil if there is no room.
func (s *Source) start(tenant string, p slot.Policy) (_ *ahead, err error) {
	r := s.takeWarm(tenant, p.Policy, p.Program.Limits)
	if r == nil {
		return nil, nil
	}
	a := &ahead{source: s, tenant: tenant, policy: p, room: r}
	defer func() {
		if err != nil {
			_, _ = a.Give() // the error says more
		}
	}()
	dir, user, err := r.Workdir()
	if err != nil {
		return nil, err
	}
	if a.files, err = workspace.Open(dir, ".", user); err != nil {
		return nil, err
	}
	fifo, err := a.files.Fifo(p.Program.File)
	if err != nil {
		return nil, err
	}
	defer fifo.Close()
	a.run, err = r.Start(context.Background(), slot.Command{Args: p.Program.Args, Spec: job.Spec{
		Stdout: &a.out[0], Stderr: &a.out[1], Limits: p.Program.Limits,
	}})
	if err != nil {
		return nil, err
	}
	if a.fifo, err = opened(fifo, a.run); err != nil {
		return nil, err
	}
	return a, a.files.Remove(p.Program.File)
}

// opened returns a FIFO's end for writing when the command has opened the other one.
func opened(fifo *os.File, run *job.Run) (*os.File, error) {
	name := fmt.Sprintf("/proc/self/fd/%d", fifo.Fd())
	over := make(chan struct{})
	var release sync.WaitGroup
	release.Go(func() {
		select {
		case <-over:
		case <-run.Ended():
		case <-time.After(startBound):
			run.End()
			_, _ = run.Wait() // its end is what counts
		}
		// Without a reader the open below waits for ever. Descriptors may be used up just now.
		for {
			fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err == nil {
				<-over
				unix.Close(fd)
				return
			}
			select {
			case <-over:
				return
			case <-time.After(releaseEvery):
			}
		}
	})
	fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	for err == unix.EINTR {
		fd, err = unix.Open(name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	}
	close(over)
	release.Wait()
	if err != nil {
		return nil, err
	}
	_ = unix.SetNonblock(fd, true) // for the poller
	w := os.NewFile(uintptr(fd), "program")
	select {
	case <-run.Ended():
		w.Close()
		return nil, errors.New("it ended before it had read a program")
	default:
		return w, nil
	}
}

func (a *ahead) Kind() slot.Kind { return slot.Warm }

func (a *ahead) Files() (*workspace.Dir, error) { return a.files, nil }

func (a *ahead) Ended() <-chan struct{} { return a.room.room.Ended() }

// Start gives the interpreter its program.
func (a *ahead) Start(ctx context.Context, c slot.Command) (slot.Running, error) {
	began := time.Now()
	a.used = true
	a.out[0].set(c.Stdout)
	a.out[1].set(c.Stderr)
	a.run.Bind(ctx, c.Timeout)
	// Most programs fit into the FIFO, which is empty.
	rest := []byte(c.Program)
	if n, err := unix.Write(proc.Descriptor(a.fifo), rest); err == nil {
		rest = rest[n:]
	}
	if len(rest) == 0 {
		a.fifo.Close()
		return &aheadRun{a.run, began}, nil
	}
	go func() {
		_, _ = a.fifo.Write(rest) // EPIPE: it reads no more
		a.fifo.Close()
	}()
	return &aheadRun{a.run, began}, nil
}

func (a *ahead) Give() (res *result.Result, err error) {
	if a.fifo != nil {
		a.fifo.Close()
	}
	if a.files != nil {
		a.files.Close()
	}
	if a.run != nil {
		a.run.End() // nothing, if it has ended
		res, err = a.run.Wait()
	}
	a.room.Give()
	if a.used {
		a.source.prepare(a.tenant, a.policy)
	}
	return res, err
}

// aheadRun is a command that was started ahead, as if it had begun with its program.
type aheadRun struct {
	*job.Run
	began time.Time
}

func (r *aheadRun) Wait() (*result.Result, error) {
	res, err := r.Run.Wait()
	if res == nil {
		return nil, err
	}
	own := *res
	own.Duration -= r.began.Sub(own.StartedAt)
	own.StartedAt, own.Setup = r.began, 0
	return &own, err
}

// fits reports whether a program can be started ahead: its limits are its command's alone.
func fits(p slot.Policy) bool {
	return p.Parts == nil && p.Program != nil && p.Program.Ahead > 0 && p.Lifetime == 0 && p.Limits == (limits.Request{})
}
