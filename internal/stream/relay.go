package stream

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Relays pass on what the payload writes to pipes or to a terminal that are ours,
// in the background. run, exec and start use them alike.
//
// While the payload runs they read each source as far as it goes. After its end
// nobody reads to the end of file: that comes only when the last write end is
// closed, and a process outside the sandbox may hold one for ever. The payload can
// send its descriptors to whom it likes (SCM_RIGHTS, unix(7)), and others can open
// /proc/PID/fd/1. What the dead have written is in the pipe already, so Finish
// reads as much as there is, and no more.
type Relays struct {
	sources []*os.File
	late    []late
	copying sync.WaitGroup
	ongoing atomic.Int32
	over    atomic.Bool   // Finish was called
	passed  chan struct{} // one is there when a piece was taken since the last one
}

// PieceSize is how much a relay reads at once: as much as a pipe has by itself (pipe(7)).
const PieceSize = 64 << 10

// pieces are what was read into, for the next one: a server has many short commands.
var pieces = sync.Pool{New: func() any { return new([PieceSize]byte) }}

// Stalled is how long one piece may take whoever reads our output, once the
// payload has ended. After that the rest of the output is dropped.
const Stalled = 10 * time.Second

// hurried is how long all that is left may take when a signal tells us to end.
const hurried = 500 * time.Millisecond

// Add reads src until its end, or Finish, and calls take with each piece. take may
// block: so does the payload then, when its pipe is full. src must be one that takes
// deadlines; it is closed in the end.
func (r *Relays) Add(src *os.File, take func([]byte)) {
	if r.passed == nil {
		r.passed = make(chan struct{}, 1)
	}
	r.sources = append(r.sources, src)
	r.ongoing.Add(1)
	r.copying.Go(func() {
		defer r.ongoing.Add(-1)
		defer src.Close() // by nobody else: rest reads by its number
		piece := pieces.Get().(*[PieceSize]byte)
		defer pieces.Put(piece)
		buf := piece[:]
		for {
			n, err := src.Read(buf)
			if n > 0 {
				take(buf[:n])
				Progress(r.passed)
			}
			if errors.Is(err, unix.EAGAIN) && !r.over.Load() {
				// epoll(7) has refused it: fs.epoll.max_user_watches is reached. Finish does not wait long for this.
				_ = proc.Await(proc.Descriptor(src), unix.POLLIN, 20*time.Millisecond)
				continue
			}
			if os.IsTimeout(err) {
				r.rest(proc.Descriptor(src), terminalHolds, buf, take)
				return
			}
			if err != nil {
				return // io.EOF; or EIO of a terminal that nobody has open any more
			}
		}
	})
}

// late is a pipe that nobody reads at first: what a short command writes is in it at the end.
type late struct {
	fd   int
	take func([]byte)
}

// AddLate is Add for a pipe, by its descriptor, whose content nobody waits for: take keeps it, and
// does not block. It is read from Begin on.
func (r *Relays) AddLate(fd int, take func([]byte)) { r.late = append(r.late, late{fd, take}) }

// Begin reads the late ones: before a command has waited long for a full pipe.
func (r *Relays) Begin() {
	for _, l := range r.late {
		r.Add(os.NewFile(uintptr(l.fd), "pipe"), l.take)
	}
	r.late = nil
}

// takeLate takes what is in those that nobody has begun to read.
func (r *Relays) takeLate() {
	if len(r.late) == 0 {
		return
	}
	piece := pieces.Get().(*[PieceSize]byte)
	defer pieces.Put(piece)
	for _, l := range r.late {
		r.rest(l.fd, 0, piece[:], l.take) // whose size can always be had of a pipe
		unix.Close(l.fd)
	}
	r.late = nil
}

// terminalHolds is more than a terminal keeps for its reader: 4 KiB that can be
// read, and 8 KiB on the way there, which TIOCINQ does not count. (n_tty.c and
// pty.c of the kernel.)
const terminalHolds = 64 << 10

// rest passes on what is in a source now, of which least may not be counted. Somebody may go on
// writing: what is added meanwhile is passed on only as far as it takes the place of something else.
func (r *Relays) rest(fd, least int, buf []byte, take func([]byte)) {
	n, _ := unix.IoctlGetInt(fd, unix.TIOCINQ) // another name of FIONREAD (pipe(7)); 0 with an error
	for left := max(least, n); left > 0; {
		n, err := unix.Read(fd, buf[:min(left, len(buf))])
		if err == unix.EINTR {
			continue
		}
		if n <= 0 || err != nil {
			return // EAGAIN: it is empty
		}
		take(buf[:n])
		Progress(r.passed)
		left -= n
	}
}

// Finish passes on what the sources hold, and reports whether all of it was taken.
// The payload must have ended; should it live all the same (the verdict is unproven),
// what it has written by now must do. told is closed when a signal tells us to end;
// nil for never. After false a take may still be called.
func (r *Relays) Finish(told <-chan struct{}) (complete bool) {
	r.takeLate()
	if r.ongoing.Load() == 0 {
		return true // all of them have come to their ends
	}
	r.over.Store(true)
	for _, f := range r.sources {
		// In the past: it wakes who waits in Read, and lets nobody wait again. It fails
		// for a file that is not in Go's poller, whose reader looks by itself.
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	done := make(chan struct{})
	go func() {
		r.copying.Wait()
		close(done)
	}()
	return Await(done, r.passed, told)
}

// Progress tells Await that somebody has taken a piece.
func Progress(passed chan<- struct{}) {
	select {
	case passed <- struct{}{}:
	default: // it will see the one before
	}
}

// Await waits for done, and reports whether it is closed. It gives up when there is no
// progress for the time that one piece may take, and soon after told is closed.
func Await(done, passed, told <-chan struct{}) bool {
	timer := time.NewTimer(Stalled)
	for {
		select {
		case <-done:
			return true
		case <-passed:
			timer.Reset(Stalled)
		case <-told:
			told = nil
			passed = nil
			timer.Reset(hurried)
		case <-timer.C:
			return false
		}
	}
}

// TakesOutput waits until a file can be written to without waiting, or has an error to
// tell, and reports whether it can within the time.
func TakesOutput(f *os.File, within time.Duration) bool {
	return proc.Await(proc.Descriptor(f), unix.POLLOUT, within) != 0
}

// WriteBlocking writes b to a file, and waits for as long as that takes. A command that shares
// the open file can have set O_NONBLOCK on it, or whoever it has sent it to
// (SCM_RIGHTS): then a Write to a file that Go does not poll fails with EAGAIN.
func WriteBlocking(f *os.File, b []byte) (n int, err error) {
	for {
		written, err := f.Write(b[n:])
		n += written
		if n == len(b) || !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		TakesOutput(f, Stalled)
	}
}
