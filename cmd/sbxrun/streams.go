package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/capture"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// streams are the payload's stdin, stdout and stderr: sbxrun's own, passed
// through untouched; or pipes, whose ends are kept up to a bound; or a terminal.
type streams struct {
	payload  [3]*os.File
	terminal *proc.Terminal // to be restored if sbxrun is killed

	buffers [2]*capture.Buffer // stdout, stderr; nil unless captured
	sources []*os.File         // read ends that are being copied
	copying sync.WaitGroup
	bound   bound
	broken  func() // is called when nobody reads our stdout any more
	raw     func() // makes our terminal raw
	undo    func() // and puts it back
}

// bound is how much a stream may have.
type bound struct {
	size     int64
	limited  bool   // more than that is not passed on
	exceeded func() // is called, if not nil, when there is more
}

func openStreams(captured, tty bool, b bound, broken func()) (*streams, error) {
	s := &streams{payload: [3]*os.File{os.Stdin, os.Stdout, os.Stderr}, bound: b, broken: broken, raw: func() {}, undo: func() {}}
	switch {
	case captured:
		for i := range s.buffers {
			s.buffers[i] = capture.New(b.size)
		}
		return s, s.openPipes([2]io.Writer{s.buffers[0], s.buffers[1]})
	case tty:
		return s, s.openTerminal()
	case b.limited:
		return s, s.openPipes([2]io.Writer{os.Stdout, os.Stderr})
	}
	return s, nil
}

// openPipes puts pipes in the place of stdout and stderr, and reads them to the
// end however much comes: a full pipe would stop the payload.
func (s *streams) openPipes(to [2]io.Writer) error {
	for i, dst := range to {
		r, w, err := pipe()
		if err != nil {
			return fmt.Errorf("make a pipe: %w", err)
		}
		s.payload[i+1] = w
		s.copy(dst, r)
	}
	return nil
}

// pipe is os.Pipe, but the end for writing is the payload's and blocks, as
// programs expect of their stdout.
func pipe() (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// copy copies src, which takes deadlines, to dst in the background.
func (s *streams) copy(dst io.Writer, src *os.File) {
	s.sources = append(s.sources, src)
	s.copying.Go(func() {
		out := &output{dst: dst, bound: s.bound, kept: s.buffers[0] != nil}
		// An error is the end: a closed pipe, EIO of a terminal, the deadline
		// of drain; or that nobody reads what we write.
		if _, err := io.Copy(out, src); errors.Is(err, os.ErrDeadlineExceeded) {
			_, _ = out.Write(rest(src))
		}
		if out.err != nil {
			s.broken()
			_, _ = io.Copy(io.Discard, src) // the payload must not wait for a reader
		}
	})
}

// output passes a stream on, up to its bound, and remembers whether writing failed.
type output struct {
	dst   io.Writer
	bound bound
	kept  bool // dst has its own bound
	total int64
	err   error
}

func (o *output) Write(b []byte) (n int, err error) {
	pass := b
	if before := o.total; o.bound.limited {
		o.total += int64(len(b))
		if o.total > o.bound.size {
			o.bound.exceeded()
			if !o.kept {
				pass = b[:max(0, o.bound.size-before)]
			}
		}
	}
	if n, o.err = o.dst.Write(pass); o.err != nil {
		return n, o.err
	}
	return len(b), nil
}

// started gives up the payload's ends: with the payload's own they are the last
// that keep the streams from ending. Called when the payload has them.
func (s *streams) started() {
	s.raw()
	s.raw = func() {}
	for _, f := range s.payload {
		if f != os.Stdin && f != os.Stdout && f != os.Stderr {
			f.Close()
		}
	}
}

// rest returns what is in a pipe now, without waiting for more. Whoever goes on writing
// cannot make it longer.
func rest(r *os.File) []byte {
	fd := proc.Descriptor(r)
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ) // FIONREAD
	if err != nil || n <= 0 {
		return nil // closed, or empty
	}
	buf, have := make([]byte, n), 0
	for have < n {
		got, err := unix.Read(fd, buf[have:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || got == 0 {
			break
		}
		have += got
	}
	return buf[:have]
}

// drain waits until all output has been read and passed on. After a proven end
// every writer of the sandbox's is dead, so there is an end to read up to; unless the
// payload has passed its end of a pipe to somebody outside (SCM_RIGHTS, unix(7)), and then
// all that the sandbox has written is in the pipe. If there is none, or
// we are told to stop (ctx) and our own stdout does not take the rest, what came
// in time must do.
func (s *streams) drain(ctx context.Context, proven bool) {
	const moment = 500 * time.Millisecond
	s.raw = func() {}
	s.started() // in case it never got that far
	all := make(chan struct{})
	go func() {
		s.copying.Wait()
		close(all)
	}()
	if proven {
		select {
		case <-all:
			return
		case <-ctx.Done():
		case <-time.After(moment):
			for _, f := range s.sources {
				_ = f.SetReadDeadline(time.Unix(1, 0)) // ends the copying with what is there
			}
			select {
			case <-all:
				return
			case <-ctx.Done():
			}
		}
	}
	select {
	case <-all:
	case <-time.After(moment):
		for _, f := range s.sources {
			_ = f.SetReadDeadline(time.Unix(1, 0)) // ends the copying, unless it hangs in a write
		}
		if s.buffers[0] != nil {
			<-all // it writes to memory only
		}
	}
}

// captured is what was kept of stdout and stderr. After drain.
func (s *streams) captured() (stdout, stderr result.Stream) {
	return captured(s.buffers[0]), captured(s.buffers[1])
}

func captured(b *capture.Buffer) result.Stream {
	text, valid := b.Text()
	return result.Stream{Text: text, UTF8: valid, Bytes: b.Len(), Truncated: b.Truncated()}
}

// restore puts the caller's terminal back. It may be called more than once.
func (s *streams) restore() { s.undo() }
