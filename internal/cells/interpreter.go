package cells

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

const (
	// startBound is the time for an interpreter to start.
	startBound = 30 * time.Second
	// closing is the time for an interpreter to exit after closing its socket.
	closing = 500 * time.Millisecond
	// maxForeign is the maximum number of bytes on the socket that belong to no answer.
	maxForeign = 4 << 20
	// maxCount is the maximum number of results of a cell.
	maxCount = 1000
	// endSize is the space in a line for the end of a cell, whose texts the driver truncates.
	endSize = 1 << 20
)

// interruptBound is the time for a cell to end after SIGINT. Tests raise it on a slow machine.
var interruptBound = time.Second

// interpreter is one process with a driver.
type interpreter struct {
	command  slot.Running
	cancel   context.CancelFunc
	socket   *os.File // our end
	out, err *output
	number   int  // number of the last cell
	signals  int  // SIGINTs sent
	late     bool // the first cell's deadline passed during the start

	ended   context.Context // done when all its processes have exited
	result  *result.Result  // valid after ended
	failure error
}

// launch starts an interpreter that ends with life. It returns when the interpreter reads cells, or at the
// deadline of the first cell, with late set. ctx applies only to the start.
func (s *Spec) launch(life, ctx context.Context, deadline time.Time) (_ *interpreter, err error) {
	argv, driver := s.Language.keep()
	i := &interpreter{}
	var files []*os.File // the command's ends
	defer func() {
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			i.close()
		}
	}()
	var theirs *os.File
	if i.socket, theirs, err = socketPair(); err != nil {
		return nil, err
	}
	files = append(files, theirs)
	for _, o := range []**output{&i.out, &i.err} {
		r, w, err := stream.Pipe()
		if err != nil {
			return nil, err
		}
		*o, files = relay(r), append(files, w)
	}
	words := stream.NewBuffer(4 << 10)
	i.err.swap(words)

	own, cancel := context.WithCancel(life)
	i.cancel = cancel
	defer context.AfterFunc(ctx, cancel)()
	i.command, err = s.Room.Start(own, slot.Command{Args: argv, Options: supervise.Options{Limits: s.Limits, Stdin: files[0], Stdout: files[1], Stderr: files[2]}})
	for _, f := range files {
		f.Close() // otherwise reads would never end
	}
	files = nil
	if err != nil {
		return nil, err
	}
	var over context.CancelFunc
	i.ended, over = context.WithCancel(context.Background())
	go func() {
		defer over()
		i.result, i.failure = i.command.Wait()
	}()

	// Run an empty cell: it ends when the driver is ready.
	by := time.Now().Add(startBound)
	if i.late = !deadline.IsZero() && deadline.Before(by); i.late {
		by = deadline
	}
	t := newTurn(Cell{})
	_ = i.socket.SetWriteDeadline(by)
	_, err = i.socket.WriteString(driver)
	cause := result.Timeout
	switch {
	case err == nil:
		cause = i.converse(own, t, 0, by)
	case !os.IsTimeout(err):
		cause = i.broken()
	}
	if cause == Done || cause == result.Timeout && i.late {
		i.err.swap(nil)
		i.late = cause != Done
		return i, nil
	}
	i.kill()
	i.err.swap(nil)
	text, _ := words.Text()
	return nil, i.notStarted(ctx, cause, s.Language.Kept[0], strings.TrimSpace(text))
}

// notStarted explains why an interpreter did not become ready.
func (i *interpreter) notStarted(ctx context.Context, cause result.Cause, name, said string) error {
	e := &result.Error{Code: "setup", Message: "the interpreter " + name + " ended before it took a cell"}
	switch r := i.result; {
	case i.failure != nil && errors.As(i.failure, &e): // unproven
		return e
	case ctx.Err() != nil:
		e.Code, e.Message, e.Err = "ended", "the start of the interpreter "+name+" was given up: "+context.Cause(ctx).Error(), context.Cause(ctx)
	case cause == result.Timeout:
		e.Message = fmt.Sprintf("the interpreter %s took no cell within %v", name, startBound)
	case cause == result.Lost:
		e.Message = "the interpreter " + name + " does not run its driver: it has closed the socket, or written something else there"
	case r.Cause == result.Exited && r.ExitCode() == 127: // from sh
		e.Code, e.Message, e.Hint = "not-found", "the sandbox has no "+name, "install it, or name another command for the language"
	default:
		e.Message += fmt.Sprintf(" (%s, exit code %d)", r.Cause, r.ExitCode())
	}
	if said != "" {
		e.Message += ": " + said
	}
	return e
}

func (i *interpreter) alive() bool { return i.ended.Err() == nil }

// kill ends the interpreter and waits for it.
func (i *interpreter) kill() {
	i.cancel()
	<-i.ended.Done()
}

