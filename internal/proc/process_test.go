package proc

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func open(t *testing.T, pid int) *Process {
	t.Helper()
	p, err := Open(pid)
	check.Must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func soon() time.Time { return time.Now().Add(harness.Bound) }

func TestOpenErrors(t *testing.T) {
	p, err := Open(1 << 22)
	check.That(t, err == ErrGone && p == nil, "a pid that cannot be: %v, %v", p, err) // one more than the largest PID
	for _, pid := range []int{0, -1, -1 << 31} {
		p, err := Open(pid)
		check.That(t, err != nil && err != ErrGone && p == nil, "pid %d: %v, %v; want an error", pid, p, err)
	}
}

// Each call returns the right result for a running process, a zombie and a reaped process.
func TestProcess(t *testing.T) {
	c, end := held(t, "cat")
	p := open(t, c.Process.Pid)
	check.That(t, p.PID == c.Process.Pid && p.FD() >= 3, "pid %d, descriptor %d", p.PID, p.FD())
	flags, err := unix.FcntlInt(uintptr(p.FD()), unix.F_GETFD, 0)
	check.That(t, err == nil && flags&unix.FD_CLOEXEC != 0, "descriptor flags %#x, %v", flags, err)
	check.That(t, !p.Exited(), "exited, but it runs")
	check.OK(t, p.Signal(0), "signal 0")
	err = p.Signal(65)
	check.That(t, errors.Is(err, unix.EINVAL), "signal 65: %v", err)
	err = p.Wait(time.Now().Add(time.Millisecond))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "wait for one that runs: %v", err)
	err = p.Wait(time.Unix(1, 0))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "wait, deadline long past: %v", err)

	check.OK(t, p.Signal(unix.SIGKILL), "kill")
	check.OK(t, p.Wait(soon()), "wait for the zombie")
	check.OK(t, p.Wait(time.Time{}), "wait again, without a deadline")
	check.OK(t, p.Signal(0), "signal to the zombie") // its PID is still its own

	end()
	check.That(t, p.Exited(), "reaped, and not exited")
	check.Equal(t, p.Signal(unix.SIGKILL), ErrGone, "signal after reaping")
	got, err := Open(c.Process.Pid)
	check.That(t, err == ErrGone, "open after reaping: %v, %v", got, err)

	p.Close()
	check.That(t, p.FD() == -1, "descriptor %d after close", p.FD())
	err = p.Signal(0)
	check.That(t, errors.Is(err, unix.EBADF), "signal after close: %v", err)
	err = p.Wait(soon())
	check.That(t, err != nil && !errors.Is(err, os.ErrDeadlineExceeded), "wait after close: %v", err)
}

func TestWaitContext(t *testing.T) {
	c, end := held(t, "cat")
	p := open(t, c.Process.Pid)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	later, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	for name, wait := range map[string]func() error{
		"canceled before":    func() error { return p.WaitContext(canceled, soon()) },
		"canceled meanwhile": func() error { return p.WaitContext(later, soon()) },
		"no deadline":        func() error { return p.WaitContext(canceled, time.Time{}) },
		"deadline":           func() error { return p.WaitContext(t.Context(), time.Now().Add(time.Millisecond)) },
	} {
		begin := time.Now()
		err := wait()
		check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%s: %v", name, err)
		took := time.Since(begin)
		check.That(t, took <= harness.Bound/2, "%s: took %v", name, took)
	}
	end()
	check.OK(t, p.WaitContext(t.Context(), soon()), "exited")
}

// Wait works without a free descriptor.
func TestWaitWithoutDescriptors(t *testing.T) {
	c, _ := held(t, "cat")
	p := open(t, c.Process.Pid)
	defer harness.LimitDescriptors(t, 1)() // poll(2) accepts at most this many, too
	if d, err := p.Dup(); err == nil {
		d.Close()
		t.Fatal("there was a descriptor")
	}
	err := p.Wait(time.Now().Add(5 * time.Millisecond))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "it runs: %v", err)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	err = p.WaitContext(canceled, time.Time{})
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "canceled: %v", err)
	time.AfterFunc(5*time.Millisecond, func() { _ = c.Process.Kill() })
	check.OK(t, p.Wait(soon()), "it has ended")
	p.Close()
	err = p.Wait(soon())
	check.That(t, errors.Is(err, os.ErrClosed), "closed: %v", err)
}

