package tests

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func sha256File(t *testing.T, name string) string {
	t.Helper()
	f, err := os.Open(name)
	harness.Must(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	harness.Must(t, err)
	return hex.EncodeToString(h.Sum(nil))
}

// Eight followers see each line when it is written, in order, and end with the sandbox. Followers
// that exit earlier disturb nothing.
func TestLogFollowers(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--bind", dir+":/go", "--name", "talker", "sh", "-c",
		`for i in 1 2 3; do while [ ! -e /go/$i ]; do sleep 0.02; done; echo line $i; echo error $i >&2; done; exit 4`)
	b.Busy = true
	var followers []*harness.Process
	for range 8 {
		followers = append(followers, s.Start(harness.Options{}, "logs", "-f", "talker"))
	}
	for i := 1; i <= 3; i++ {
		harness.Must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), nil, 0o644))
		written := time.Now()
		for j, p := range followers {
			p.WaitOutput(fmt.Sprintf("line %d\n", i))
			p.WaitStderr(fmt.Sprintf("error %d\n", i))
			harness.Within(t, "the line", time.Since(written), 0, 200*time.Millisecond)
			if i == 1 && j < 2 { // one is signalled, one killed
				sig := []unix.Signal{unix.SIGINT, unix.SIGKILL}[j]
				p.Signal(sig)
				r := p.Wait()
				check.That(t, sig != unix.SIGINT || r.ExitCode == 128+2, "a follower that got SIGINT: exit code %d", r.ExitCode)
			}
		}
		if i == 1 {
			followers = followers[2:]
			b.Alive()
		}
	}
	for _, p := range followers {
		p.Wait().Exits(t, 0).Out(t, "line 1\nline 2\nline 3\n").Err(t, "error 1\nerror 2\nerror 3\n")
	}
	b.Ended()
	// The same after the end, with and without --follow.
	for _, args := range [][]string{{"logs", "talker"}, {"logs", "-f", "talker"}} {
		s.Run(args...).Exits(t, 0).Out(t, "line 1\nline 2\nline 3\n")
	}
	for _, c := range []struct{ args, stdout, stderr string }{
		{"--stream stdout", "line 1\nline 2\nline 3\n", ""},
		{"--stream stderr", "", "error 1\nerror 2\nerror 3\n"},
		{"--tail 1", "line 3\n", "error 3\n"},
		{"--tail 2 --stream stdout", "line 2\nline 3\n", ""},
		{"--tail 0", "", ""},
		{"--tail 100", "line 1\nline 2\nline 3\n", "error 1\nerror 2\nerror 3\n"},
	} {
		s.Run(append(strings.Fields("logs talker "), strings.Fields(c.args)...)...).Exits(t, 0).Out(t, c.stdout).Err(t, c.stderr)
	}
	for _, args := range []string{"logs", "logs a b", "logs nobody", "logs --tail -1 talker", "logs --tail x talker", "logs --stream stdin talker"} {
		s.Run(strings.Fields(args)...).Exits(t, 125).ErrLines(t, 1)
	}
}

// logs prints the exact bytes of each stream, also as JSON.
func TestLogBinary(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "sh", "-c", "/fixtures/out-bytes; /fixtures/out-bytes 00ff0a >&2")
	b.Ended()
	r := s.Run("logs", b.ID)
	want := make([]byte, 256)
	for i := range want {
		want[i] = byte(i)
	}
	check.That(t, bytes.Equal(r.Stdout, want) && string(r.Stderr) == "\x00\xff\n", "%q %q", r.Stdout, r.Stderr)
	s.Run("logs", "--json", "--stream", "stderr", b.ID).Out(t, `{"stream":"stderr","base64":"AP8K"}`+"\n")
	// Large output on both streams at once.
	b = s.Sandbox(harness.Options{}, "/fixtures/out-bulk")
	rec := b.Ended()
	r = s.Run("logs", b.ID)
	own := harness.Run(t, harness.Options{}, "/fixtures/out-bulk")
	check.That(t, bytes.Equal(r.Stdout, own.Stdout) && bytes.Equal(r.Stderr, own.Stderr) && len(r.Stdout) != 0,
		"%d and %d bytes, want %d and %d", len(r.Stdout), len(r.Stderr), len(own.Stdout), len(own.Stderr))
	check.That(t, rec.Logs.StdoutBytes == int64(len(r.Stdout)) && !rec.Logs.StdoutTruncated, "%+v", rec.Logs)
}

// --max-output keeps the beginning of each stream, reports the total, and does not stop the
// command.
func TestLogMax(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	const limit = 64 << 10
	b := s.Sandbox(harness.Options{}, "--max-output", "64K", "sh", "-c", "seq 1000000; echo short >&2; exit 3")
	follower := s.Start(harness.Options{}, "logs", "-f", b.ID)
	rec := b.Ended()
	check.That(t, *rec.ExitCode == 3 && rec.Logs.StdoutBytes == 6888896 && rec.Logs.StdoutTruncated && !rec.Logs.StderrTruncated && rec.Logs.StderrBytes == 6, "%+v", rec.Logs)
	var want bytes.Buffer
	for i := 1; want.Len() < limit; i++ {
		fmt.Fprintln(&want, i)
	}
	for _, r := range []*harness.Result{s.Run("logs", b.ID), follower.Wait()} {
		check.That(t, r.ExitCode == 0 && bytes.Equal(r.Stdout, want.Bytes()[:limit]), "exit code %d: %d bytes, and not the head", r.ExitCode, len(r.Stdout))
		check.That(t, strings.Contains(string(r.Stderr), "short\n") && strings.Contains(string(r.Stderr), "stdout is incomplete") && strings.Contains(string(r.Stderr), "6888896"),
			"stderr %q", r.Stderr)
	}
	// The file does not exceed it while the command runs either.
	flood := s.Sandbox(harness.Options{}, "--max-output", "64K", "/fixtures/out-flood")
	harness.Until(t, harness.Bound, "the full log", func() bool {
		st, err := os.Stat(s.Dir + "/" + flood.ID + "/stdout.log")
		return err == nil && st.Size() >= limit
	})
	flood.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
	st, err := os.Stat(s.Dir + "/" + flood.ID + "/stdout.log")
	check.That(t, err == nil && st.Size() <= limit, "%v, %v", st, err)
}
