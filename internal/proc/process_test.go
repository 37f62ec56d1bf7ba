package proc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, pid int) *Process {
	t.Helper()
	p, err := Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func soon() time.Time { return time.Now().Add(10 * time.Second) }

func TestOpenErrors(t *testing.T) {
	if p, err := Open(1 << 22); err != ErrGone || p != nil { // one more than the largest PID
		t.Errorf("a pid that cannot be: %v, %v", p, err)
	}
	for _, pid := range []int{0, -1, -1 << 31} {
		if p, err := Open(pid); err == nil || err == ErrGone || p != nil {
			t.Errorf("pid %d: %v, %v; want an error", pid, p, err)
		}
	}
}

// Each call returns the right result for a running process, a zombie and a reaped process.
func TestProcess(t *testing.T) {
	c, end := held(t, "cat")
	p := open(t, c.Process.Pid)
	if p.PID != c.Process.Pid || p.FD() < 3 {
		t.Errorf("pid %d, descriptor %d", p.PID, p.FD())
	}
	if flags, err := unix.FcntlInt(uintptr(p.FD()), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("descriptor flags %#x, %v", flags, err)
	}
	if p.Exited() {
		t.Error("exited, but it runs")
	}
	if err := p.Signal(0); err != nil {
		t.Errorf("signal 0: %v", err)
	}
	if err := p.Signal(65); !errors.Is(err, unix.EINVAL) {
		t.Errorf("signal 65: %v", err)
	}
	if err := p.Wait(time.Now().Add(time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wait for one that runs: %v", err)
	}
	if err := p.Wait(time.Unix(1, 0)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wait, deadline long past: %v", err)
	}

	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Errorf("kill: %v", err)
	}
	if err := p.Wait(soon()); err != nil {
		t.Errorf("wait for the zombie: %v", err)
	}
	if err := p.Wait(time.Time{}); err != nil {
		t.Errorf("wait again, without a deadline: %v", err)
	}
	if err := p.Signal(0); err != nil {
		t.Errorf("signal to the zombie: %v", err) // its PID is still its own
	}

	end()
	if !p.Exited() {
		t.Error("reaped, and not exited")
	}
	if err := p.Signal(unix.SIGKILL); err != ErrGone {
		t.Errorf("signal after reaping: %v", err)
	}
	if got, err := Open(c.Process.Pid); err != ErrGone {
		t.Errorf("open after reaping: %v, %v", got, err)
	}

	p.Close()
	if p.FD() != -1 {
		t.Errorf("descriptor %d after close", p.FD())
	}
	if err := p.Signal(0); !errors.Is(err, unix.EBADF) {
		t.Errorf("signal after close: %v", err)
	}
	if err := p.Wait(soon()); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wait after close: %v", err)
	}
}

// A handle never reaches another process that reuses the PID. In a PID namespace of its own, the
// test can choose the next PID.
func TestProcessPIDReuse(t *testing.T) {
	const inside = "SBXRUN_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		c := exec.Command("unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", os.Args[0], "-test.run=^TestProcessPIDReuse$")
		c.Env = append(os.Environ(), inside+"=1")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("in a PID namespace of its own: %v\n%s", err, out)
		}
		return
	}
	for range 100 {
		c, end := held(t, "cat")
		p := open(t, c.Process.Pid)
		end()
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(c.Process.Pid-1)), 0); err != nil {
			t.Fatal(err)
		}
		d, end := held(t, "cat")
		if d.Process.Pid != c.Process.Pid {
			end() // a thread of this process has taken the PID
			continue
		}
		if err := p.Signal(unix.SIGKILL); err != ErrGone {
			t.Errorf("signal: %v, want %v", err, ErrGone)
		}
		if fd, err := p.OpenRoot(); err != ErrGone {
			t.Errorf("root: %d, %v, want %v", fd, err, ErrGone)
		}
		if !p.Exited() {
			t.Error("the first process is taken for the second")
		}
		q := open(t, d.Process.Pid)
		if q.Exited() {
			t.Error("the second process is gone")
		}
		fd, err := q.OpenRoot()
		if err != nil {
			t.Errorf("root: %v", err)
		}
		unix.Close(fd)
		end()
		return
	}
	t.Error("the number was never reused")
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
		if err := wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("%s: took %v", name, took)
		}
	}
	end()
	if err := p.WaitContext(t.Context(), soon()); err != nil {
		t.Errorf("exited: %v", err)
	}
}

