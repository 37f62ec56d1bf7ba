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
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// ahead is an interpreter started before its program is known, in a warm room for a tenant that has already run a
// program with the same policy. The program's file is a FIFO at first, and the interpreter blocks when it
// reads it. Its name is then removed, which frees it for the real file, and the program is written to the FIFO. Calls
// share nothing, and the interpreter does not notice.
type ahead struct {
	source  *Source
	tenant  string
	policy  slot.Policy
	room    *Room
	run     *supervise.Command
	files   *workspace.Dir
	fifo    *os.File
	out     [2]later
	expires *time.Timer
	used    bool
}

const (
	startBound = 30 * time.Second // until an interpreter opens its program
	aheadIdle  = time.Minute      // until an unused one is ended

	// answerFirst delays the start of an interpreter, which keeps a processor busy, until the call that has
	// just ended is answered.
	answerFirst = 2 * time.Millisecond

	releaseEvery = 50 * time.Millisecond // retry interval for releasing an open of a FIFO without a reader
)

// later is a writer whose destination is set later; until then it discards.
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

// before is a slot for a program without an interpreter started ahead. Its end starts one for the next call.
type before struct {
	slot.Slot
	after func()
}

func (b before) Give() (*result.Result, error) {
	defer b.after()
	return b.Slot.Give()
}

// takeAhead returns an interpreter that waits for a program of this tenant with this policy, or nil.
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
			s.starting.Go(func() { _, _ = a.Give() }) // the room's teardown proves its end
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

// prepare starts interpreters in the background for the next programs like this one.
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
			case a == nil: // no room is available
			case s.closed:
				s.starting.Go(func() { _, _ = a.Give() })
			default:
				s.ahead = append(s.ahead, a)
				a.expires = time.AfterFunc(aheadIdle, func() { s.drop(a) })
			}
		})
	}
}

// count returns the number of interpreters for this tenant and policy that wait for a program or are being started.
// The mutex is held.
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

// drop ends an interpreter unless it was taken.
func (s *Source) drop(a *ahead) {
	s.aheadMutex.Lock()
	i := slices.Index(s.ahead, a)
	if i >= 0 {
		s.ahead = slices.Delete(s.ahead, i, i+1)
	}
	s.aheadMutex.Unlock()
	if i >= 0 {
		_, _ = a.Give() // as in takeAhead
	}
}

// closeAhead ends all unused interpreters.
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

// start starts an interpreter and waits until it opens its program. It returns nil if no room is available.
func (s *Source) start(tenant string, p slot.Policy) (_ *ahead, err error) {
	p.Commands = p.Program.Limits
	r := s.takeWarm(tenant, p)
	if r == nil {
		return nil, nil
	}
	a := &ahead{source: s, tenant: tenant, policy: p, room: r}
	defer func() {
		if err != nil {
			_, _ = a.Give() // the first error is returned
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
	a.run, err = r.Start(context.Background(), slot.Command{Args: p.Program.Args, Options: supervise.Options{
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

// opened returns the write end of a FIFO after the command has opened the read end.
func opened(fifo *os.File, run *supervise.Command) (*os.File, error) {
	name := fmt.Sprintf("/proc/self/fd/%d", fifo.Fd())
	over := make(chan struct{})
	var release sync.WaitGroup
	release.Go(func() {
		select {
		case <-over:
		case <-run.Ended():
		case <-time.After(startBound):
			run.Kill()
			_, _ = run.Wait() // only the end matters
		}
		// Without a reader the open below blocks forever. This open is retried because descriptors may run out.
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
		return nil, errors.New("the interpreter ended before it read a program")
	default:
		return w, nil
	}
}

func (a *ahead) Kind() slot.Kind { return slot.Warm }

func (a *ahead) Files() (*workspace.Dir, error) { return a.files, nil }

func (a *ahead) Ended() <-chan struct{} { return a.room.room.Ended() }

// Start sends the program to the interpreter.
func (a *ahead) Start(ctx context.Context, c slot.Command) (slot.Running, error) {
	began := time.Now()
	a.used = true
	a.out[0].set(c.Stdout)
	a.out[1].set(c.Stderr)
	a.run.Bind(ctx, c.Timeout)
	// The FIFO is empty, and most programs fit into it.
	rest := []byte(c.Program)
	if n, err := unix.Write(proc.Descriptor(a.fifo), rest); err == nil {
		rest = rest[n:]
	}
	if len(rest) == 0 {
		a.fifo.Close()
		return &aheadRun{a.run, began}, nil
	}
	go func() {
		_, _ = a.fifo.Write(rest) // EPIPE: the interpreter has closed it
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
		a.run.Kill() // no effect if it has ended
		res, err = a.run.Wait()
	}
	a.room.Give()
	if a.used {
		a.source.prepare(a.tenant, a.policy)
	}
	return res, err
}

// aheadRun is the run of an interpreter started ahead. Its result counts from when it got its program.
type aheadRun struct {
	*supervise.Command
	began time.Time
}

func (r *aheadRun) Wait() (*result.Result, error) {
	res, err := r.Command.Wait()
	if res == nil {
		return nil, err
	}
	own := *res
	own.Duration -= r.began.Sub(own.StartedAt)
	own.StartedAt, own.Setup = r.began, 0
	return &own, err
}

// fits reports whether a program's interpreter can be started ahead: only its command may have limits.
func fits(p slot.Policy) bool {
	return p.Parts == nil && p.Program != nil && p.Program.Ahead > 0 && p.Lifetime == 0 && p.Limits == (limits.Request{})
}
