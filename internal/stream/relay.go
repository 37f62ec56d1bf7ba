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

// Relays forward a command's output to pipes or to its terminal, in the background.
// run, exec and start use them alike.
//
// While the command runs, each source is read as far as possible. After the command has ended, a relay does not read
// to the end of file, because that comes only when the last write end is closed, and a process outside the sandbox
// may hold one forever: the command can send its descriptors to anyone (SCM_RIGHTS, unix(7)), and others can open
// /proc/PID/fd/1. The output of ended processes is in the pipe already, so Finish reads its contents and no more.
type Relays struct {
	sources []*os.File
	late    []late
	copying sync.WaitGroup
	ongoing atomic.Int32
	over    atomic.Bool   // Finish was called
	passed  chan struct{} // has an element if a piece was taken since the last receive
}

// PieceSize is the size of a relay's reads: the default capacity of a pipe (pipe(7)).
const PieceSize = 64 << 10

// pieces holds read buffers for reuse: a server runs many short commands.
var pieces = sync.Pool{New: func() any { return new([PieceSize]byte) }}

// Stalled is how long the reader of our output may take for one piece once the command
// has ended. After that the rest of the output is dropped.
const Stalled = 10 * time.Second

// hurried is how long the remaining output may take after a signal has told sbxrun to end.
const hurried = 500 * time.Millisecond

// Add reads src until its end or Finish, and calls take with each piece. take may block; the command then blocks too,
// once its pipe is full. src must support deadlines; Add closes it at the end.
func (r *Relays) Add(src *os.File, take func([]byte)) {
	if r.passed == nil {
		r.passed = make(chan struct{}, 1)
	}
	r.sources = append(r.sources, src)
	r.ongoing.Add(1)
	r.copying.Go(func() {
		defer r.ongoing.Add(-1)
		defer src.Close() // the only place that closes it: rest uses its number
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
				// epoll(7) rejected it, because fs.epoll.max_user_watches is reached. Finish notices within 20 ms.
				_ = proc.Await(proc.Descriptor(src), unix.POLLIN, 20*time.Millisecond)
				continue
			}
			if os.IsTimeout(err) {
				r.rest(proc.Descriptor(src), terminalHolds, buf, take)
				return
			}
			if err != nil {
				return // io.EOF, or EIO from a terminal that no process has open
			}
		}
	})
}

// late is a pipe that is not read at first: a short command's output is still in it at the end.
type late struct {
	fd   int
	take func([]byte)
}

// AddLate is like Add for a pipe, given by its descriptor, whose output is only collected: take must
// not block. The pipe is read from Begin on.
func (r *Relays) AddLate(fd int, take func([]byte)) { r.late = append(r.late, late{fd, take}) }

// Begin starts reading the late pipes, before a command has waited long for a full one.
func (r *Relays) Begin() {
	for _, l := range r.late {
		r.Add(os.NewFile(uintptr(l.fd), "pipe"), l.take)
	}
	r.late = nil
}

// takeLate takes the contents of late pipes that were not read yet.
func (r *Relays) takeLate() {
	if len(r.late) == 0 {
		return
	}
	piece := pieces.Get().(*[PieceSize]byte)
	defer pieces.Put(piece)
	for _, l := range r.late {
		r.rest(l.fd, 0, piece[:], l.take) // FIONREAD is exact for a pipe
		unix.Close(l.fd)
	}
	r.late = nil
}

// terminalHolds is more than a terminal buffers for its reader: 4 KiB that can be read, and
// 8 KiB on the way there that TIOCINQ does not count (n_tty.c and pty.c of the kernel).
const terminalHolds = 64 << 10

// rest forwards the current contents of a source. TIOCINQ may miss up to least bytes. Other processes may keep
// writing, but rest forwards no more than the initial count.
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

// Finish forwards the contents of the sources, and reports whether everything was taken. The command must have ended.
// If it is still alive (the verdict is unproven), only its output so far is forwarded. told is closed when a signal
// tells sbxrun to end; nil means never. After false a take may still be called.
func (r *Relays) Finish(told <-chan struct{}) (complete bool) {
	r.takeLate()
	if r.ongoing.Load() == 0 {
		return true // all sources have ended
	}
	r.over.Store(true)
	for _, f := range r.sources {
		// A deadline in the past wakes a blocked Read and fails later ones. It fails for a file
		// that is not in Go's poller, whose relay polls by itself.
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	done := make(chan struct{})
	go func() {
		r.copying.Wait()
		close(done)
	}()
	return Await(done, r.passed, told)
}

// Progress signals Await that a piece was taken.
func Progress(passed chan<- struct{}) {
	select {
	case passed <- struct{}{}:
	default: // a signal is pending
	}
}

// Await waits for done and reports whether it was closed. It gives up when no piece is
// taken within Stalled, and soon after told is closed.
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

// TakesOutput waits until f can be written without blocking or has an error to report,
// and reports whether that happened in time.
func TakesOutput(f *os.File, within time.Duration) bool {
	return proc.Await(proc.Descriptor(f), unix.POLLOUT, within) != 0
}

// WriteBlocking writes b to f, however long that takes. A command that shares the open
// file, or a process that got it from the command (SCM_RIGHTS), may have set O_NONBLOCK
// on it. A Write to a file that is not in Go's poller then fails with EAGAIN.
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
