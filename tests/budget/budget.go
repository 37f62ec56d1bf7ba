// Package budget runs tests under a limit of tasks.
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

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Budget is a cgroup of the test with a pids.max.
type Budget struct {
	t   *testing.T
	Dir string
}

var budgets atomic.Int32

// New creates a Budget; nil where no cgroup can be created. At the end of the test it is removed
// with all its processes.
func New(t *testing.T, most int) *Budget {
	t.Helper()
	mounts, err := limits.Mounts("")
	check.Must(t, err)
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
		// A v2 cgroup with processes cannot delegate controllers, but its parent may.
		for _, parent := range []string{own, filepath.Dir(own)} {
			// Not sbxrun-…, because a sweep removes empty cgroups of that name.
			dir := filepath.Join(parent, fmt.Sprintf("budget-test-%d-%d", os.Getpid(), budgets.Add(1)))
			if len(parent) < len(mt.Point) || os.Mkdir(dir, 0o755) != nil {
				continue
			}
			b := &Budget{t, dir}
			if os.WriteFile(dir+"/pids.max", []byte(strconv.Itoa(most)), 0) != nil {
				_ = os.Remove(dir)
				continue
			}
			// A caller that may create it need not be allowed to move a process there.
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

// Limit sets pids.max.
func (b *Budget) Limit(most int) {
	b.t.Helper()
	if err := os.WriteFile(b.Dir+"/pids.max", []byte(strconv.Itoa(most)), 0); err != nil {
		b.t.Fatal(err)
	}
}

// Used returns the current number of tasks.
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

// Settled waits until there are n tasks. A reaped process is uncharged a moment later.
func (b *Budget) Settled(n int) {
	b.t.Helper()
	harness.Until(b.t, harness.Bound, fmt.Sprintf("%d tasks in the cgroup", n), func() bool { return b.Used() == n })
}

// Wrap returns a command that starts sbxrun in the cgroup.
func (b *Budget) Wrap() []string {
	return []string{"sh", "-c", "echo $$ >" + b.Dir + "/cgroup.procs && exec \"$@\"", "sh"}
}

// Fill adds n idle processes.
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

// runAlone runs a command to its end.
func runAlone(cmd *exec.Cmd) error {
	done, err := harness.StartCommand(cmd)
	if err != nil {
		return err
	}
	defer done()
	return cmd.Wait()
}
