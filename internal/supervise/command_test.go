package supervise_test

import (
	"context"
	"errors"
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// A failure to set the CPU quota, here because its cgroup is gone, is reported before the command starts, so that the
// report is right and a retry is safe.
func TestQuotaFails(t *testing.T) {
	quota, err := limits.For(limits.Request{CPUs: 0.5}, true, nil, limits.Request{})
	var refused *result.Error
	if errors.As(err, &refused) && refused.Code == "limit" {
		t.Logf("nobody here can set one: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	group, err := quota.Make("quota-fails", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := group.Remove(soon()); err != nil {
		t.Fatal(err)
	}
	c, stdout := hold(t, supervise.Terms{}, "echo", "ran")
	c.Limits = group
	if c.Release(t.Context()) {
		t.Error("it was released")
	}
	// A command that was released nevertheless would write within milliseconds.
	if err := stdout.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := stdout.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the command has run: %v", err)
	}
	if err := stdout.SetReadDeadline(soon()); err != nil {
		t.Fatal(err)
	}
	c.Watch(t.Context())
	r := c.End(t.Context())
	if err := c.Collect(); err != nil {
		t.Error(err)
	}
	if r.Started || r.Cause != result.StartFailed || r.Verdict != result.Proven || r.Err == nil || r.Err.Code != "limit" || r.ExitCode() != 125 {
		t.Errorf("want start-failed for want of the limit, 125: %+v", r)
	}
	if text, err := io.ReadAll(stdout); err != nil || len(text) > 0 {
		t.Errorf("the command wrote %q, %v", text, err)
	}
}

// A room planned for one command, which has its own network, refuses other commands: the room's network is the
// caller's.
func TestSharedAlone(t *testing.T) {
	plan, err := room.Prepare(room.Policy{Command: []string{"true"}, Workdir: "/tmp", Alone: true},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	if err != nil {
		t.Fatal(err)
	}
	defer plan.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	c, err := supervise.Hold(t.Context(), supervise.Place{Plan: plan}, [3]*os.File{null, null, null}, nil, supervise.Terms{Shared: true, ProofTimeout: 20 * time.Second})
	if err == nil {
		t.Error("others may enter it")
		c.End(t.Context())
		_ = c.Collect()
		c.Close()
	}
}

// hold returns a held command and its output.
func hold(t *testing.T, terms supervise.Terms, command ...string) (c *supervise.Command, stdout *os.File) {
	t.Helper()
	plan, err := room.Prepare(room.Policy{Command: command, Workdir: "/tmp"},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	if err != nil {
		t.Fatal(err)
	}
	defer plan.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	stdout, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdout.Close() })
	terms.ProofTimeout, terms.Begin = 20*time.Second, time.Now()
	c, err = supervise.Hold(t.Context(), supervise.Place{Plan: plan}, [3]*os.File{null, w, os.Stderr}, nil, terms)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, stdout
}

// A command that exceeds its output limit before its execve(2) is confirmed counts as started.
func TestFloodBeforeConfirmed(t *testing.T) {
	c, _ := hold(t, supervise.Terms{Confirm: true}, "sleep", "600")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
	if !c.Release(afterRelease{ctx, new(atomic.Bool)}) {
		t.Error("it was not confirmed")
	}
	c.Watch(ctx)
	r := c.End(ctx)
	if err := c.Collect(); err != nil {
		t.Error(err)
	}
	if !r.Started || r.Cause != result.OutputLimit || r.Verdict != result.Proven {
		t.Errorf("%+v", r)
	}
}

// afterRelease is a context that ends just after the command's release, which checks it first.
type afterRelease struct {
	context.Context
	asked *atomic.Bool
}

func (c afterRelease) Err() error {
	if !c.asked.Swap(true) {
		return nil
	}
	return c.Context.Err()
}
