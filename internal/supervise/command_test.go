package supervise

import (
	"context"
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A failure to set the CPU quota, here because its cgroup is gone, is reported before the command starts, so that the
// report is right and a retry is safe.
func TestQuotaFails(t *testing.T) {
	quota, err := limits.For(limits.Request{CPUs: 0.5}, true, nil, limits.Request{})
	if result.CodeOf(err) == "limit" {
		t.Logf("nobody here can set one: %v", err)
		return
	}
	check.Must(t, err)
	group, err := quota.Make("quota-fails", false)
	check.Must(t, err)
	check.Must(t, group.Remove(time.Now().Add(20*time.Second)))
	c, stdout := command(t, Options{}, "echo", "ran")
	c.Held = func(context.Context, *Command) error {
		c.Group = group
		return nil
	}
	check.That(t, c.Start(t.Context()) != nil, "it was released")
	r, _ := c.Wait()
	check.That(t, c.Left == nil, "%v", c.Left)
	check.That(t, !r.Started && r.Cause == result.StartFailed && r.Verdict == result.Proven && r.Err != nil && r.Err.Code == "limit" && r.ExitCode() == 125,
		"want start-failed for want of the limit, 125: %+v", r)
	text, err := io.ReadAll(stdout)
	check.That(t, err == nil && len(text) == 0, "the command wrote %q, %v", text, err)
}

// A room planned for one command, which has its own network, refuses other commands: the room's network is the
// caller's.
func TestSharedAlone(t *testing.T) {
	plan, err := room.Prepare(room.Policy{Command: []string{"true"}, Workdir: "/tmp", Alone: true},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	defer plan.Close()
	c := Command{Place: Place{Plan: plan}, Shared: true, Options: Options{ProofTimeout: 20 * time.Second}}
	if c.Start(t.Context()) == nil {
		t.Error("others may enter it")
		c.Kill()
	}
	_, _ = c.Wait()
}

// command returns a command and its output. The caller starts it and waits for it.
func command(t *testing.T, o Options, argv ...string) (c *Command, stdout *os.File) {
	t.Helper()
	plan, err := room.Prepare(room.Policy{Command: argv, Workdir: "/tmp"},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	t.Cleanup(plan.Close)
	stdout, w := harness.Pipe(t)
	o.Stdout, o.Stderr, o.ProofTimeout, o.Attended = w, os.Stderr, 20*time.Second, true
	return &Command{Options: o, Place: Place{Plan: plan}, Settle: func(*result.Result) { w.Close() }}, stdout
}

// A command that exceeds its output limit before its execve(2) is confirmed counts as started.
func TestFloodBeforeConfirmed(t *testing.T) {
	c, _ := command(t, Options{}, "sleep", "600")
	c.Confirm = true
	c.Held = func(ctx context.Context, _ *Command) error {
		c.ctx = afterRelease{ctx, new(atomic.Bool)}
		c.cancel(Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
		return nil
	}
	err := c.Start(t.Context())
	check.That(t, err == nil && c.cause == "", "it was not confirmed: %v", err)
	r, _ := c.Wait()
	check.That(t, c.Left == nil, "%v", c.Left)
	check.That(t, r.Started && r.Cause == result.OutputLimit && r.Verdict == result.Proven, "%+v", r)
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
