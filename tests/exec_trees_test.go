package tests

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// trees are process trees that outlive a naive kill, and what each prints when it is complete.
var trees = []struct{ fixture, ready string }{
	{"tree-sleep", "ready 2\n"},
	{"tree-python", "ready 3\n"},
	{"tree-node", "ready 5\n"},
	{"tree-setsid", "ready 2\n"},
	{"tree-daemon", "ready 2\n"},
	{"tree-term-immune", "ready 2\n"},
	{"tree-stopped", "ready 2\n"},
	{"tree-nested", "ready "}, // 2 or 3: a nested namespace may be refused
}

// witness is an exec that must not be affected by others: it answers every line.
type witness struct {
	p  *harness.Process
	in *io.PipeWriter
}

func newWitness(b *harness.Sandbox) *witness {
	r, w := io.Pipe()
	p := b.StartExec(harness.Options{Stdin: r}, nil, "sh", "-c", `while read -r x; do echo "heard $x"; done; exit 9`)
	return &witness{p, w}
}

func (w *witness) lives(t *testing.T, word string) {
	t.Helper()
	_, err := io.WriteString(w.in, word+"\n")
	harness.Must(t, err)
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

// Each tree exits completely at its exec's deadline, while the sandbox, its command and another
// exec go on.
func TestExecTrees(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "/fixtures/tree-sleep")
	harness.Until(t, harness.Bound, "its command's child", func() bool {
		return slices.ContainsFunc(b.Members(), func(p harness.Proc) bool { return p.Comm == "sleep" })
	})
	w := newWitness(b)
	before := len(b.Members())
	t.Run("trees", func(t *testing.T) {
		for _, tree := range trees {
			t.Run(tree.fixture, func(t *testing.T) {
				t.Parallel()
				p, timeout := harness.InTime(t, time.Second, tree.ready, func(timeout string) *harness.Process {
					return b.StartExec(harness.Options{T: t}, []string{"--timeout", timeout}, "/fixtures/"+tree.fixture)
				})
				r := p.Wait()
				r.Expect(t, 124, "timeout")
				harness.Within(t, "the exec", r.Elapsed, timeout, timeout+300*time.Millisecond)
				w.lives(t, tree.fixture)
			})
		}
	})
	w.end(t)
	if after := len(b.Members()); after != before {
		t.Errorf("%d processes in the sandbox before, %d after", before, after)
	}
}

// With a grace period, a tree that dies of SIGTERM ends at once, and another at the end of the
// period. SIGTERM reaches only that exec.
func TestExecTreesGrace(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "/fixtures/term-handler")
	w := newWitness(b)
	t.Run("trees", func(t *testing.T) {
		for _, tree := range []struct {
			fixture, ready string
			after          time.Duration // of the deadline
		}{
			{"tree-sleep", "ready 2\n", 0},
			{"tree-node", "ready 5\n", 0},
			{"tree-setsid", "ready 2\n", 0},
			{"tree-daemon", "ready 2\n", 0},
			{"tree-term-immune", "ready 2\n", harness.Deadline(500 * time.Millisecond)},
			{"tree-stopped", "ready 2\n", harness.Deadline(500 * time.Millisecond)},
		} {
			t.Run(tree.fixture, func(t *testing.T) {
				t.Parallel()
				p, timeout := harness.InTime(t, 800*time.Millisecond, tree.ready, func(timeout string) *harness.Process {
					return b.StartExec(harness.Options{T: t}, []string{"--timeout", timeout, "--grace", harness.Deadline(500 * time.Millisecond).String()}, "/fixtures/"+tree.fixture)
				})
				r := p.Wait()
				r.Expect(t, 124, "timeout")
				harness.Within(t, "the exec", r.Elapsed, timeout+tree.after, timeout+tree.after+300*time.Millisecond)
				w.lives(t, tree.fixture)
			})
		}
	})
	w.end(t)
	if r := b.State.Run("logs", b.ID); strings.Contains(string(r.Stdout), "cleaned") {
		t.Errorf("SIGTERM has reached the sandbox's own command: %q", r.Stdout)
	}
}

// The three trees that survive an exec's deadline in a Modal sandbox.
func TestExecModalTrees(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		command   []string
		processes string
	}{
		{"BashSleep", []string{"bash", "-c", "sleep 300 & echo ready; wait"}, "bash sleep"},
		{"BashPythonSleep", []string{"bash", "-c", `python3 -c "
import subprocess
p = subprocess.Popen(['sleep', '300'])
print('ready', flush=True)
p.wait()"; true`}, "bash python3 sleep"},
		{"BashNodePythonChild", []string{"/fixtures/tree-node"}, "tree-node node python3 python3 sleep"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := harness.NewState(t).Sandbox(harness.Options{})
			p, timeout := harness.InTime(t, time.Second, "ready", func(timeout string) *harness.Process {
				return b.StartExec(harness.Options{}, []string{"--timeout", timeout}, c.command...)
			})
			harness.Until(t, harness.Bound, "the processes "+c.processes, func() bool {
				names := ""
				for _, proc := range p.Members() {
					names += " " + proc.Comm
				}
				// Init comes first, if the caller may inspect it.
				return strings.HasSuffix(names, " "+c.processes)
			})
			r := p.Wait()
			r.Expect(t, 124, "timeout")
			harness.Within(t, "the exec", r.Elapsed, timeout, timeout+300*time.Millisecond)
			// Only PID 1 of the room is left.
			if n := len(b.Members()); n != 1 {
				t.Errorf("%d processes in the sandbox, want 1", n)
			}
			b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
		})
	}
}
