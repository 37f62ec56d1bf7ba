package cells

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/stream"
)

// output reads a pipe that the interpreter writes to. It never stops reading, because a full pipe would block
// background threads and processes.
type output struct {
	file *os.File // our end; relay's goroutine closes it

	mu      sync.Mutex
	sink    *stream.Buffer // nil between cells
	dropped int64          // bytes since the last cell
}

// relay starts reading file until its end or its read deadline.
func relay(file *os.File) *output {
	o := &output{file: file}
	go func() {
		defer file.Close()
		conn, err := file.SyscallConn()
		if err != nil {
			return // closed
		}
		// The only error is the read deadline, which ends the relay.
		_ = conn.Read(func(fd uintptr) (ended bool) {
			piece := pieces.Get().(*[]byte)
			defer pieces.Put(piece)
			for {
				n, err := o.read(int(fd), *piece)
				if err == unix.EAGAIN {
					return false
				}
				if n <= 0 && err != unix.EINTR {
					return true
				}
			}
		})
	}()
	return o
}

// pieces are read buffers. An idle interpreter needs none.
var pieces = sync.Pool{New: func() any { p := make([]byte, stream.PieceSize); return &p }}

// read reads once and passes the data on. It holds the lock for both, so data is either still in the pipe or
// in its place.
func (o *output) read(fd int, piece []byte) (n int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err = unix.Read(fd, piece)
	o.put(piece[:max(0, n)])
	return n, err
}

func (o *output) put(p []byte) {
	if o.sink != nil {
		_, _ = o.sink.Write(p) // never fails
	} else {
		o.dropped += int64(len(p))
	}
}

// readNow passes on the current content of a pipe or socket until take returns false. It neither waits nor reads
// until the pipe is empty, because a writer may keep filling it.
func readNow(file *os.File, take func(piece []byte) (more bool)) {
	conn, err := file.SyscallConn()
	if err != nil {
		return // closed after its end was read
	}
	_ = conn.Control(func(fd uintptr) { // an error means the same
		left, _ := unix.IoctlGetInt(int(fd), unix.TIOCINQ) // FIONREAD (pipe(7)), SIOCINQ (unix(7)): cannot fail
		piece := pieces.Get().(*[]byte)
		defer pieces.Put(piece)
		for left > 0 {
			n, err := unix.Read(int(fd), (*piece)[:min(left, len(*piece))])
			if err == unix.EINTR {
				continue
			}
			if n <= 0 || !take((*piece)[:n]) {
				return
			}
			left -= n
		}
	})
}

// swap passes on the pipe's current content, and directs later data to sink, or drops it if sink is nil. It returns
// the previous sink and the number of bytes dropped so far.
func (o *output) swap(sink *stream.Buffer) (before *stream.Buffer, dropped int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	readNow(o.file, func(piece []byte) bool {
		o.put(piece)
		return true
	})
	before, dropped = o.sink, o.dropped
	o.sink, o.dropped = sink, 0
	return before, dropped
}
