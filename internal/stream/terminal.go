package stream

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// OpenTerminal gives the command its own terminal and connects it with ours, which is stdin and stdout of this
// process. If the command shared ours, it could type into it (TIOCSTI).
func OpenTerminal(b Bound, broken func(*result.Error)) (*Streams, error) {
	s := &Streams{bound: b, broken: broken, raw: func() {}, undo: func() {}}
	ptmx, tty, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	s.Payload, s.own = [3]*os.File{tty, tty, tty}, []*os.File{tty}
	// Package os made both non-blocking, for its poller, and package pty made ptmx blocking again. Programs expect a
	// blocking terminal, but deadlines for ptmx need a non-blocking one.
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
		// With read and write: the kernel cannot copy between terminals.
		_, _ = io.CopyBuffer(struct{ io.Writer }{ptmx}, struct{ io.Reader }{os.Stdin}, make([]byte, 4096)) // until either fails
		endInput(ptmx)
	}()
	return s, nil
}

// endInput ends the command's input as a person would: with Ctrl-D. It types another one when the command has read
// the last: a program that makes the terminal raw after the Ctrl-D was typed (readline) reads a different byte
// instead, and each reader needs its own Ctrl-D. It returns when ptmx is closed.
func endInput(ptmx *os.File) {
	const flags = unix.O_RDONLY | unix.O_NOCTTY | unix.O_CLOEXEC
	tty, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(proc.Descriptor(ptmx)), unix.TIOCGPTPEER, flags)
	if errno == 0 {
		defer unix.Close(int(tty))
	}
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if _, err := ptmx.Write([]byte{4}); err != nil || errno != 0 {
			return
		}
		for unread := int16(unix.POLLIN); unread == unix.POLLIN; unread = proc.Await(int(tty), unix.POLLIN, 0) {
			time.Sleep(pause)
		}
	}
}

// makeRaw passes every key to the command's terminal and keeps its size equal to ours, until Restore.
func (s *Streams) makeRaw(in int, ptmx *os.File) error {
	before, err := unix.IoctlGetTermios(in, unix.TCGETS)
	if err != nil {
		return fmt.Errorf("read the terminal's state: %w", err)
	}
	s.Terminals = []proc.Terminal{{File: os.Stdin, State: *before}}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	// After Notify, or a change in between would be missed.
	inheritSize(in, ptmx)
	go func() {
		for range resized {
			inheritSize(in, ptmx)
		}
	}()
	s.raw = func() {
		// Only once there is a keeper, which restores the terminal if we are killed. An error is
		// ignored: without raw mode the terminal is only less comfortable.
		if state, err := term.MakeRaw(in); err == nil {
			s.undo = func() { _ = term.Restore(in, state) } // a closed terminal needs no restoring
		}
	}
	return nil
}

// inheritSize gives ptmx the size of the terminal in. If it fails, the size stays wrong,
// which is only inconvenient. (Package pty's functions would make ptmx blocking.)
func inheritSize(in int, ptmx *os.File) {
	if size, err := unix.IoctlGetWinsize(in, unix.TIOCGWINSZ); err == nil {
		_ = unix.IoctlSetWinsize(proc.Descriptor(ptmx), unix.TIOCSWINSZ, size)
	}
}
