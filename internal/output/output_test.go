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
		if got := Code(tt.err); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestText(t *testing.T) {
	const text = "a\tb\x1b[1m\u0085\xff\nü€"
	var terminal, table strings.Builder
	if _, err := Terminal(&terminal).Write([]byte(text)); err != nil {
		t.Error(err)
	}
	list := NewTable(&table, "NAME", "SIZE")
	list.Row("x\n", 1)
	list.Row("long name", 23)
	if err := list.Flush(); err != nil {
		t.Error(err)
	}
	for _, tt := range []struct{ got, want string }{
		{Printable(text), `a\x09b\x1b[1m\x85\xff\x0aü€`},
		{terminal.String(), "a\tb" + `\x1b[1m\x85\xff` + "\nü€"},
		{table.String(), "NAME       SIZE\nx\\x0a      1\nlong name  23\n"},
		{Size(0), "0"}, {Size(1023), "1023"}, {Size(1024), "1.0K"}, {Size(3 << 19), "1.5M"}, {Size(5 << 40), "5120.0G"},
		{Age(0), "0s"}, {Age(90 * time.Second), "1m"}, {Age(47 * time.Hour), "47h"}, {Age(49 * time.Hour), "2d"},
		{Count(0, "process", "es"), "0 processes"}, {Count(1, "process", "es"), "1 process"},
	} {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}

// A wrapped error keeps its code and hint, and its message includes the context.
func TestErrorWrapped(t *testing.T) {
	e := &result.Error{Code: "busy", Message: "in use", Hint: "wait", ExitCode: result.ExitBusy}
	if got := Error(fmt.Errorf("volume x: %w", e)); got.Code != "busy" || got.Message != "volume x: in use" || got.Hint != "wait" || got.ExitCode != result.ExitBusy {
		t.Errorf("%+v", got)
	}
	if got := Error(e); got != e {
		t.Errorf("%+v", got)
	}
}

// Export replaces no file, and Each goes on after an error.
func TestExportEach(t *testing.T) {
	name := t.TempDir() + "/x"
	err := Each([]string{"first", "second"}, func(text string) error {
		return Export(name, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
	})
	b, _ := os.ReadFile(name)
	if all, ok := err.(*multierror.Error); !ok || len(all.Errors) != 1 || Error(err).Code != "exists" || string(b) != "first" {
		t.Errorf("%q, %v", b, err)
	}
	failed := errors.New("no more data")
	if err := Export(name+"2", func(io.Writer) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("%v", err)
	}
	if _, err := os.Lstat(name + "2"); err == nil {
		t.Error("a failed export left a file")
	}
}

// Advise adds a hint where there is none, also to a wrapped error, and only to errors with the code.
func TestAdvise(t *testing.T) {
	for _, tt := range []struct{ code, hint, want string }{{"big", "", "shrink it"}, {"big", "own", "own"}, {"other", "", ""}} {
		err := fmt.Errorf("x: %w", &result.Error{Code: tt.code, Hint: tt.hint})
		if got := Error(Advise(err, "big", "shrink it")).Hint; got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
		if Is(err, "big") != (tt.code == "big") {
			t.Errorf("%+v: Is", tt)
		}
	}
	if Advise(nil, "big", "shrink it") != nil || Is(nil, "big") {
		t.Error("nil is an error")
	}
}
