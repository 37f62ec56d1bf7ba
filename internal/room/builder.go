package room

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// builder is a bwrap below a keeper, which waits for its arguments. It can be started before
// the plan is complete: to be executed and linked takes it a millisecond, and so does
// the rest of the plan.
type builder struct {
	*proc.Keeper
	args  *os.File // write end; at its end bwrap begins
	info  *os.File // read end: who the room's PID 1 is
	ready *os.File // read end: a byte when the room is built
}

// begin forks the keeper, with bwrap below it. Of the plan are settled the program and cred.
// errors is where it speaks.
func (p *Plan) begin(errors *os.File, stage []*os.File) (_ *builder, err error) {
	b := new(builder)
	var theirs []*os.File
	defer func() {
		closeAll(theirs)
		if err != nil {
			b.close()
		}
	}()
	for _, end := range []struct {
		name     string
		ours     **os.File
		number   int // of our end
		pollable bool
	}{
		{"args", &b.args, 1, true},
		{"info", &b.info, 0, true},
		{"ready", &b.ready, 0, false}, // what enters waits at it
	} {
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			return nil, fmt.Errorf("pipe: %w", err)
		}
		_ = unix.SetNonblock(fds[end.number], end.pollable)
		*end.ours = os.NewFile(uintptr(fds[end.number]), end.name)
		theirs = append(theirs, os.NewFile(uintptr(fds[1-end.number]), end.name))
	}
	hold, err := HoldFile()
	if err != nil {
		return nil, err
	}
	theirs = append(theirs, hold)
	// bwrap needs but a place for its errors.
	files := append([]*os.File{errors, errors, errors}, theirs...)
	b.Keeper, err = proc.Keep(proc.Command{
		Program: &proc.Program{
			Path:  p.Program.Path,
			Args:  []string{"bwrap", "--args", strconv.Itoa(argsFD), "--info-fd", strconv.Itoa(infoFD), "--as-pid-1", "--", holdPath},
			Files: files,
			Stage: stage,
		},
		Cred: p.cred,
		Hold: p.hold,
	})
	return b, err
}

// order gives bwrap its arguments, and with them leave to begin.
func (b *builder) order(ctx context.Context, words []string, deadline time.Time) error {
	_ = b.args.SetWriteDeadline(deadline) // it takes deadlines
	stop := context.AfterFunc(ctx, func() { _ = b.args.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	// Each word ends with a NUL, the last one too: it may be empty.
	_, err := b.args.WriteString(strings.Join(words, "\x00") + "\x00--chdir\x00/\x00")
	if err != nil {
		return fmt.Errorf("tell bwrap its arguments: %w", err)
	}
	return b.args.Close()
}

// abandon ends a bwrap that has no arguments, and returns when nothing is left, or after
// [SetupBound] with an error.
func (b *builder) abandon() error {
	kept := proc.Kept{Keeper: b.Keeper}
	// Before its arguments end, or it would take what it has.
	_, err := kept.Abandon(time.Now().Add(SetupBound))
	b.close()
	return err
}

// close gives up our ends.
func (b *builder) close() {
	for _, f := range []*os.File{b.args, b.info, b.ready} {
		f.Close() // args may be closed already; and nil is an error, and no more
	}
}
