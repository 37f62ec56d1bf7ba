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

// Streams are a command's stdin, stdout and stderr: the caller's files, pipes whose other
// ends are read and written here, or a terminal of the command's own.
type Streams struct {
	// Payload are the command's files. Started closes those that are not the caller's.
	Payload   [3]*os.File
	Terminals []proc.Terminal // the caller's, to be restored

	own    []*os.File // files of Payload to close
	fed    *os.File   // our end of a pipe to stdin, or nil
	lent   []lent     // files of Payload that belong to the caller
	relays Relays
	memory bool // all forwarded output goes to Buffers
	bound  Bound
	broken func(*result.Error)
	raw    func() // makes our terminal raw
	undo   func() // restores it

	draining sync.Once
	complete bool // after Drain
}

// Bound limits how much of a stream is forwarded.
type Bound struct {
	Size     int64
	Limited  bool   // whether to drop output beyond Size
	Exceeded func() // called for every piece beyond Size
}

// Open makes the streams of a command that reads stdin and writes to stdout and stderr. The command gets a file as it
// is, unless its output is bounded; nil means /dev/null. A reader is read in the background until the command closes
// its stdin or ends; a Read that does not return delays nothing. If stdout and stderr are the same writer, only one
// goroutine at a time writes to it, as in os/exec.
//
// Open arranges for broken to be called when a writer fails, after which the rest of its
// stream is dropped, and when the reader fails before its end, so that the command got only
// part of its input. A writer that blocks makes the command wait, as any full pipe does.
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

// shareTerminals saves the state of the caller's terminals that the command gets and may change. It
// leaves them alone in a pipeline, where another command such as less(1) may make the terminal raw, and in
// the background, where the terminal belongs to another job.
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
			continue // not a terminal
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
				_ = unix.IoctlSetTermios(fd, unix.TCSETS, &t.State) // a closed terminal needs no restoring
			}
		}
	}
}

// same reports whether two writers are equal. Writers of incomparable types are not.
func same(a, b io.Writer) bool {
	defer func() { _ = recover() }() // incomparable types
	return a == b
}

// give gives the command a file, or /dev/null if f is nil.
func (s *Streams) give(i int, f *os.File, flag int) (err error) {
	if f == nil {
		// Not with package os, which would try to add it to the poller.
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

// lent is a file of the caller and its original status flags: O_NONBLOCK, O_APPEND and others belong to the open file
// description (fcntl(2)), which the caller shares with the command and with later writers.
type lent struct {
	file  *os.File
	flags int
}

func getFlags(f *os.File) (int, error) {
	return unix.FcntlInt(uintptr(proc.Descriptor(f)), unix.F_GETFL, 0)
}

// restore resets the flags.
func (l lent) restore() {
	if flags, err := getFlags(l.file); err == nil && flags != l.flags {
		// Setting flags that were set before does not fail.
		_, _ = unix.FcntlInt(uintptr(proc.Descriptor(l.file)), unix.F_SETFL, l.flags)
	}
}

// NoDirectories rejects a directory as stdin, stdout or stderr: with openat(2) the command
// could reach all files of the host from there, whatever the sandbox shows.
func NoDirectories(stdio [3]*os.File) error {
	for i, name := range []string{"stdin", "stdout", "stderr"} {
		var st unix.Stat_t
		if stdio[i] != nil && unix.Fstat(proc.Descriptor(stdio[i]), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return &result.Error{Code: "setup", Message: name + " is a directory, from which the command could reach all files of the host", Hint: "redirect it, to /dev/null for example"}
		}
	}
	return nil
}

// feed makes stdin a pipe and copies src to it.
func (s *Streams) feed(src io.Reader) error {
	fds, err := pipe(writing)
	if err != nil {
		return err
	}
	r, w := os.NewFile(uintptr(fds[reading]), "pipe"), os.NewFile(uintptr(fds[writing]), "pipe")
	s.Payload[0], s.fed = r, w
	s.own = append(s.own, r)
	go func() {
		// Not with w's own ReadFrom, which keeps w open while src has no data.
		in := &output{dst: w}
		_, err := io.Copy(in, src)
		w.Close()
		if err != nil && in.err == nil { // otherwise the command has closed its stdin or has ended
			s.broken(lost("input", "cannot read the command's input", err))
		}
	}()
	return nil
}

// take makes stdout or stderr a pipe and reads it to the end, because a full pipe would stop the command.
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
	// A larger pipe means fewer context switches for a command that writes much. An ordinary user is
	// limited by pipe-user-pages-soft (pipe(7)); the default size stays then. Logs have no Exceeded: their
	// commands may be many and live long.
	if s.bound.Exceeded != nil {
		_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, largePipe)
	}
	s.relays.Add(os.NewFile(uintptr(fds[0]), "pipe"), take)
	return nil
}

// largePipe is four times the default capacity of a pipe.
const largePipe = 256 << 10

// Pipe is like os.Pipe, but the write end, for the command, blocks, as programs expect of stdout.
func Pipe() (r, w *os.File, err error) {
	fds, err := pipe(reading)
	if err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// The end of a pipe that stays in this process.
const (
	reading = iota
	writing
)

// pipe makes a pipe. Our end is non-blocking, for Go's poller; the command's end blocks.
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

// taker returns a function that forwards pieces to dst.
func (s *Streams) taker(dst io.Writer) func([]byte) {
	_, kept := dst.(*Buffer)
	out := &output{dst: dst, bound: s.bound, kept: kept}
	s.memory = s.memory && kept
	return func(b []byte) {
		if out.err != nil {
			return // the command must not wait for a reader
		}
		if _, err := out.Write(b); err != nil {
			s.broken(lost("output", "cannot pass on the command's output", err))
		}
	}
}

// lost returns the error of a stream that broke off.
func lost(code, what string, err error) *result.Error {
	return &result.Error{Code: code, ExitCode: result.ExitOutput, Message: what + ": " + err.Error(), Err: err}
}

// output forwards a stream up to its bound, and remembers whether writing failed.
type output struct {
	dst   io.Writer
	bound Bound
	kept  bool // dst bounds itself
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
		return len(b), nil // an empty piece has a meaning for some writers
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

// Started closes our copies of the command's files: together with the command's own they
// keep the streams open. Call it when the command has its files.
func (s *Streams) Started() {
	s.raw()
	s.raw = func() {}
	for _, f := range s.own {
		f.Close()
	}
	s.own = nil
}

// Begin starts reading all output of the command. Until then, output for a Buffer stays in its pipe, in
// case the command ends before that is full.
func (s *Streams) Begin() { s.relays.Begin() }

// Drain forwards the output written before the command's end, see [Relays.Finish], and
// reports whether everything was taken. Only the first call has an effect.
func (s *Streams) Drain(told <-chan struct{}) (complete bool) {
	s.draining.Do(func() {
		s.raw = func() {}
		s.Started() // in case the command never started
		if s.fed != nil {
			s.fed.Close() // does not wait for a Read of the source; others may have the other end open
		}
		for _, l := range s.lent {
			l.restore()
		}
		s.complete = s.relays.Finish(told)
		if s.memory {
			s.relays.copying.Wait() // a Buffer does not block
			s.complete = true
		}
	})
	return s.complete
}

// Restore restores the caller's terminals. It may be called more than once.
func (s *Streams) Restore() { s.undo() }
