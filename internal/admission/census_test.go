package admission

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestCensus(t *testing.T) {
	page := int64(os.Getpagesize())
	stats := []proc.Stat{
		{PID: 1, Comm: "init", State: "S", Threads: 1, Pages: 100},
		{PID: 10, Parent: 1, Comm: "sbxrun", State: "S", Threads: 7, Pages: 100},
		{PID: 11, Parent: 10, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 12, Parent: 11, Comm: "bwrap", State: "S", Threads: 1},
		// The sandbox: a command with two threads, a zombie, and a nested namespace.
		{PID: 13, Parent: 12, Comm: "bwrap", State: "S", Threads: 1, Start: 5, Pages: 1},
		{PID: 14, Parent: 13, Comm: "sh", State: "S", Threads: 2, Pages: 2},
		{PID: 15, Parent: 14, Comm: "sh", State: "Z", Threads: 1},
		{PID: 16, Parent: 14, Comm: "bwrap", State: "S", Threads: 1, Pages: 4},
		{PID: 17, Parent: 16, Comm: "x", State: "S", Threads: 1, Pages: 8},
		// A nested sandbox: its monitor is a descendant of both.
		{PID: 18, Parent: 14, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 19, Parent: 18, Comm: "bwrap", State: "S", Threads: 1},
		// An exec, and another one whose init is not readable.
		{PID: 20, Parent: 1, Comm: "sbxrun", State: "S", Threads: 7, Pages: 100},
		{PID: 21, Parent: 20, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 22, Parent: 21, Comm: "sbxrun", State: "S", Threads: 1, Pages: 16},
		{PID: 23, Parent: 22, Comm: "y", State: "S", Threads: 3, Pages: 32},
		{PID: 31, Parent: 1, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 32, Parent: 31, Comm: "sbxrun", State: "S", Threads: 1, Pages: 64},
		{PID: 33, Parent: 32, Comm: "z", State: "S", Threads: 1, Pages: 128},
		// A keeper in name only, and an exec elsewhere.
		{PID: 41, Parent: 1, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 42, Parent: 41, Comm: "q", State: "S", Threads: 1, Pages: 100},
		{PID: 51, Parent: 1, Comm: proc.KeeperName, State: "S", Threads: 1},
		{PID: 52, Parent: 51, Comm: "sbxrun", State: "S", Threads: 1, Pages: 100},
	}
	namespaces := map[int]uint64{19: 700, 22: 700, 33: 700, 52: 800}
	c := newCensus(stats, func(pid int) (uint64, bool) { ns, ok := namespaces[pid]; return ns, ok })
	for _, tt := range []struct {
		name string
		init proc.Identity
		want Count
	}{
		{"all of it", proc.Identity{PID: 13, Start: 5, PIDNS: 700}, Count{Tasks: 14, Zombies: 1, RSS: 255 * page}},
		{"another process has the number", proc.Identity{PID: 13, Start: 4, PIDNS: 700}, Count{}},
		{"gone", proc.Identity{PID: 99, Start: 4, PIDNS: 700}, Count{}},
	} {
		check.NoDiff(t, cmp.Diff(tt.want, c.Sandbox(tt.init)), "%s (-want +got)", tt.name)
	}
}

// A census counts real processes.
func TestCensusHere(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	check.Must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	init, err := proc.Identify(cmd.Process.Pid)
	check.Must(t, err)
	init.PIDNS = 1 // it has no namespace of its own, and ours does not belong to it
	// Its memory may appear a little later in proc_pid_stat(5).
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		c, err := TakeCensus()
		check.Must(t, err)
		n := c.Sandbox(init)
		if n.Tasks == 1 && n.Zombies == 0 && n.RSS > 0 {
			break
		}
		check.Require(t, n.Tasks == 1 && n.Zombies == 0 && !time.Now().After(end), "sleep: %+v", n)
	}
	_, ok := parentNS(os.Getpid())
	check.That(t, !ok, "our own PID namespace has a parent that we can see")
}
