package pool_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/pool"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func source(t *testing.T, policy room.Policy) *pool.Source {
	t.Helper()
	s := pool.NewSource(slot.OnDemand{}, slot.Policy{Policy: policy}, pool.Sizes{Min: 1, Max: 2}, func(err error) { t.Error(err) })
	t.Cleanup(s.Close)
	return s
}

// placeOf waits for a warm slot and takes it.
func placeOf(t *testing.T, s *pool.Source, p slot.Policy) slot.Slot {
	t.Helper()
	for end := time.Now().Add(bound); ; {
		at, err := s.Take(t.Context(), "a", p)
		check.Must(t, err)
		if at.Kind() == slot.Warm {
			return at
		}
		_, err = at.Give()
		check.Must(t, err)
		check.Require(t, !time.Now().After(end), "no place is warm")
	}
}

// Sessions, calls with limits, and the server's commands get a cold slot even if a room is warm.
func TestCold(t *testing.T) {
	s := source(t, policy(t))
	harness.Until(t, bound, "a warm room", func() bool { idle, _, _ := s.Rooms(); return idle > 0 })
	for _, tt := range []struct {
		tenant string
		policy slot.Policy
	}{
		{"a", slot.Policy{Policy: policy(t), Lifetime: bound}}, {"a", slot.Policy{Policy: policy(t), Limits: limits.Request{NoFile: 100}}}, {"", slot.Policy{Policy: policy(t)}},
	} {
		at, err := s.Take(t.Context(), tt.tenant, tt.policy)
		check.Must(t, err)
		check.That(t, at.Kind() == slot.Cold, "%+v is %s", tt, at.Kind())
		_, err = at.Give()
		check.OK(t, err)
	}
}

// The kernel frees a command's files in memory some time after its end. A command with a smaller limit gets another
// slot until then, instead of an error.
func TestMemoryLeft(t *testing.T) {
	large, small := limits.Request{Memory: 230 << 20}, limits.Request{Memory: 60 << 20}
	roomy := policy(t)
	roomy.TmpSize = 256 << 20
	s := source(t, roomy)
	run := func(at slot.Slot, l limits.Request, script string) error {
		defer func() { _, _ = at.Give() }()
		dir, err := at.Files()
		check.Must(t, err)
		_, err = dir.Put("in", strings.NewReader("text"), 100, 0o644)
		check.Must(t, err)
		run, err := at.Start(t.Context(), slot.Command{Args: []string{"sh", "-c", script}, Options: supervise.Options{Limits: l, Timeout: bound}})
		if err != nil {
			return err
		}
		res, err := run.Wait()
		check.That(t, err == nil && res.ExitCode() == 0, "%+v, %v", res, err)
		return nil
	}
	if err := run(placeOf(t, s, slot.Policy{Policy: roomy}), large, "true"); errors.Is(err, limits.ErrRenew) {
		t.Logf("nobody here can set limits: %v", err)
		return
	}
	for range 5 {
		check.Must(t, run(placeOf(t, s, slot.Policy{Policy: roomy, Commands: large}), large, "head -c 140M /dev/zero >/tmp/x"))
		at, err := s.Take(t.Context(), "a", slot.Policy{Policy: roomy, Commands: small})
		check.Must(t, err)
		err = run(at, small, "true")
		check.That(t, err == nil, "%s: %v", at.Kind(), err)
	}
}

// Giving a slot back ends its running command.
func TestGivenBack(t *testing.T) {
	s := source(t, policy(t))
	at := placeOf(t, s, slot.Policy{Policy: policy(t)})
	_, err := at.Start(t.Context(), slot.Command{Args: []string{"sleep", "1000"}})
	check.Must(t, err)
	begin := time.Now()
	res, err := at.Give()
	check.That(t, err == nil && res.Verdict == result.Proven && res.Cause == result.Killed, "%+v, %v", res, err)
	harness.Within(t, "the end", time.Since(begin), 0, 5*time.Second)
}

// A program in an interpreter started ahead behaves like any other, and its slot serves one call.
func TestAhead(t *testing.T) {
	s := pool.NewSource(slot.OnDemand{}, slot.Policy{Policy: bare}, pool.Sizes{Min: 2, Max: 8}, func(err error) { t.Error(err) })
	defer func() {
		s.Close()
		left := below(t)
		check.That(t, len(left) == 0, "left: %+v", left)
	}()
	harness.Until(t, bound, "a warm room", func() bool {
		at, err := s.Take(t.Context(), "a", slot.Policy{Policy: bare})
		check.Must(t, err)
		defer at.Give()
		return at.Kind() == slot.Warm
	})
	policy := slot.Policy{Policy: bare, Program: &slot.Program{Args: []string{"python3", "/home/sandbox/main.py"}, File: "main.py", Ahead: 1}}
	run := func(code string, timeout time.Duration) (*result.Result, string) {
		at, err := s.Take(t.Context(), "a", policy)
		check.Must(t, err)
		defer at.Give()
		dir, err := at.Files()
		check.Must(t, err)
		_, err = dir.Put("main.py", strings.NewReader(code), int64(len(code)), 0o600)
		check.Must(t, err)
		var out bytes.Buffer
		running, err := at.Start(t.Context(), slot.Command{Args: policy.Program.Args, Program: code, Options: supervise.Options{Stdout: &out, Stderr: &out, Timeout: timeout, Attended: true}})
		check.Must(t, err)
		res, err := running.Wait()
		check.That(t, err == nil && res.Verdict == result.Proven, "%+v, %v", res, err)
		return res, out.String()
	}
	const code = "import os, sys; print(__file__, sys.argv, sys.path[0], os.listdir('.'), os.listdir('/tmp')); open('/tmp/left', 'w'); sys.exit(3)"
	for range 3 {
		res, text := run(code, bound)
		want := "/home/sandbox/main.py ['/home/sandbox/main.py'] /home/sandbox ['main.py'] []\n"
		check.That(t, text == want && res.ExitCode() == 3 && res.Duration >= 0, "%+v, %q", res, text)
		harness.Until(t, bound, "an interpreter that was started ahead", func() bool { return s.Ahead() == 1 })
	}
	res, _ := run("import time; time.sleep(1000)", harness.Deadline(100*time.Millisecond))
	check.That(t, res.Cause == result.Timeout, "%+v", res)
	harness.Until(t, bound, "an interpreter that was started ahead", func() bool { return s.Ahead() == 1 })
	_, text := run("print('x' * 300000)\n#"+strings.Repeat("y", 200_000), bound)
	check.That(t, len(text) == 300_001, "%d bytes", len(text))
}
