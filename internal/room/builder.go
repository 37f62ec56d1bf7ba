package room

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// builder is a bwrap that builds a room.
type builder struct {
	program *proc.Program
	info    *os.File   // read end of bwrap's report of the room's PID 1
	ready   *os.File   // read end; gets a byte when the room is built
	theirs  []*os.File // bwrap's descriptors, closed when it has been started
}

// builder prepares a bwrap with the plan's arguments. errors is its stderr. The caller closes it, even after an error.
func (p *Plan) builder(errors *os.File, stage []*os.File) (*builder, error) {
	b := new(builder)
	// Each word ends with a NUL, the last one too: it may be empty.
	args, err := helper.TextFile("arguments", strings.Join(append(p.words, "--chdir", "/", ""), "\x00"))
	if err != nil {
		return b, err
	}
	b.theirs = append(b.theirs, args)
	for _, end := range []struct {
		ours     **os.File
		name     string
		pollable bool
	}{{&b.info, "info", true}, {&b.ready, "ready", false}} { // the entering process reads ready
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			return b, fmt.Errorf("pipe: %w", err)
		}
		_ = unix.SetNonblock(fds[0], end.pollable)
		*end.ours = os.NewFile(uintptr(fds[0]), end.name)
		b.theirs = append(b.theirs, os.NewFile(uintptr(fds[1]), end.name))
	}
	hold, err := helper.HoldFile()
	if err != nil {
		return b, err
	}
	b.program = &proc.Program{
		Path: p.Program.Path,
		Args: []string{"bwrap", "--args", strconv.Itoa(argsFD), "--info-fd", strconv.Itoa(infoFD), "--as-pid-1", "--", holdPath},
		// bwrap needs only stderr.
		Files: append(append([]*os.File{errors, errors, errors}, b.theirs...), hold),
		Stage: stage,
	}
	return b, nil
}

// started closes bwrap's ends.
func (b *builder) started() {
	closeAll(b.theirs)
	b.theirs = nil
}

func (b *builder) close() {
	b.started()
	b.info.Close() // on nil they only return an error
	b.ready.Close()
}
