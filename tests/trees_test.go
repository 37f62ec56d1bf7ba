// Package tests runs the built sbxrun from end to end. README.md says which
// test belongs to which row of the scenarios.
package tests

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// Section 1: each tree is gone at the deadline, and what it printed before is
// kept.
func TestTrees(t *testing.T) {
	t.Parallel()
	for _, tree := range []struct{ fixture, ready string }{
		{"tree-sleep", "ready 2\n"},
		{"tree-python", "ready 3\n"},
		{"tree-node", "ready 5\n"},
		{"tree-setsid", "ready 2\n"},
		{"tree-daemon", "ready 2\n"},
		{"tree-term-immune", "ready 2\n"},
		{"tree-stopped", "ready 2\n"},
		{"tree-nested", "ready "}, // 2 or 3: a nested namespace may be refused
	} {
		t.Run(tree.fixture, func(t *testing.T) {
			t.Parallel()
			p, timeout := harness.InTime(t, time.Second, tree.ready, func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/"+tree.fixture)
			})
			r := p.Wait()
			r.Expect(t, 124, "timeout")
			harness.Within(t, "the run", r.Elapsed, timeout, timeout+300*time.Millisecond)
		})
	}
}

// Section 1, with a grace period: a tree that dies of SIGTERM does not wait for
// its end, and one that does not is gone when it is over.
func TestTreesGrace(t *testing.T) {
	t.Parallel()
	for _, tree := range []struct {
		fixture string
		after   time.Duration // the deadline
	}{
		{"tree-setsid", 0},
		{"tree-daemon", 0},
		{"tree-term-immune", harness.Deadline(500 * time.Millisecond)},
		{"tree-stopped", harness.Deadline(500 * time.Millisecond)},
	} {
		t.Run(tree.fixture, func(t *testing.T) {
			t.Parallel()
			p, timeout := harness.InTime(t, 800*time.Millisecond, "ready 2\n", func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{}, "--timeout", timeout, "--grace", harness.Deadline(500*time.Millisecond).String(), "/fixtures/"+tree.fixture)
			})
			r := p.Wait()
			r.Expect(t, 124, "timeout")
			harness.Within(t, "the run", r.Elapsed, timeout+tree.after, timeout+tree.after+300*time.Millisecond)
		})
	}
}
