package main

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/capture"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// streams are the payload's stdin, stdout and stderr: sbxrun's own, passed
// through untouched; or pipes, whose ends are kept up to a bound; or a terminal.
type streams struct {
	payload  [3]*os.File
	terminal *proc.Terminal // to be restored if sbxrun is killed

	buffers [2]*capture.Buffer // stdout, stderr; nil unless captured
	relays  relays
	bound   bound
	broken  func(error) // is called when our stdout or stderr does not take what is written
	raw     func()      // makes our terminal raw
	undo    func()      // and puts it back

	draining sync.Once
	complete bool // after draining
}

// bound is how much a stream may have.
type bound struct {
	size     int64
	limited  bool   // more than that is not passed on
	exceeded func() // is called, if not nil, when there is more
}

func openStreams(captured, tty bool, b bound, broken func(error)) (*streams, error) {
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

// openPipes puts pipes in the place of stdout and stderr, and reads them however
// much comes: a full pipe would stop the payload.
func (s *streams) openPipes(to [2]io.Writer) error {
	for i, dst := range to {
		r, w, err := pipe()
		if err != nil {
			return fmt.Errorf("make a pipe: %w", err)
		}
		s.payload[i+1] = w
		s.pass(dst, r)
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

// pass passes on src to dst in the background.
func (s *streams) pass(dst io.Writer, src *os.File) {
	out := &output{dst: dst, bound: s.bound, kept: s.buffers[0] != nil}
	s.relays.add(src, func(b []byte) {
		if out.err != nil {
			return // the payload must not wait for a reader
		}
		if _, err := out.Write(b); err != nil {
			s.broken(err)
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

// drain passes on what the payload has written before its end, see [relays.finish];
// it reports whether somebody took all of it. Only the first call does anything.
func (s *streams) drain(told <-chan struct{}) (complete bool) {
	s.draining.Do(func() {
		s.raw = func() {}
		s.started() // in case it never got that far
		s.complete = s.relays.finish(told)
		if s.buffers[0] != nil {
			s.relays.copying.Wait() // memory keeps nobody waiting
			s.complete = true
		}
	})
	return s.complete
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
