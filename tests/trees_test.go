// Package tests runs the built sbxrun from end to end.
package tests

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// trees are process trees that outlive a naive kill.
var trees = []struct {
	fixture, ready string // ready is its output when it is complete
	deaf           bool   // SIGTERM does not end it
}{
	{"tree-sleep", "ready 2\n", false},
	{"tree-python", "ready 3\n", false},
	{"tree-node", "ready 5\n", false},
	{"tree-setsid", "ready 2\n", false},
	{"tree-daemon", "ready 2\n", false},
	{"tree-term-immune", "ready 2\n", true},
	{"tree-stopped", "ready 2\n", true},
	{"tree-nested", "ready ", true}, // 2 or 3: a nested namespace may be refused
}

// endTrees starts each tree with a deadline, and asserts when it ends: with a grace period, at
// once if it dies of SIGTERM, and otherwise at the end of the period.
func endTrees(t *testing.T, grace time.Duration, start func(t *testing.T, flags []string, fixture string) *harness.Process, after func(fixture string)) {
	for _, tree := range trees {
		if grace > 0 && tree.fixture == "tree-nested" {
			continue // dies of SIGTERM only if it is not nested
		}
		t.Run(tree.fixture, func(t *testing.T) {
			t.Parallel()
			p, ends := harness.InTime(t, time.Second, tree.ready, func(timeout string) *harness.Process {
				return start(t, []string{"--timeout", timeout, "--grace", grace.String()}, "/fixtures/"+tree.fixture)
			})
			r := p.Wait().Expect(t, 124, "timeout")
			if tree.deaf {
				ends += grace
			}
			harness.Within(t, "the tree", r.Elapsed, ends, ends+300*time.Millisecond)
			after(tree.fixture)
		})
	}
}

// Each tree exits completely at the deadline, and its earlier output is kept.
func TestTrees(t *testing.T) {
	t.Parallel()
	for _, grace := range []time.Duration{0, harness.Deadline(500 * time.Millisecond)} {
		t.Run("grace "+grace.String(), func(t *testing.T) {
			t.Parallel()
			endTrees(t, grace, func(t *testing.T, flags []string, fixture string) *harness.Process {
				return harness.Start(t, harness.Options{}, append(flags, fixture)...)
			}, func(string) {})
		})
	}
}

// witness is an exec that must not be affected by others: it answers every line.
type witness struct {
	p  *harness.Process
	in *os.File
}

func newWitness(t *testing.T, b *harness.Sandbox) *witness {
	t.Helper()
	r, w, err := os.Pipe()
	check.Must(t, err)
	t.Cleanup(func() { w.Close() })
	defer r.Close()
	p := b.StartExec(harness.Options{Stdin: r}, nil, "sh", "-c", `while read -r x; do echo "heard $x"; done; exit 9`)
	return &witness{p, w}
}

func (w *witness) lives(t *testing.T, word string) {
	t.Helper()
	_, err := w.in.WriteString(word + "\n")
	check.Must(t, err)
	harness.Until(t, harness.Bound, "the other exec's answer to "+word, func() bool {
		return strings.Contains(w.p.Output(), "heard "+word+"\n")
	})
}

func (w *witness) end(t *testing.T) {
	t.Helper()
	w.lives(t, "last")
	w.in.Close()
	w.p.Wait().Expect(t, 9, "exited")
}

// Each tree exits completely at its exec's deadline, while the sandbox, its command and another exec continue.
func TestExecTrees(t *testing.T) {
	t.Parallel()
	for _, grace := range []time.Duration{0, harness.Deadline(500 * time.Millisecond)} {
		t.Run("grace "+grace.String(), func(t *testing.T) {
			t.Parallel()
			// The subtests may wait for a long time before they run. SIGTERM would end the command, and so the sandbox.
			b := harness.NewState(t).Sandbox(harness.Options{}, "sleep", "infinity")
			before, w := len(b.Members()), newWitness(t, b)
			t.Run("trees", func(t *testing.T) {
				endTrees(t, grace, func(t *testing.T, flags []string, fixture string) *harness.Process {
					return b.StartExec(harness.Options{T: t}, flags, fixture)
				}, func(fixture string) { w.lives(t, fixture) })
			})
			w.end(t)
			check.Equal(t, len(b.Members()), before)
		})
	}
}

// Killing a sandbox ends all its execs, whatever they do about signals.
func TestKillTrees(t *testing.T) {
	t.Parallel()
	for _, grace := range []time.Duration{0, 500 * time.Millisecond} {
		s := harness.NewState(t)
		b := s.Sandbox(harness.Options{}, "--name", "box", "/fixtures/tree-term-immune")
		b.Dying = true
		var ps []*harness.Process
		for _, tree := range trees {
			p := b.StartExec(harness.Options{}, nil, "/fixtures/"+tree.fixture)
			p.WaitOutput(tree.ready)
			ps = append(ps, p)
		}
		k, took := timedKill(t, s, 0, "--grace", grace.String(), "box")
		harness.Within(t, "kill", took, grace, grace+300*time.Millisecond)
		check.That(t, k[0].Verdict == "proven", "%+v", k)
		for _, p := range ps {
			p.Wait().Expect(t, 137, "killed")
		}
		b.Ended()
		s.Run("exec", "box", "true").Exits(t, 125).ErrHas(t, "ended")
	}
}
