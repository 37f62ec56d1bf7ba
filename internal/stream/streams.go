package stream

import (
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Streams are a command's stdin, stdout and stderr: files that it is given as they are;
// pipes, whose other ends are read and written here; or a terminal of its own.
type Streams struct {
	// Payload is what the command is given. Started closes those that are not the
	// caller's.
	Payload   [3]*os.File
	Terminals []proc.Terminal // the caller's, to be restored

	own    []*os.File // of Payload, those to close
	fed    *os.File   // our end of a pipe to stdin, nil if there is none
	lent   []lent     // of Payload, those that are the caller's
	relays Relays
	memory bool // all that is passed on goes to a Buffer
	bound  Bound
	broken func(*result.Error)
	raw    func() // makes our terminal raw
	undo   func() // and puts it back

	draining sync.Once
	complete bool // after Drain
}

// Bound is how much may be passed on of a stream.
type Bound struct {
	Size     int64
	Limited  bool   // more than Size is not passed on
	Exceeded func() // is called when there is more, with every piece
}

// Open makes the streams of a command that reads stdin and writes to stdout and stderr. A
// file is given to the command as it is, but for a bound on what it writes; nil is
// /dev/null. From a reader is read in the background until the command closes its stdin or
// ends, and nobody waits for a Read of it that does not return. If stdout and stderr are the
// same writer it is written to by one goroutine at a time, as os/exec does.
//
// broken is called when a writer does not take what was written, whose rest is dropped then,
// and when the reader fails before its end: the command has only a part then. A writer that
// does not return at all has the command wait as for any full pipe.
func Open(stdin io.Reader, stdout, stderr io.Writer, b Bound, broken func(*result.Error)) (_ *Streams, err error) {
	s := &Streams{memory: true, bound: b, broken: broken, raw: func() {}, undo: func() {}}
	defer func() {
		if err != nil {
			s.Drain(nil)
		}
	}()
	if f, ok := stdin.(*os.File); ok || stdin == nil {
		err = s.give(0, f, os.O_RDONLY)
	} else {
		err = s.feed(stdin)
	}
	if err != nil {
		return nil, err
	}
	for i, dst := range []io.Writer{stdout, stderr} {
		f, ok := dst.(*os.File)
		switch {
		case dst == nil || ok && (f == nil || !b.Limited):
			err = s.give(i+1, f, os.O_WRONLY)
		case i == 1 && same(stdout, stderr):
			s.Payload[2] = s.Payload[1]
		default:
			err = s.take(i+1, dst)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(s.lent) > 0 {
		if err := NoDirectories(s.Payload); err != nil {
			return nil, err
		}
	}
	s.shareTerminals(stdin, stdout, stderr)
	return s, nil
}

// shareTerminals remembers the state of the caller's terminals that the command is given and may change.
// In a pipeline, another command may make the terminal raw meanwhile, as less(1) does, and in the
// background it belongs to another job: then they are left alone.
func (s *Streams) shareTerminals(stdio ...any) {
	for _, f := range stdio {
		var st unix.Stat_t
		if f, ok := f.(*os.File); ok && f != nil && unix.Fstat(proc.Descriptor(f), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
			return
		}
	}
	var known []uint64
	for _, l := range s.lent {
		state, err := unix.IoctlGetTermios(proc.Descriptor(l.file), unix.TCGETS)
		if err != nil {
			continue // no terminal
		}
		t := proc.Terminal{File: l.file, State: *state}
		var st unix.Stat_t
		if err := unix.Fstat(proc.Descriptor(l.file), &st); err != nil || slices.Contains(known, st.Rdev) || t.Background() {
			continue
		}
		known = append(known, st.Rdev)
		s.Terminals = append(s.Terminals, t)
	}
	s.undo = func() {
		for _, t := range s.Terminals {
			fd := proc.Descriptor(t.File)
			if now, err := unix.IoctlGetTermios(fd, unix.TCGETS); err == nil && *now != t.State && !t.Background() {
				_ = unix.IoctlSetTermios(fd, unix.TCSETS, &t.State) // a terminal that was closed needs no restoring
			}
		}
	}
}

// same reports whether two writers are one. Those that Go cannot compare are not.
func same(a, b io.Writer) bool {
	defer func() { _ = recover() }() // types that are not comparable
	return a == b
}

// give gives the command a file, or /dev/null.
func (s *Streams) give(i int, f *os.File, flag int) (err error) {
	if f == nil {
		// Not by package os, which tries whether it can be polled.
		fd, err := unix.Open(os.DevNull, flag|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: os.DevNull, Err: err}
		}
		f = os.NewFile(uintptr(fd), os.DevNull)
		s.own = append(s.own, f)
	} else {
		flags, err := getFlags(f)
		if err != nil {
			return &os.PathError{Op: "use", Path: f.Name(), Err: os.ErrClosed}
		}
		s.lent = append(s.lent, lent{f, flags})
	}
	s.Payload[i] = f
	return nil
}

// lent is a file of the caller's, and the status flags that it had: O_NONBLOCK, O_APPEND
// and others belong to the open file (fcntl(2)), which the caller shares with the command
// and with whoever writes there next.
type lent struct {
	file  *os.File
	flags int
}

func getFlags(f *os.File) (int, error) {
	return unix.FcntlInt(uintptr(proc.Descriptor(f)), unix.F_GETFL, 0)
}

// restore gives the flags back.
func (l lent) restore() {
	if flags, err := getFlags(l.file); err == nil && flags != l.flags {
		// What was set can be set again.
		_, _ = unix.FcntlInt(uintptr(proc.Descriptor(l.file)), unix.F_SETFL, l.flags)
	}
}

// NoDirectories refuses a directory as stdin, stdout or stderr: the command would have it,
// and openat(2) finds its way from there to all files of the host, whatever the sandbox
// shows.
func NoDirectories(stdio [3]*os.File) error {
	for i, name := range []string{"stdin", "stdout", "stderr"} {
		var st unix.Stat_t
		if stdio[i] != nil && unix.Fstat(proc.Descriptor(stdio[i]), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return &result.Error{Code: "setup", Message: name + " is a directory, from which the command could reach all files of the host", Hint: "redirect it, to /dev/null for example"}
		}
	}
	return nil
}

// feed puts a pipe in the place of stdin, and writes to it what src has.
func (s *Streams) feed(src io.Reader) error {
	fds, err := pipe(writing)
	if err != nil {
		return err
	}
	r, w := os.NewFile(uintptr(fds[reading]), "pipe"), os.NewFile(uintptr(fds[writing]), "pipe")
	s.Payload[0], s.fed = r, w
	s.own = append(s.own, r)
	go func() {
		// Not by w's own ReadFrom, which keeps it open while src has nothing.
		in := &output{dst: w}
		_, err := io.Copy(in, src)
		w.Close()
		if err != nil && in.err == nil { // else the command has closed its stdin, or has ended
			s.broken(lost("input", "cannot read the command's input", err))
		}
	}()
	return nil
}

// take puts a pipe in the place of stdout or stderr, and reads it however much comes: a
// full pipe would stop the command.
func (s *Streams) take(i int, dst io.Writer) error {
	fds, err := pipe(reading)
	if err != nil {
		return err
	}
	w := os.NewFile(uintptr(fds[1]), "pipe")
	s.Payload[i] = w
	s.own = append(s.own, w)
	take := s.taker(dst)
	if _, kept := dst.(*Buffer); kept && !s.bound.Limited {
		s.relays.AddLate(fds[0], take)
		return nil
	}
	// For a command that writes much each change to us is for more at once. There may be no more
	// than pipe-user-pages-soft of an ordinary user (pipe(7)), who then has what there was.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, largePipe)
	s.relays.Add(os.NewFile(uintptr(fds[0]), "pipe"), take)
	return nil
}

// largePipe is four times what a pipe has by itself.
const largePipe = 256 << 10

// Pipe is os.Pipe, but the end for writing is a command's and blocks, as programs expect
// of their stdout.
func Pipe() (r, w *os.File, err error) {
	fds, err := pipe(reading)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// Which end of a pipe is ours.
const (
	reading = iota
	writing
)

// pipe makes a pipe of which our end does not block, so that Go's poller serves it, and
// the command's does.
func pipe(end int) (fds [2]int, err error) {
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return fds, fmt.Errorf("make a pipe: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fds[1-end]), unix.F_SETFL, 0); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return fds, fmt.Errorf("make a pipe: %w", err)
	}
	return fds, nil
}

// taker is what passes on pieces to dst.
func (s *Streams) taker(dst io.Writer) func([]byte) {
	_, kept := dst.(*Buffer)
	out := &output{dst: dst, bound: s.bound, kept: kept}
	s.memory = s.memory && kept
	return func(b []byte) {
		if out.err != nil {
			return // the payload must not wait for a reader
		}
		if _, err := out.Write(b); err != nil {
			s.broken(lost("output", "cannot pass on the command's output", err))
		}
	}
}

// lost is the error of a stream that broke off.
func lost(code, what string, err error) *result.Error {
	return &result.Error{Code: code, ExitCode: result.ExitOutput, Message: what + ": " + err.Error(), Err: err}
}

// output passes a stream on, up to its bound, and remembers whether writing failed.
type output struct {
	dst   io.Writer
	bound Bound
	kept  bool // dst has its own bound
	total int64
	err   error
}

func (o *output) Write(b []byte) (n int, err error) {
	pass := b
	if before := o.total; o.bound.Limited {
		o.total += int64(len(b))
		if o.total > o.bound.Size {
			o.bound.Exceeded()
			if !o.kept {
				pass = b[:max(0, o.bound.Size-before)]
			}
		}
	}
	if len(pass) == 0 {
		return len(b), nil // to some writers an empty piece means something
	}
	if f, ok := o.dst.(*os.File); ok {
		n, o.err = WriteBlocking(f, pass)
	} else {
		n, o.err = o.dst.Write(pass)
	}
	if o.err == nil && n < len(pass) {
		o.err = io.ErrShortWrite
	}
	if o.err != nil {
		return n, o.err
	}
	return len(b), nil
}

// Started gives up the command's ends: with the command's own they are the last that keep
// the streams from ending. Called when the command has them.
func (s *Streams) Started() {
	s.raw()
	s.raw = func() {}
	for _, f := range s.own {
		f.Close()
	}
	s.own = nil
}

// Begin has all of a command's output read from now on: until then what goes to a Buffer is left in its
// pipe, for a command that is over before that is full.
func (s *Streams) Begin() { s.relays.Begin() }

// Drain passes on what the command has written before its end, see [Relays.Finish]; it
// reports whether somebody took all of it. Only the first call does anything.
func (s *Streams) Drain(told <-chan struct{}) (complete bool) {
	s.draining.Do(func() {
		s.raw = func() {}
		s.Started() // in case it never got that far
		if s.fed != nil {
			s.fed.Close() // nobody waits for a Read, and others may have the other end open
		}
		for _, l := range s.lent {
			l.restore()
		}
		s.complete = s.relays.Finish(told)
		if s.memory {
			s.relays.copying.Wait() // it keeps nobody waiting
			s.complete = true
		}
	})
	return s.complete
}

// Restore puts the caller's terminals back. It may be called more than once.
func (s *Streams) Restore() { s.undo() }