// A context that is cancelled just as a wait ends does not cut the next wait short.
func TestWaitContextLateCancellation(t *testing.T) {
	c, end := held(t, "cat")
	defer end()
	p, err := open(t, c.Process.Pid).Dup() // has its own deadline
	check.Must(t, err)
	defer p.Close()
	const next = 300 * time.Microsecond
	for i := range 1000 {
		ctx, cancel := context.WithCancel(t.Context())
		// Cancel sometimes just before the deadline and sometimes just after it.
		begin := time.Now()
		over := begin.Add(time.Duration(i%10) * 20 * time.Microsecond)
		go func() {
			time.Sleep(time.Until(over))
			cancel()
		}()
		if i%3 == 0 {
			<-ctx.Done() // wait with a cancelled context
		}
		err := p.WaitContext(ctx, over)
		check.Require(t, errors.Is(err, os.ErrDeadlineExceeded), "round %d: %v", i, err)
		begin = time.Now()
		err = p.Wait(begin.Add(next))
		check.Require(t, errors.Is(err, os.ErrDeadlineExceeded), "round %d, the next wait: %v", i, err)
		took := time.Since(begin)
		check.Require(t, took >= next, "round %d: the next wait took %v instead of %v", i, took, next)
		cancel()
	}
}

// The same holds for reads: data that arrives after a bounded read is not lost.
func TestReadUntilLateCancellation(t *testing.T) {
	r, w := harness.Pipe(t)
	buf := make([]byte, 1)
	for i := range 1000 {
		ctx, cancel := context.WithCancel(t.Context())
		stop := ReadUntil(ctx, r, soon())
		go cancel()
		if i%2 == 0 {
			_, err := r.Read(buf)
			check.Require(t, errors.Is(err, os.ErrDeadlineExceeded), "round %d: %v", i, err)
		}
		stop()
		err := r.SetReadDeadline(soon())
		check.Must(t, err)
		go func() { _, _ = w.Write([]byte{1}) }()
		_, err = r.Read(buf)
		check.Require(t, err == nil, "round %d: the next read: %v", i, err)
		<-ctx.Done()
	}
}

func TestReadUntil(t *testing.T) {
	r, _ := harness.Pipe(t)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, bound := range map[string]func() func(){
		"deadline":                   func() func() { return ReadUntil(t.Context(), r, time.Now().Add(time.Millisecond)) },
		"canceled":                   func() func() { return ReadUntil(canceled, r, soon()) },
		"canceled, without deadline": func() func() { return ReadUntil(canceled, r, time.Time{}) },
	} {
		stop := bound()
		_, err := r.Read(make([]byte, 1))
		check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%s: %v", name, err)
		stop()
	}
}

func TestWaitHangup(t *testing.T) {
	r, w := harness.Pipe(t)
	second, err := unix.Dup(int(r.Fd()))
	check.Must(t, err)
	brief := func() time.Time { return time.Now().Add(time.Millisecond) }
	err = WaitHangup(w, brief())
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "two readers: %v", err)
	r.Close()
	err = WaitHangup(w, brief())
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "one reader: %v", err)
	check.Must(t, w.SetWriteDeadline(time.Time{}))
	_, err = w.Write(make([]byte, 4096))
	check.Must(t, err)
	err = WaitHangup(w, brief())
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "one reader, and something to read: %v", err)
	done := make(chan error, 1)
	go func() { done <- WaitHangup(w, soon()) }()
	unix.Close(second)
	check.OK(t, <-done, "no reader")
	err = WaitHangup(w, time.Unix(1, 0))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "deadline long past: %v", err)
	w.Close()
	err = WaitHangup(w, soon())
	check.That(t, err != nil && !errors.Is(err, os.ErrDeadlineExceeded), "closed: %v", err)
}

// FromPidfd never returns another process if the pidfd is closed at the same time and its number is reused for another
// pidfd.
func TestDuplicateClosed(t *testing.T) {
	pids := [2]int{os.Getpid(), 1}
	others := make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer close(others)
	all.Go(func() { // opens the other process whenever a descriptor number is free
		for {
			select {
			case <-others:
				return
			default:
				if p, err := Open(pids[1]); err == nil {
					p.Close()
				}
			}
		}
	})
	for range 20000 {
		p, err := Open(pids[0])
		check.Must(t, err)
		all.Go(func() { p.Close() })
		q, err := FromPidfd(p.file)
		if err != nil {
			check.Require(t, errors.Is(err, os.ErrClosed), "%v", err)
			continue
		}
		q.Close()
		check.Require(t, q.PID == pids[0], "process %d instead of %d", q.PID, pids[0])
	}
}
