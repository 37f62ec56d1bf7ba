// Package budget has tests run where only so many tasks may be.
package budget

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Budget is a cgroup of the test's own with a pids.max.
type Budget struct {
	t   *testing.T
	Dir string
}

var budgets atomic.Int32

// New makes one; nil where no cgroup can be made. It is bounded from the
// beginning, and removed with all that is in it when the test is over.
func New(t *testing.T, most int) *Budget {
	t.Helper()
	mounts, err := limits.Mounts("")
	harness.Must(t, err)
	paths, err := limits.Membership("", 0)
	if err != nil {
		return nil
	}
	for _, mt := range mounts {
		path, v1 := paths["pids"]
		if !v1 {
			path = paths[""]
		}
		own, ok := mt.Own(path)
		if !ok || mt.V2 == v1 || v1 && !strings.Contains(strings.Join(mt.Controllers, " "), "pids") {
			continue
		}
		// In v2 a cgroup with processes gives its controllers to none below it, but
		// its parent may.
		for _, parent := range []string{own, filepath.Dir(own)} {
			// Not sbxrun-…: those that are empty a sweep removes.
			dir := filepath.Join(parent, fmt.Sprintf("budget-test-%d-%d", os.Getpid(), budgets.Add(1)))
			if len(parent) < len(mt.Point) || os.Mkdir(dir, 0o755) != nil {
				continue
			}
			b := &Budget{t, dir}
			if os.WriteFile(dir+"/pids.max", []byte(strconv.Itoa(most)), 0) != nil {
				_ = os.Remove(dir)
				continue
			}
			// Who may make it need not be allowed to move somebody there.
			probe := exec.Command("sh", "-c", "echo $$ >"+dir+"/cgroup.procs")
			if runAlone(probe) != nil {
				_ = os.Remove(dir)
				continue
			}
			t.Cleanup(b.remove)
			return b
		}
	}
	return nil
}

func (b *Budget) remove() {
	harness.Until(b.t, harness.Bound, "the cgroup to be empty", func() bool { return os.Remove(b.Dir) == nil })
}

// Limit sets it.
func (b *Budget) Limit(most int) {
	b.t.Helper()
	if err := os.WriteFile(b.Dir+"/pids.max", []byte(strconv.Itoa(most)), 0); err != nil {
		b.t.Fatal(err)
	}
}

// Used is how many tasks there are.
func (b *Budget) Used() int {
	b.t.Helper()
	data, err := os.ReadFile(b.Dir + "/pids.current")
	if err != nil {
		b.t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// Settled waits until there are so many tasks, and no more. A process that was reaped
// is uncharged a moment later.
func (b *Budget) Settled(n int) {
	b.t.Helper()
	harness.Until(b.t, 10*time.Second, fmt.Sprintf("%d tasks in the cgroup", n), func() bool { return b.Used() == n })
}

// Wrap starts sbxrun in the cgroup.
func (b *Budget) Wrap() []string {
	return []string{"sh", "-c", "echo $$ >" + b.Dir + "/cgroup.procs && exec \"$@\"", "sh"}
}

// Fill adds so many processes that do nothing.
func (b *Budget) Fill(n int) {
	b.t.Helper()
	for range n {
		cmd := exec.Command("sleep", "300")
		done, err := harness.StartCommand(cmd)
		if err != nil {
			b.t.Fatal(err)
		}
		b.t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			done()
		})
		if err := os.WriteFile(b.Dir+"/cgroup.procs", []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			b.t.Fatal(err)
		}
	}
}

// runAlone runs a command of the test's own to its end.
func runAlone(cmd *exec.Cmd) error {
	done, err := harness.StartCommand(cmd)
	if err != nil {
		return err
	}
	defer done()
	return cmd.Wait()
}
