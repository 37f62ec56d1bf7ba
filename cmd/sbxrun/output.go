package main

import (
	"cmp"
	"errors"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Values of --output-limit.
const (
	outputKill     = "kill"
	outputTruncate = "truncate"
)

// Default maximum numbers of bytes kept of each stream, in memory and in a log.
const (
	maxOutput = 1 << 20
	maxLog    = 64 << 20
)

// outputLimit is the limit on a command's output and its effect.
type outputLimit struct {
	action string // "" without a limit
	size   int64
	hit    atomic.Bool
	lost   atomic.Pointer[result.Error] // why output could not be forwarded
}

// broken ends the run because its output cannot be forwarded. A closed pipe counts as SIGPIPE; any other error is
// reported and has its own exit code.
func (c *command) broken(e *result.Error) {
	if !errors.Is(e, syscall.EPIPE) {
		c.output.lost.CompareAndSwap(nil, e)
	}
	c.signals.cancelBy(syscall.SIGPIPE)
}

func (c *command) openStreams() (*stream.Streams, error) {
	if err := stream.NoDirectories([3]*os.File{os.Stdin, os.Stdout, os.Stderr}); err != nil {
		return nil, err
	}
	c.output.action, c.output.size = c.shared.OutputLimit, cmp.Or(int64(c.shared.MaxOutput), maxOutput)
	b := stream.Bound{Size: c.output.size, Limited: c.output.action != ""}
	b.Exceeded = func() {
		if !c.output.hit.Swap(true) && c.output.action == outputKill {
			c.signals.cancel(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
		}
	}
	switch {
	case c.record != nil:
		return stream.Open(nil, c.record.Output(0), c.record.Output(1), stream.Bound{}, c.broken)
	case c.asJSON:
		c.buffers = [2]*stream.Buffer{stream.NewBuffer(b.Size), stream.NewBuffer(b.Size)}
		return stream.Open(stdin(), c.buffers[0], c.buffers[1], b, c.broken)
	case c.tty:
		return stream.OpenTerminal(b, c.broken)
	}
	return stream.Open(stdin(), os.Stdout, os.Stderr, b, c.broken)
}

// stdin returns the command's stdin. It is empty if sbxrun runs in the background of a terminal: the command has its own
// session, where SIGTTIN does not stop it (tty_ioctl(4)), and would read input meant for the shell.
func stdin() *os.File {
	if group, err := unix.IoctlGetInt(unix.Stdin, unix.TIOCGPGRP); err == nil && group != unix.Getpgrp() {
		return nil // /dev/null
	}
	return os.Stdin
}

func (c *command) checkOutput() error {
	if c.shared.JSON && c.tty {
		return errors.New("--json cannot be combined with --tty: on a terminal stdout and stderr are one stream")
	}
	return nil
}

func (o *outputLimit) limits() []result.Limit {
	if o.action == "" {
		return nil
	}
	return []result.Limit{{Name: "max-output", Requested: float64(o.size), Enforced: true, Mechanism: o.action, Hit: o.hit.Load()}}
}