// Wait works without a free descriptor.
func TestWaitWithoutDescriptors(t *testing.T) {
	c, _ := held(t, "cat")
	p := open(t, c.Process.Pid)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = 1 // poll(2) accepts at most this many descriptors, too
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	if d, err := p.Dup(); err == nil {
		d.Close()
		t.Fatal("there was a descriptor")
	}
	if err := p.Wait(time.Now().Add(5 * time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it runs: %v", err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.WaitContext(canceled, time.Time{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("canceled: %v", err)
	}
	time.AfterFunc(5*time.Millisecond, func() { _ = c.Process.Kill() })
	if err := p.Wait(soon()); err != nil {
		t.Errorf("it has ended: %v", err)
	}
	p.Close()
	if err := p.Wait(soon()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// A context that is cancelled just as a wait ends does not cut the next wait short.
func TestWaitContextLateCancellation(t *testing.T) {
	c, end := held(t, "cat")
	defer end()
	p, err := open(t, c.Process.Pid).Dup() // has its own deadline
	if err != nil {
		t.Fatal(err)
	}
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
		if err := p.WaitContext(ctx, over); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("round %d: %v", i, err)
		}
		begin = time.Now()
		if err := p.Wait(begin.Add(next)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("round %d, the next wait: %v", i, err)
		}
		if took := time.Since(begin); took < next {
			t.Fatalf("round %d: the next wait took %v instead of %v", i, took, next)
		}
		cancel()
	}
}

// The same holds for reads: data that arrives after a bounded read is not lost.
func TestReadUntilLateCancellation(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	buf := make([]byte, 1)
	for i := range 1000 {
		ctx, cancel := context.WithCancel(t.Context())
		stop := ReadUntil(ctx, r, soon())
		go cancel()
		if i%2 == 0 {
			if _, err := r.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("round %d: %v", i, err)
			}
		}
		stop()
		if err := r.SetReadDeadline(soon()); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = w.Write([]byte{1}) }()
		if _, err := r.Read(buf); err != nil {
			t.Fatalf("round %d: the next read: %v", i, err)
		}
		<-ctx.Done()
	}
}

func TestReadUntil(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, bound := range map[string]func() func(){
		"deadline":                   func() func() { return ReadUntil(t.Context(), r, time.Now().Add(time.Millisecond)) },
		"canceled":                   func() func() { return ReadUntil(canceled, r, soon()) },
		"canceled, without deadline": func() func() { return ReadUntil(canceled, r, time.Time{}) },
	} {
		stop := bound()
		if _, err := r.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		stop()
	}
}

func TestWaitHangup(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	second, err := unix.Dup(int(r.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	brief := func() time.Time { return time.Now().Add(time.Millisecond) }
	if err := WaitHangup(w, brief()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("two readers: %v", err)
	}
	r.Close()
	if err := WaitHangup(w, brief()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one reader: %v", err)
	}
	if err := w.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := WaitHangup(w, brief()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one reader, and something to read: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- WaitHangup(w, soon()) }()
	unix.Close(second)
	if err := <-done; err != nil {
		t.Errorf("no reader: %v", err)
	}
	if err := WaitHangup(w, time.Unix(1, 0)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("deadline long past: %v", err)
	}
	w.Close()
	if err := WaitHangup(w, soon()); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("closed: %v", err)
	}
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
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() { p.Close() })
		q, err := FromPidfd(p.file)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				t.Fatal(err)
			}
			continue
		}
		q.Close()
		if q.PID != pids[0] {
			t.Fatalf("process %d instead of %d", q.PID, pids[0])
		}
	}
}
