package nsenter_test

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/nsenter"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestSandbox runs commands in a sandbox of `sbxrun start`, given its name.
func TestSandbox(t *testing.T) {
	t.Setenv("SBXRUN_STATE_DIR", filepath.Join(t.TempDir(), "state"))
	sbxrun := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), harness.Binary(t), args...)
		cmd.Dir = "/"
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		check.Require(t, err == nil, "sbxrun %q: %v: %s", args, err, &stderr)
		return string(out)
	}
	sbxrun("start", "--workdir", "/tmp", "--env", "OF=box", "--name", "box", "--proof-timeout", "1m")
	ended := false
	defer func() {
		if !ended {
			sbxrun("kill", "--grace", "0", "--proof-timeout", "1m", "box")
		}
	}()

	var out bytes.Buffer
	cmd := &nsenter.Command{Sandbox: "box", Args: []string{"sh", "-c", "echo $OF $MINE; pwd; exit 9"}, Env: []string{"MINE=too"}, Stdout: &out, Timeout: time.Minute, ProofTimeout: time.Minute}
	res, err := cmd.Run(t.Context())
	check.That(t, err == nil && res.ExitCode() == 9 && res.Verdict == result.Proven && out.String() == "box too\n/tmp\n", "%+v, %v, %q", res, err, &out)

	// A failed attempt to enter leaks no descriptor, because a long-lived program may make many.
	job := strings.TrimSpace(sbxrun("exec", "--detach", "box", "true")) // BOX/EXEC
	for _, name := range []string{job, "box/none"} {
		before := harness.Descriptors(t)
		for range 20 {
			_, err := (&nsenter.Command{Sandbox: name, Args: []string{"true"}}).Run(t.Context())
			check.That(t, errors.As(err, new(*nsenter.Error)), "%s: %v", name, err)
		}
		n := harness.Descriptors(t)
		check.That(t, n < before+20, "%s: %d descriptors, and %d after", name, before, n)
	}

	// A command that ends because its sandbox was killed counts as killed, however it reacted.
	cmd = &nsenter.Command{Sandbox: "box", Args: []string{"sleep", "1000"}, ProofTimeout: time.Minute}
	check.Must(t, cmd.Start(t.Context()))
	sbxrun("kill", "--grace", "0", "--proof-timeout", "1m", "box")
	ended = true
	res, err = cmd.Wait()
	check.That(t, err == nil && res.Cause == result.Killed && res.Verdict == result.Proven, "%+v, %v", res, err)
	for _, name := range []string{"box", "other"} {
		_, err = (&nsenter.Command{Sandbox: name, Args: []string{"true"}}).Run(t.Context())
		e, ok := errors.AsType[*nsenter.Error](err)
		check.That(t, ok && e.Code != "" && !errors.Is(err, unix.EACCES) && strings.Contains(e.Message, name), "%s: %v", name, err)
	}
}
