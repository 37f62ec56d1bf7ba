package stream

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// source is a pipe or terminal that a command writes to and a relay reads.
type source struct {
	name string
	open func(*testing.T) (r, w *os.File)
	most int // capacity in bytes
}

func sources() []source {
	return []source{
		{"pipe", func(t *testing.T) (r, w *os.File) {
			r, w, err := Pipe()
			check.Must(t, err)
			return r, w
		}, 64 << 10},
		{"large pipe", func(t *testing.T) (r, w *os.File) {
			r, w, err := Pipe()
			check.Must(t, err)
			_, err = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20)
			check.Must(t, err)
			return r, w
		}, 1 << 20},
		{"pipe that epoll has refused", func(t *testing.T) (r, w *os.File) {
			var ends [2]int
			check.Must(t, unix.Pipe2(ends[:], unix.O_CLOEXEC))
			// In this order Go's poller does not get it.
			r, w = os.NewFile(uintptr(ends[0]), "pipe"), os.NewFile(uintptr(ends[1]), "pipe")
			check.Must(t, unix.SetNonblock(ends[0], true))
			return r, w
		}, 64 << 10},
		{"terminal", func(t *testing.T) (r, w *os.File) {
			r, w, err := pty.Open()
			check.Must(t, err)
			_, err = term.MakeRaw(int(w.Fd()))
			check.Must(t, err)
			err = unix.SetNonblock(proc.Descriptor(r), true)
			check.Must(t, err) // as OpenTerminal does
			return r, w
		}, 8 << 10},
	}
}

// Finish returns everything at once when another process holds the write end open.
func TestRelayHeldOpen(t *testing.T) {
	for _, s := range sources() {
		t.Run(s.name, func(t *testing.T) {
			for range 50 {
				r, w := s.open(t)
				var got bytes.Buffer
				var relay Relays
				relay.Add(r, func(b []byte) { got.Write(b) })
				want := strings.Repeat("0123456789abcdef", s.most/16)
				_, err := w.WriteString(want)
				check.Must(t, err)
				begin := time.Now()
				check.That(t, relay.Finish(nil), "not complete")
				took := time.Since(begin)
				check.That(t, took <= 5*time.Second, "it took %v", took)
				check.That(t, got.String() == want, "%d bytes of %d", got.Len(), len(want))
				r.Close()
				w.Close()
			}
		})
	}
}

// Finish ends although another process writes on and on. The earlier output comes first,
// and no more follows than the source can hold.
func TestRelayFlooded(t *testing.T) {
	for _, s := range sources() {
		t.Run(s.name, func(t *testing.T) {
			r, w := s.open(t)
			defer r.Close()
			var got bytes.Buffer
			var relay Relays
			relay.Add(r, func(b []byte) { got.Write(b) })
			const first = "the payload's\n"
			_, err := w.WriteString(first)
			check.Must(t, err)
			over := make(chan struct{})
			stop := make(chan struct{})
			go func() {
				defer close(over)
				line := bytes.Repeat([]byte("x"), 1000)
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := unix.Write(proc.Descriptor(w), line); err != nil && err != unix.EAGAIN && err != unix.EINTR {
						return
					}
				}
			}()
			begin := time.Now()
			complete := relay.Finish(nil)
			took := time.Since(begin)
			close(stop)
			r.Close() // a blocked write fails with EPIPE or EIO
			<-over
			w.Close()
			check.That(t, complete && took <= 5*time.Second, "complete: %v, after %v", complete, took)
			check.That(t, strings.HasPrefix(got.String(), first), "%.30q", got.String())
		})
	}
}

