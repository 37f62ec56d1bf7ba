package nsenter_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/nsenter"
)

// idle is a sandbox with nothing in it but a process that waits.
func idle(t *testing.T) *bwrap.Sandbox {
	t.Helper()
	sb, lines := sandbox(t, "echo up; exec sleep infinity")
	read(t, lines, 1)
	return sb
}

// run runs a script in a sandbox, to its end.
func run(t *testing.T, sb *bwrap.Sandbox, timeout time.Duration, command ...string) (string, result.Result) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	entry := &nsenter.Entry{Init: sb.Init, Cred: sb.Cred, Command: command, Path: "/usr/bin:/bin", Env: []string{"A=1", "PATH=/usr/bin:/bin"}, Workdir: "/tmp"}
	text := make(chan string)
	go func() {
		b, _ := io.ReadAll(r) // what there is of it is what is compared
		text <- string(b)
	}()
	res := supervise.Run(context.Background(), supervise.Inside(entry, [3]*os.File{null, w, os.Stderr}, nil, func() { w.Close() }),
		supervise.Options{Timeout: timeout, ProofTimeout: 5 * time.Second, Begin: time.Now()})
	w.Close() // again, if it was not forked
	if res.Verdict != result.Proven {
		t.Errorf("%q: verdict %s: %v", command, res.Verdict, res.Err)
	}
	return <-text, res
}

func TestExecEnd(t *testing.T) {
	sb := idle(t)
	for _, tt := range []struct {
		script string
		want   string
		code   int
		cause  result.Cause
	}{
		{"echo hello", "hello\n", 0, result.Exited},
		{"exit 42", "", 42, result.Exited},
		{"kill -9 $$", "", 137, result.Signaled},
		{"exit 137", "", 137, result.Exited},
		{"(sleep 100 & setsid sleep 100 &) ; echo done", "done\n", 0, result.Exited},
	} {
		text, res := run(t, sb, 0, shell(tt.script)...)
		if text != tt.want || res.ExitCode() != tt.code || res.Cause != tt.cause || res.Payload.Source != result.FromKernel {
			t.Errorf("%q: %q, %+v %+v", tt.script, text, res, res.Payload)
		}
	}
	if sb.Init.Exited() {
		t.Error("the sandbox has ended")
	}
	if left := proc.Descendants(sb.Init.PID, 10); len(left) != 1 {
		t.Errorf("left in the sandbox: %+v", left)
	}
}

func shell(script string) []string { return []string{"sh", "-c", script} }

var _ = bufio.NewScanner
var _ = errors.Is
var _ = strings.Contains
var _ = unix.SIGKILL
