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

// builder is a bwrap below a keeper that waits for its arguments. It can be started before the plan is complete,
// because its execve(2) and linking take a millisecond, about as long as the rest of the plan.
type builder struct {
	*proc.Keeper
	args  *os.File // write end of bwrap's arguments; bwrap begins when it is closed
	info  *os.File // read end of bwrap's report of the room's PID 1
	ready *os.File // read end; gets a byte when the room is built
}

// begin forks the keeper, with bwrap below it. It uses only the program and the cred of the plan. errors is bwrap's
// stderr.
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
		{"ready", &b.ready, 0, false}, // the entering process reads it
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
	// bwrap needs only stderr.
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

// order sends bwrap its arguments, which starts the building of the room.
func (b *builder) order(ctx context.Context, words []string, deadline time.Time) error {
	_ = b.args.SetWriteDeadline(deadline) // a pipe supports deadlines
	stop := context.AfterFunc(ctx, func() { _ = b.args.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	// Each word ends with a NUL, the last one too: it may be empty.
	_, err := b.args.WriteString(strings.Join(words, "\x00") + "\x00--chdir\x00/\x00")
	if err != nil {
		return fmt.Errorf("send arguments to bwrap: %w", err)
	}
	return b.args.Close()
}

// abandon ends a bwrap that has not got its arguments. It returns when all processes have exited, or with an error
// after [SetupBound].
func (b *builder) abandon() error {
	kept := proc.Kept{Keeper: b.Keeper}
	// Kill it before args is closed, because that would start it.
	_, err := kept.Abandon(time.Now().Add(SetupBound))
	b.close()
	return err
}

// close closes our ends of the pipes.
func (b *builder) close() {
	for _, f := range []*os.File{b.args, b.info, b.ready} {
		f.Close() // args may already be closed, or f nil; both only return an error
	}
}
