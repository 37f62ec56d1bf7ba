package stream

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// OpenTerminal gives the command a terminal of its own, and connects it with ours, which
// is stdin and stdout of this process. Sharing ours would let the command type into it
// (TIOCSTI).
func OpenTerminal(b Bound, broken func(*result.Error)) (*Streams, error) {
	s := &Streams{bound: b, broken: broken, raw: func() {}, undo: func() {}}
	ptmx, tty, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	s.Payload, s.own = [3]*os.File{tty, tty, tty}, []*os.File{tty}
	// Package os made both non-blocking, for its poller, and package pty has undone that
	// for ptmx. Programs do not expect it of theirs; but a read of ours takes deadlines
	// only then.
	err = unix.SetNonblock(proc.Descriptor(tty), false)
	if err == nil {
		err = unix.SetNonblock(proc.Descriptor(ptmx), true)
	}
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	in := proc.Descriptor(os.Stdin)
	if term.IsTerminal(in) {
		if err := s.makeRaw(in, ptmx); err != nil {
			return nil, err
		}
	}
	s.relays.Add(ptmx, s.taker(os.Stdout))
	go func() {
		// By read and write: neither is a file that the kernel could copy by itself.
		_, _ = io.CopyBuffer(struct{ io.Writer }{ptmx}, struct{ io.Reader }{os.Stdin}, make([]byte, 4096)) // until one of both has an error
		// Our stdin has ended: so does the command's, by what a person types.
		_, _ = ptmx.Write([]byte{4})
	}()
	return s, nil
}

// makeRaw lets every key through to the payload's terminal, and its size follow
// ours, until Restore.
func (s *Streams) makeRaw(in int, ptmx *os.File) error {
	before, err := unix.IoctlGetTermios(in, unix.TCGETS)
	if err != nil {
		return fmt.Errorf("read the terminal's state: %w", err)
	}
	s.Terminals = []proc.Terminal{{File: os.Stdin, State: *before}}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	// After that, or a change just now would be missed.
	inheritSize(in, ptmx)
	go func() {
		for range resized {
			inheritSize(in, ptmx)
		}
	}()
	s.raw = func() {
		// Only when there is a keeper, to put it back if we are killed. Without the
		// raw mode the terminal is less comfortable, and that is all.
		if state, err := term.MakeRaw(in); err == nil {
			s.undo = func() { _ = term.Restore(in, state) } // a terminal that was closed needs no restoring
		}
	}
	return nil
}

// inheritSize gives ptmx the size of the terminal in. An error leaves the size as it is,
// which is an inconvenience only. (Not by package pty, whose calls make ptmx blocking.)
func inheritSize(in int, ptmx *os.File) {
	if size, err := unix.IoctlGetWinsize(in, unix.TIOCGWINSZ); err == nil {
		_ = unix.IoctlSetWinsize(proc.Descriptor(ptmx), unix.TIOCSWINSZ, size)
	}
}
