// Package output prints the results of the commands of sbxrun and sbxrund on stdout, as text or JSON, and errors,
// warnings and hints on stderr, one line each. It also derives the exit code.
package output

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Result is the outcome of a command. A command can return both a result and an error.
type Result struct {
	Value any                     // printed as JSON with --json; nil prints nothing, or the error
	Text  func(w io.Writer) error // prints the value for people; nil prints nothing
	Code  int                     // the exit code; 0 leaves it to the error
}

// Line returns a result that is one line of text.
func Line(value any, line string) Result {
	return Result{Value: value, Text: func(w io.Writer) error {
		_, err := io.WriteString(w, line+"\n")
		return err
	}}
}

// Failure is the JSON of a command that returns an error and no value.
type Failure struct {
	ExitCode int                 `json:"exit_code"`
	Error    *result.ReportError `json:"error"`
}

// Finish prints the outcome of a command and returns the exit code.
func Finish(asJSON bool, r Result, err error) int {
	code := cmp.Or(r.Code, Code(err))
	if asJSON && err != nil && r.Value == nil && Error(err).Code != lost {
		r.Value = Failure{code, Error(err).Report()}
	}
	var failed error
	switch {
	case asJSON && r.Value != nil:
		failed = JSON(Stdout, r.Value)
	case r.Text != nil:
		w := bufio.NewWriter(Stdout)
		failed = cmp.Or(r.Text(w), w.Flush())
	}
	for _, err := range []error{failed, err} {
		if err != nil {
			code = cmp.Or(code, Fail(err))
		}
	}
	return code
}

// Error returns err, or the first of several, as a [*result.Error].
func Error(err error) *result.Error {
	if all, ok := err.(*multierror.Error); ok { // only a list that a command itself returns
		err = all.Errors[0]
	}
	e, ok := errors.AsType[*result.Error](err)
	switch {
	case !ok:
		return &result.Error{Code: "failed", Message: err.Error(), Err: err}
	case e.Error() == err.Error():
		return e
	}
	wrapped := *e
	wrapped.Message, wrapped.Err = err.Error(), err
	return &wrapped
}

// Is reports whether err is, or wraps, an error with this code.
func Is(err error, code string) bool {
	e, ok := errors.AsType[*result.Error](err)
	return ok && e.Code == code
}

// Advise adds a hint to an error with this code that has none.
func Advise(err error, code, hint string) error {
	if e, ok := errors.AsType[*result.Error](err); ok && e.Code == code {
		e.Hint = cmp.Or(e.Hint, hint)
	}
	return err
}

// closedPipe is the exit code after the reader of stdout has closed it, as a shell reports SIGPIPE.
const closedPipe = 128 + int(syscall.SIGPIPE)

// Code returns the exit code for an error: 0 for nil.
func Code(err error) int {
	if err == nil {
		return 0
	}
	e := Error(err)
	if e.Code == lost && errors.Is(e, syscall.EPIPE) {
		return closedPipe
	}
	return cmp.Or(e.ExitCode, result.ExitNotStarted)
}

// Fail prints an error, or each of several, with its hint, and returns the exit code. It prints nothing about
// a closed pipe.
func Fail(err error) int {
	all := []error{err}
	if several, ok := err.(*multierror.Error); ok { // as in Error
		all = several.Errors
	}
	for _, err := range all {
		if Code(err) != closedPipe {
			e := Error(err)
			Note("error: " + withHint(e.Message, e.Hint))
		}
	}
	return Code(err)
}

// Warn prints a problem that does not stop the command.
func Warn(err error) { e := Error(err); Note("warning: " + withHint(e.Message, e.Hint)) }

// Hint prints a possible obstacle for a sandboxed command and its remedy, or nothing for "".
func Hint(what, remedy string) {
	if what != "" {
		Note("hint: " + withHint(what, remedy))
	}
}

func withHint(message, hint string) string {
	if hint == "" {
		return message
	}
	return message + "; " + hint
}

// Note prints a line about the command on stderr.
func Note(text string) { Say("sbxrun: " + Printable(text)) }

// stalled is set when stderr has not been read for [stream.Stalled].
var stalled atomic.Bool

// Say writes a line to stderr, which can be a pipe that the sandboxed command has filled. If it is not read, Say drops
// this line and all later ones instead of blocking.
func Say(line string) {
	if stalled.Load() {
		return
	}
	// A writable pipe has room for PIPE_BUF bytes (pipe(7)). A goroutine could need a thread, and the line may
	// be about having none left.
	const part = 4096
	for b := range slices.Chunk([]byte(line+"\n"), part) {
		if !stream.TakesOutput(os.Stderr, stream.Stalled) {
			stalled.Store(true)
			return
		}
		_, _ = stream.WriteBlocking(os.Stderr, b) // there is nowhere to report the error
	}
}

// lost is the code of errors of stdout.
const lost = "output"

// Stdout is standard output. Its errors have an exit code of their own, because the command's work is done.
var Stdout io.Writer = stdout{}

type stdout struct{}

func (stdout) Write(b []byte) (int, error) {
	n, err := stream.WriteBlocking(os.Stdout, b)
	return n, Lost(err)
}

// Lost returns the error for output that cannot be written to stdout, nil for nil.
func Lost(err error) error {
	if err == nil {
		return nil
	}
	return &result.Error{Code: lost, ExitCode: result.ExitOutput, Message: "cannot print: " + err.Error(), Err: err}
}

// Export writes to a new file or, without a name or with "-", to stdout, unless that is a terminal.
func Export(name string, write func(io.Writer) error) error {
	if name != "" && name != "-" {
		err := tree.WriteNew(name, func(f *os.File) error { return write(f) })
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			return &result.Error{Code: "quota-disk", Message: fmt.Sprintf("cannot write %q: no space left on device", name), Err: err}
		}
		return err
	}
	if term.IsTerminal(int(os.Stdout.Fd())) {
		return &result.Error{Code: "usage", Message: "a tar stream would go to the terminal", Hint: "name a file, or write it to a pipe"}
	}
	return write(Stdout)
}

// Each calls do for each of all, and returns the errors.
func Each[T any](all []T, do func(T) error) error {
	var failed *multierror.Error
	for _, one := range all {
		if err := do(one); err != nil {
			failed = multierror.Append(failed, err)
		}
	}
	return failed.ErrorOrNil()
}

// JSON writes a value as one line of JSON.
func JSON(w io.Writer, v any) error {
	b, err := result.JSON(v)
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}
