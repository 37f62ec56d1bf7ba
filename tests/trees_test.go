// Package tests runs the built sbxrun from end to end.
package tests

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// Each process tree exits completely at the deadline, and its earlier output is kept.
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

// With a grace period, a tree that dies of SIGTERM ends at once, and another at the end of the
// period.
func TestTreesGrace(t *testing.T) {
	t.Parallel()
	for _, tree := range []struct {
		fixture string
		after   time.Duration // of the deadline
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
