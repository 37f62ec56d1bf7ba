package cells

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/stream"
)

// output is a pipe that the interpreter writes to. It is read all the time: a full one would
// stop who writes there in the background.
type output struct {
	file *os.File // our end; the one who relays closes it

	mu      sync.Mutex
	sink    *stream.Buffer // nil between cells
	dropped int64          // bytes since the last cell
}

// relay reads until the end of file, or until the file's read deadline.
func relay(file *os.File) *output {
	o := &output{file: file}
	go func() {
		defer file.Close()
		conn, err := file.SyscallConn()
		if err != nil {
			return // closed
		}
		// An error is the read deadline, which was set to end this.
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

// pieces are what outputs read into: an idle interpreter needs none.
var pieces = sync.Pool{New: func() any { p := make([]byte, stream.PieceSize); return &p }}

// read reads once, and passes on what it has read, both under the lock: what is no more in
// the pipe has its place when somebody else has the lock.
func (o *output) read(fd int, piece []byte) (n int, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err = unix.Read(fd, piece)
	o.put(piece[:max(0, n)])
	return n, err
}

func (o *output) put(p []byte) {
	if o.sink != nil {
		_, _ = o.sink.Write(p) // it takes all
	} else {
		o.dropped += int64(len(p))
	}
}

// readNow passes on what is in a pipe or a socket now, as long as more is wanted. It does not wait, nor
// read until there is nothing: somebody may go on writing, as quickly as it is read.
func readNow(file *os.File, take func(piece []byte) (more bool)) {
	conn, err := file.SyscallConn()
	if err != nil {
		return // closed, and was read to its end
	}
	_ = conn.Control(func(fd uintptr) { // an error means the same
		left, _ := unix.IoctlGetInt(int(fd), unix.TIOCINQ) // FIONREAD (pipe(7)), SIOCINQ (unix(7)): it always can
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

// swap passes on what is in the pipe now, and then has all that comes go to sink; nil to drop
// it. It returns what there was, and how much was dropped until now.
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