// All output is forwarded to a slow reader as long as it makes progress.
func TestRelaySlowTaker(t *testing.T) {
	for _, s := range sources() {
		t.Run(s.name, func(t *testing.T) {
			r, w := s.open(t)
			defer w.Close() // only at the end
			var got bytes.Buffer
			var relay Relays
			relay.Add(r, func(b []byte) {
				time.Sleep(time.Millisecond)
				got.Write(b)
			})
			want := strings.Repeat("0123456789abcdef", 5*s.most/16)
			err := w.SetWriteDeadline(time.Now().Add(time.Minute))
			check.Require(t, err == nil || errors.Is(err, os.ErrNoDeadline), "%v", err)
			_, err = w.WriteString(want)
			check.Must(t, err)
			check.That(t, relay.Finish(nil) && got.String() == want, "%d bytes of %d", got.Len(), len(want))
		})
	}
}

// Await times out for a stuck reader, and waits for a slow one.
func TestAwait(t *testing.T) {
	for _, c := range []struct {
		name     string
		every    time.Duration // interval between pieces
		pieces   int           // number of pieces until done is closed; 0 for never
		told     time.Duration // time at which told is closed; 0 for never
		complete bool
		took     time.Duration
	}{
		{name: "done", every: time.Second, pieces: 1, complete: true, took: time.Second},
		{name: "slow", every: 9 * time.Second, pieces: 20, complete: true, took: 180 * time.Second},
		{name: "stalled later", every: 11 * time.Second, pieces: 3, took: Stalled},
		{name: "stalled", every: time.Hour, took: Stalled},
		{name: "told", every: time.Hour, told: time.Second, took: time.Second + hurried},
		{name: "told, just in time", every: time.Second + hurried/2, pieces: 1, told: time.Second, complete: true, took: time.Second + hurried/2},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				passed, done, told, stop := make(chan struct{}, 1), make(chan struct{}), make(chan struct{}), make(chan struct{})
				go func() {
					for n := 1; ; n++ {
						select {
						case <-time.After(c.every):
						case <-stop:
							return
						}
						Progress(passed)
						if n == c.pieces {
							close(done)
							return
						}
					}
				}()
				if c.told > 0 {
					time.AfterFunc(c.told, func() { close(told) })
				}
				begin := time.Now()
				complete := Await(done, passed, told)
				took := time.Since(begin)
				check.That(t, complete == c.complete && took == c.took, "%v after %v, want %v after %v", complete, took, c.complete, c.took)
				close(stop)
			})
		})
	}
}

// TakesOutput is true while a pipe has room for another write.
func TestTakesOutput(t *testing.T) {
	r, w, err := Pipe()
	check.Must(t, err)
	defer r.Close()
	defer w.Close()
	check.Must(t, unix.SetNonblock(proc.Descriptor(w), true))
	total := 0
	for TakesOutput(w, 0) {
		n, err := unix.Write(proc.Descriptor(w), make([]byte, 4096))
		check.Require(t, n == 4096 && err == nil, "%d bytes, %v", n, err)
		total += n
	}
	check.That(t, total >= 4096, "%d bytes", total)
	// Signals neither end nor prolong the wait.
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGURG) // the runtime's own signal, without effect
			}
		}
	}()
	const within = 50 * time.Millisecond
	begin := time.Now()
	check.That(t, !TakesOutput(w, within) && time.Since(begin) >= within/2 && time.Since(begin) <= 20*time.Second, "full: after %v", time.Since(begin))
	close(stop)
	r.Close()
	check.That(t, TakesOutput(w, 20*time.Second), "without a reader")
}

// A late pipe is read by Finish, or from Begin on.
func TestLate(t *testing.T) {
	for _, size := range []int{0, 10, 1 << 20} {
		fds, err := pipe(reading)
		check.Must(t, err)
		w := os.NewFile(uintptr(fds[writing]), "pipe")
		var r Relays
		taken := 0
		r.AddLate(fds[reading], func(b []byte) { taken += len(b) })
		if size > PieceSize {
			r.Begin()
		}
		_, err = w.Write(make([]byte, size))
		check.Must(t, err)
		check.That(t, r.Finish(nil) && taken == size, "%d of %d bytes", taken, size)
		w.Close()
	}
}
