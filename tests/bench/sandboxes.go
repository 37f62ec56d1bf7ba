package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// What the sandboxes that live on are measured by. They are in a state directory
// of their own.

func newState() (remove func(), err error) {
	dir, err := os.MkdirTemp("", "sbxrun-bench-")
	if err != nil {
		return nil, err
	}
	return func() {
		if out, err := exec.Command(*binary, "kill", "--all", "--grace", "0").CombinedOutput(); err != nil {
			fmt.Printf("bench: kill --all: %v\n%s", err, out)
		}
		if err := os.RemoveAll(dir); err != nil {
			fmt.Println("bench:", err)
		}
	}, os.Setenv("SBXRUN_STATE_DIR", dir)
}

// startBox starts an idle sandbox, and returns its supervisor.
func startBox(name string) (supervisor int, err error) {
	out, err := exec.Command(*binary, "start", "--json", "--name", name, "--workdir", "/tmp").Output()
	if err != nil {
		return 0, fmt.Errorf("start: %w", err)
	}
	_, rest, found := strings.Cut(string(out), `"supervisor_pid":`)
	end := strings.IndexAny(rest, ",}")
	if !found || end < 0 {
		return 0, fmt.Errorf("start said %q", out)
	}
	return strconv.Atoi(rest[:end])
}

// execs compares an exec with a new sandbox of plain bwrap, pair by pair.
func execs() error {
	remove, err := newState()
	if err != nil {
		return err
	}
	defer remove()
	supervisor, err := startBox("box")
	if err != nil {
		return err
	}
	before := cost(supervisor)
	var with, without sample
	for i := range max(*runs, 500) + 10 {
		a, err := elapsed(exec.Command("bwrap", "--unshare-all", "--unshare-user", "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/", "/", "true"))
		if err != nil {
			return err
		}
		b, err := elapsed(exec.Command(*binary, "exec", "box", "true"))
		if err != nil {
			return err
		}
		if i >= 10 { // the first ones warm up
			without, with = append(without, a), append(with, b)
		}
	}
	fmt.Printf("start to finish of `true` in a sandbox that runs\n  sbxrun exec %v\n  bwrap --unshare-all … true, a new one %v\n  ratio       %.2f\n\n", with, without, ratio(with, without))
	fmt.Printf("the sandbox before and after these %d execs\n  before %v\n  after  %v\n\n", len(with)+10, before, cost(supervisor))

	// The tasks of an exec that waits: all below it but its payload.
	cmd := exec.Command(*binary, "exec", "box", "sh", "-c", "echo ready; read x; exit 0")
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	ready, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := ready.Read(make([]byte, 16)); err != nil {
		return err
	}
	below := proc.Descendants(cmd.Process.Pid, 10)
	fmt.Printf("while an exec runs: sbxrun %d tasks, RSS %s; keeper, init and payload below it: %d processes\n\n",
		tasks(cmd.Process.Pid), field(cmd.Process.Pid, "status", "VmRSS:"), len(below))
	in.Close()
	return cmd.Wait()
}

// costs is what a supervisor and all below it take.
type costs struct{ processes, tasks, files, pss int }

func (c costs) String() string {
	return fmt.Sprintf("%d processes, %d tasks, %d descriptors of the supervisor, PSS %d kB", c.processes, c.tasks, c.files, c.pss)
}

func cost(supervisor int) (c costs) {
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", supervisor))
	if err == nil {
		c.files = len(files)
	}
	pids := []int{supervisor}
	for _, st := range proc.Descendants(supervisor, 100) {
		pids = append(pids, st.PID)
	}
	for _, pid := range pids {
		kB, err := strconv.Atoi(strings.TrimSuffix(field(pid, "smaps_rollup", "Pss:"), " kB"))
		if err != nil {
			continue // not ours to look at
		}
		c.processes++
		c.tasks += tasks(pid)
		c.pss += kB
	}
	return c
}

func tasks(pid int) int {
	list, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none if it has ended
	return len(list)
}

// many shows what lists, kills and idle sandboxes cost.
func many() error {
	const n, weighed = 200, 100
	remove, err := newState()
	if err != nil {
		return err
	}
	defer remove()
	supervisors := make([]int, n)
	if err := eachOf(n, func(i int) (err error) {
		supervisors[i], err = startBox(fmt.Sprintf("box%d", i))
		return err
	}); err != nil {
		return err
	}
	var total costs
	for _, pid := range supervisors[:weighed] {
		c := cost(pid)
		total.processes += c.processes
		total.tasks += c.tasks
		total.pss += c.pss
	}
	fmt.Printf("an idle sandbox, of %d running\n  PSS %d kB, %.1f processes, %.1f tasks, its supervisor and all below it\n", n,
		total.pss/weighed, float64(total.processes)/weighed, float64(total.tasks)/weighed)
	var ps sample
	for range 20 {
		took, err := elapsed(exec.Command(*binary, "ps"))
		if err != nil {
			return err
		}
		ps = append(ps, took)
	}
	fmt.Printf("ps of %d\n  %v\n", n, ps)
	kill := exec.Command(*binary, "kill", "--all")
	took, err := elapsed(kill)
	if err != nil {
		return err
	}
	alive := 0
	for _, pid := range supervisors {
		if st, err := proc.ReadStat(pid); err == nil && st.State != "Z" {
			alive++
		}
	}
	fmt.Printf("kill --all of %d\n  %s, supervisors left: %d\n\n", n, ms(took), alive)
	return nil
}

// eachOf calls f for every number below n, some at a time.
func eachOf(n int, f func(int) error) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	turn := make(chan struct{}, 4)
	for i := range n {
		all.Go(func() {
			turn <- struct{}{}
			errs[i] = f(i)
			<-turn
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// settled waits until n processes below init are what they are to be.
func settled(init, n int, name string) error {
	for begin := time.Now(); time.Since(begin) < time.Minute; time.Sleep(5 * time.Millisecond) {
		ready := 0
		for _, st := range proc.Descendants(init, 2*n+10) {
			if st.Comm == name {
				ready++
			}
		}
		if ready >= n {
			return nil
		}
	}
	return fmt.Errorf("fewer than %d processes %s", n, name)
}