// close closes the descriptors. The interpreter must have ended, or never have started.
func (i *interpreter) close() {
	if i.cancel != nil {
		i.cancel()
	}
	if i.socket != nil {
		i.socket.Close()
	}
	for _, o := range []*output{i.out, i.err} {
		if o != nil {
			// A process outside the sandbox may hold the other end, so the end of file may never come.
			_ = o.file.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// turn is one cell in progress.
type turn struct {
	Cell
	token string
	lines *answers

	results   []Result
	left      int64 // bytes left for results
	truncated bool
	err       *Exception
	signals   *int
	begun     bool // the driver can be interrupted
	over      bool // the driver has reported the end
}

func newTurn(c Cell) *turn {
	t := &turn{Cell: c, token: rand.Text(), left: MaxResults}
	t.lines = newAnswers(t.token, MaxResults+endSize)
	return t
}

// request is a cell as the driver reads it.
type request struct {
	Token  string `json:"token"`
	Code   string `json:"code"`
	Number int    `json:"number"`
	Max    int64  `json:"max"` // bytes per result
}

// converse sends a cell to the driver, waits for its end, and returns the cause: [Done]; Timeout or Canceled,
// after which the driver may still be running it; [result.Lost] if the driver misbehaves; or "" if the
// interpreter has ended. A zero deadline means none.
func (i *interpreter) converse(ctx context.Context, t *turn, number int, deadline time.Time) result.Cause {
	line, err := json.Marshal(request{Token: t.token, Code: t.Code, Number: number, Max: MaxResults})
	if err != nil {
		return result.Lost // impossible
	}
	// A waiting driver reads the cell at once, so this blocks only if the end of the previous cell was
	// forged. A truncated line is useless, but the interpreter is ended in that case. A driver that waits gets
	// the cell even if ctx has ended: only then can it end the cell and keep the state.
	var by time.Time
	if !deadline.IsZero() {
		by = deadline.Add(interruptBound)
	}
	_ = i.socket.SetWriteDeadline(by)
	stop := context.AfterFunc(ctx, func() { _ = i.socket.SetWriteDeadline(time.Now().Add(interruptBound)) })
	_, err = i.socket.Write(append(line, '\n'))
	stop()
	if err != nil && !os.IsTimeout(err) {
		return i.broken()
	}
	return i.listen(ctx, t, &t.over, deadline)
}

// listen reads answers until *this is true or the cell has ended, and returns [Done] then, or another cause
// as converse does.
func (i *interpreter) listen(ctx context.Context, t *turn, this *bool, deadline time.Time) result.Cause {
	either, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(i.ended, cancel)()
	defer proc.ReadUntil(either, i.socket, deadline)()
	piece := pieces.Get().(*[]byte)
	defer pieces.Put(piece)
	for !t.over && !*this {
		n, err := i.socket.Read(*piece)
		t.take((*piece)[:n])
		if os.IsTimeout(err) {
			// Data already in the socket arrived in time.
			readNow(i.socket, func(piece []byte) bool {
				t.take(piece)
				return !t.over && t.lines.foreign <= maxForeign
			})
		}
		switch {
		case t.over, *this:
		case t.lines.foreign > maxForeign:
			return result.Lost
		case err == nil:
		case !os.IsTimeout(err):
			return i.broken()
		case !i.alive():
			return ""
		case ctx.Err() != nil:
			return result.Canceled
		default:
			return result.Timeout
		}
	}
	return Done
}

// broken returns the cause after the interpreter closed its socket: "" if it has ended.
func (i *interpreter) broken() result.Cause {
	select {
	case <-i.ended.Done():
		return ""
	case <-time.After(closing):
	}
	if i.command.SignalAlone(0) == nil { // it exists (kill(2))
		return result.Lost
	}
	<-i.ended.Done() // the rest of it is about to end
	return ""
}

// take parses a piece from the socket.
func (t *turn) take(piece []byte) {
	list, sizes := t.lines.read(piece)
	for n, m := range list {
		if m.Result != nil {
			if size := int64(sizes[n]); size <= t.left && len(t.results) < maxCount {
				t.left -= size
				t.results = append(t.results, *m.Result)
			} else {
				t.truncated = true
			}
		}
		t.begun = t.begun || m.Begun
		if m.End {
			t.err, t.signals, t.over = m.Error, m.Signals, true
		}
	}
}

// interrupt sends SIGINT to the interpreter. It reports whether the cell ended in time and the signal cannot
// affect the next cell.
func (i *interpreter) interrupt(t *turn) bool {
	by := time.Now().Add(interruptBound)
	// Before the driver has begun the cell, it would ignore the signal.
	if i.listen(context.Background(), t, &t.begun, by) != Done || t.over {
		return t.over
	}
	// The signal is pending when this returns, so the driver receives it before it reads the next cell.
	if i.command.SignalAlone(unix.SIGINT) != nil {
		return false // already ended
	}
	i.signals++
	// If a signal arrives when a script ends, node delivers it during a later one.
	return i.listen(context.Background(), t, &t.over, by) == Done && (t.signals == nil || *t.signals == i.signals)
}

// socketPair returns the two ends of a stream socket. Ours is non-blocking for Go's poller, the command's is
// blocking.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fds[0], true)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket: %w", err)
	}
	// Otherwise, closing descriptors sent by the cell can block the reader.
	_ = unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_PASSRIGHTS, 0) // ENOPROTOOPT before Linux 6.16
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket"), nil
}
