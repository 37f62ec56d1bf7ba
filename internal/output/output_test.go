package output

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestCode(t *testing.T) {
	busy := &result.Error{Code: "busy", ExitCode: result.ExitBusy}
	for _, tt := range []struct {
		name string
		err  error
		want int
	}{
		{"nil", nil, 0},
		{"plain", errors.New("x"), result.ExitNotStarted},
		{"own code", busy, result.ExitBusy},
		{"the first of several", multierror.Append(nil, busy, errors.New("x")), result.ExitBusy},
		{"stdout on a full disk", Lost(syscall.ENOSPC), result.ExitOutput},
		{"closed stdout", Lost(syscall.EPIPE), 141},
		{"another closed pipe", syscall.EPIPE, result.ExitNotStarted},
	} {
		check.Equal(t, Code(tt.err), tt.want, "%s", tt.name)
	}
}

func TestText(t *testing.T) {
	const text = "a\tb\x1b[1m\u0085\xff\nü€"
	var terminal, table strings.Builder
	_, err := Terminal(&terminal).Write([]byte(text))
	check.OK(t, err)
	list := NewTable(&table, "NAME", "SIZE")
	list.Row("x\n", 1)
	list.Row("long name", 23)
	check.OK(t, list.Flush())
	for _, tt := range []struct{ got, want string }{
		{Printable(text), `a\x09b\x1b[1m\x85\xff\x0aü€`},
		{terminal.String(), "a\tb" + `\x1b[1m\x85\xff` + "\nü€"},
		{table.String(), "NAME       SIZE\nx\\x0a      1\nlong name  23\n"},
		{Size(0), "0"}, {Size(1023), "1023"}, {Size(1024), "1.0K"}, {Size(3 << 19), "1.5M"}, {Size(5 << 40), "5120.0G"},
		{Age(0), "0s"}, {Age(90 * time.Second), "1m"}, {Age(47 * time.Hour), "47h"}, {Age(49 * time.Hour), "2d"},
		{Count(0, "process", "es"), "0 processes"}, {Count(1, "process", "es"), "1 process"},
	} {
		check.That(t, tt.got == tt.want, "got %q, want %q", tt.got, tt.want)
	}
}

// A wrapped error keeps its code and hint, and its message includes the context.
func TestErrorWrapped(t *testing.T) {
	e := &result.Error{Code: "busy", Message: "in use", Hint: "wait", ExitCode: result.ExitBusy}
	got := Error(fmt.Errorf("volume x: %w", e))
	check.That(t, got.Code == "busy" && got.Message == "volume x: in use" && got.Hint == "wait" && got.ExitCode == result.ExitBusy, "%+v", got)
	check.Equal(t, Error(e), e)
}

// Export replaces no file, and Each goes on after an error.
func TestExportEach(t *testing.T) {
	name := t.TempDir() + "/x"
	err := Each([]string{"first", "second"}, func(text string) error {
		return Export(name, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
	})
	b, _ := os.ReadFile(name)
	all, ok := err.(*multierror.Error)
	check.That(t, ok && len(all.Errors) == 1 && Error(err).Code == "exists" && string(b) == "first", "%q, %v", b, err)
	failed := errors.New("no more data")
	err = Export(name+"2", func(io.Writer) error { return failed })
	check.That(t, errors.Is(err, failed), "%v", err)
	_, err = os.Lstat(name + "2")
	check.That(t, err != nil, "a failed export left a file")
}

// Advise adds a hint where there is none, also to a wrapped error, and only to errors with the code.
func TestAdvise(t *testing.T) {
	for _, tt := range []struct{ code, hint, want string }{{"big", "", "shrink it"}, {"big", "own", "own"}, {"other", "", ""}} {
		err := fmt.Errorf("x: %w", &result.Error{Code: tt.code, Hint: tt.hint})
		check.Equal(t, Error(Advise(err, "big", "shrink it")).Hint, tt.want, "%+v", tt)
		check.That(t, Is(err, "big") == (tt.code == "big"), "%+v: Is", tt)
	}
	check.That(t, Advise(nil, "big", "shrink it") == nil && !Is(nil, "big"), "nil is an error")
}
