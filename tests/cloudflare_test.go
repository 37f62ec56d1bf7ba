package tests

import (
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// Cloudflare's kill tests, with their names.

// chain is n nested shells with a sleep in the innermost.
const chain = `
f() { if [ "$1" -gt 1 ]; then bash -c "$(declare -f f); f $(($1 - 1)) & wait"; else echo "deep"; sleep 300; fi; }
f `

func TestCloudflareThreeDeep(t *testing.T) { t.Parallel(); deep(t, 3) }

func TestCloudflareDeepTree(t *testing.T) { t.Parallel(); deep(t, 12) }

// deep ends chains of processes by an exec's deadline, by a signal to sbxrun, and with the
// sandbox.
func deep(t *testing.T, depth int) {
	t.Helper()
	script := chain + string(rune('0'+depth/10)) + string(rune('0'+depth%10))
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	p, _ := harness.InTime(t, time.Second, "deep\n", func(timeout string) *harness.Process {
		return b.StartExec(harness.Options{}, []string{"--timeout", timeout}, "bash", "-c", script)
	})
	if n := len(p.Members()); n < depth {
		t.Errorf("%d processes, want %d at least", n, depth)
	}
	p.Wait().Expect(t, 124, "timeout")
	p = b.StartExec(harness.Options{}, nil, "bash", "-c", script)
	p.WaitOutput("deep\n")
	p.Signal(15)
	p.Wait().Expect(t, 128+15, "canceled")
	// The same as the sandbox's own command.
	b = s.Sandbox(harness.Options{}, "bash", "-c", script)
	s.Run("wait", "--log", "deep", b.ID)
	kill(t, s, 0, "--grace", "0", b.ID)
	b.Ended()
}

// kill --all ends commands and execs of all sandboxes at once, and other sandboxes are not
// affected.
func TestCloudflareKillAll(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b, other := s.Sandbox(harness.Options{}, "--tag", "a=b", "bash", "-c", "sleep 120 & sleep 120 & wait"), s.Sandbox(harness.Options{})
	b.Dying = true
	var ps []*harness.Process
	for range 3 {
		p := b.StartExec(harness.Options{}, nil, "bash", "-c", "sleep 120 & echo up; wait")
		p.WaitOutput("up\n")
		ps = append(ps, p)
	}
	r := s.Run("kill", "--tag", "a=b")
	if r.ExitCode != 0 || !strings.Contains(string(r.Stdout), "1 killed\n") {
		t.Errorf("exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	harness.Within(t, "kill --all", r.Elapsed, 0, 300*time.Millisecond) // SIGTERM ends all of them
	for _, p := range ps {
		p.Wait().Expect(t, 137, "killed")
	}
	b.Ended()
	other.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
}

// A command that traps SIGTERM gets its grace period of 5 s, and no more.
func TestCloudflareTermTrap(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	p := b.StartExec(harness.Options{}, []string{"--timeout", harness.Deadline(500 * time.Millisecond).String(), "--grace", "5"}, "bash", "-c", `trap "echo trapped" TERM; echo up; while :; do sleep 0.1; done`)
	p.WaitOutput("up\n")
	r := p.Wait()
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the exec", r.Elapsed, 5500*time.Millisecond, 5800*time.Millisecond)
	if !strings.HasSuffix(string(r.Stdout), "trapped\n") {
		t.Errorf("stdout %q", r.Stdout)
	}
}

// Killing a sandbox ends all its processes whatever they do about signals, and frees its name.
func TestCloudflareDestroy(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "doomed", "/fixtures/tree-term-immune")
	b.Dying = true
	var ps []*harness.Process
	for _, tree := range trees {
		p := b.StartExec(harness.Options{}, nil, "/fixtures/"+tree.fixture)
		p.WaitOutput(tree.ready)
		ps = append(ps, p)
	}
	_, took := timedKill(t, s, 0, "--grace", "0", "doomed")
	harness.Within(t, "kill", took, 0, 300*time.Millisecond)
	for _, p := range ps {
		p.Wait().Expect(t, 137, "killed")
	}
	b.Ended()
	s.Sandbox(harness.Options{}, "--name", "doomed").Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
}
