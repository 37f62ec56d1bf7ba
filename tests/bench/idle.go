package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// build is an sbxrun to measure, with its own state directory.
type build struct {
	letter, name string
	path, state  string
	dir          string // directory of path
	supervisors  []int  // of the sandboxes that it has started
}

// copy copies sbxrun and sbxrund, because the start also depends on how a file was written (internal/setup/build.sh).
func (b *build) copy(path string) {
	path = got(filepath.Abs(path))
	memory := "/dev/shm" // in memory, like the usual directories (docs/reference/state.md)
	if _, err := os.Stat(memory); err != nil {
		memory = ""
	}
	b.state, b.dir = got(os.MkdirTemp(memory, "sbxrun-bench-")), got(os.MkdirTemp("", "sbxrun-bench-"))
	b.path = filepath.Join(b.dir, "sbxrun")
	must(os.WriteFile(b.path, got(os.ReadFile(path)), 0o755))
	if server, err := os.ReadFile(filepath.Join(filepath.Dir(path), "sbxrund")); err == nil {
		must(os.WriteFile(b.path+"d", server, 0o755))
	}
}

func (b *build) close() {
	b.end()
	for _, dir := range []string{b.state, b.dir} {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	}
}

func (b *build) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.path, args...)
	cmd.Env = append(os.Environ(), "SBXRUN_STATE_DIR="+b.state)
	return cmd
}

// do runs a command to its end.
func (b *build) do(args ...string) { done(b.command(args...)) }

func done(cmd *exec.Cmd) {
	if out, err := cmd.CombinedOutput(); err != nil {
		fail("%q: %w: %s", cmd.Args, err, out)
	}
}

func sandboxName(i int) string { return fmt.Sprintf("bench%d", i) }

// start starts n idle sandboxes. They end by themselves if the benchmark is killed.
func (b *build) start(n int) {
	b.supervisors = make([]int, n)
	eachOf(n, func(i int) {
		cmd := b.command("start", "--json", "--name", sandboxName(i), "--timeout", "1800")
		cmd.Stderr = os.Stderr
		out := got(cmd.Output())
		var said struct {
			Supervisor int `json:"supervisor_pid"`
		}
		if err := json.Unmarshal(out, &said); err != nil || said.Supervisor < 2 {
			fail("start said %q: %v", out, err)
		}
		b.supervisors[i] = said.Supervisor
	})
}

// killAll ends the build's sandboxes, and returns how long that took. It also runs after SIGINT.
func (b *build) killAll() time.Duration {
	cmd := exec.Command(b.path, "kill", "--all", "--grace", "0")
	cmd.Env = append(os.Environ(), "SBXRUN_STATE_DIR="+b.state)
	supervisors := b.supervisors
	b.supervisors = nil
	took := elapsed(cmd)
	left := 0
	for _, pid := range supervisors {
		if pid < 2 {
			continue // it was not started
		}
		// A child of this subreaper, so its PID is not reused.
		if reaped, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); reaped == 0 && err == nil {
			left++
		}
	}
	if left > 0 {
		fail("kill --all: supervisors left: %d", left)
	}
	return took
}

// end is killAll without a measurement.
func (b *build) end() {
	if len(b.supervisors) == 0 {
		return
	}
	if err := caught(func() { b.killAll() }); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// idleAfter is when a sandbox is really idle: it has swept, and released the threads of its start
// (admission.Permit.Running).
const idleAfter = 12 * time.Second

// idle measures the cost of idle sandboxes, and how long it takes to end them.
func idle(builds []*build) {
	n := *sandboxes
	var variants []variant
	weights, lists := map[string]weight{}, measure.Sample{}
	for _, b := range builds {
		variants = append(variants, variant{b.letter, b.name, func() time.Duration {
			defer b.end()
			b.start(n)
			if weights[b.letter].processes == 0 {
				time.Sleep(idleAfter)
				weights[b.letter] = weigh(b.supervisors)
			}
			if b == builds[0] {
				lists = append(lists, measure.MS(elapsed(b.command("ps"))))
			}
			time.Sleep(rest)
			return b.killAll()
		}})
	}
	variants = append(variants, variant{"C", "kills of init by pidfd", func() time.Duration {
		cmds, inits := make([]*exec.Cmd, n), make([]*proc.Process, n)
		defer func() {
			for i := range n {
				if inits[i] != nil {
					inits[i].Close()
				}
				if cmds[i] != nil {
					reap(cmds[i])
				}
			}
		}()
		eachOf(n, func(i int) {
			cmd, plan := plain("sleep", "infinity")
			defer plan.Close()
			must(cmd.Start())
			cmds[i] = cmd
			settled(cmd.Process.Pid, 1, time.Now().Add(time.Minute))
			inits[i] = initOf(cmd)
		})
		if weights["C"].processes == 0 {
			var pids []int
			for _, cmd := range cmds {
				pids = append(pids, cmd.Process.Pid)
			}
			weights["C"] = weigh(pids)
		}
		time.Sleep(rest)
		return kill(inits)
	}}, variant{"D", "a Go program around each", func() time.Duration { return holdMany(n) }})
	what := fmt.Sprintf("kill --all --grace 0 of %d idle sandboxes, from start to exit; C kills as many of plain bwrap and waits for them, D has a Go program do this for each", n)
	compare("idle", what, rounds(3), 0, variants)
	for _, v := range variants {
		if w, ok := weights[v.letter]; ok {
			fmt.Printf("  %s  one of them, its supervisor and all below it: %v\n", v.letter, w.each(n))
		}
	}
	fmt.Printf("  ps of them, from start to exit: median %.3f ms\n\n", lists.Quantile(0.5))
}

// weight is what processes use, as the kernel counts it.
type weight struct {
	processes, tasks, pss float64 // pss in kB
	unread                float64 // processes whose memory cannot be read
}

func (w weight) each(n int) weight {
	f := float64(n)
	return weight{w.processes / f, w.tasks / f, w.pss / f, w.unread / f}
}

func (w weight) String() string {
	s := fmt.Sprintf("%.4g processes, %.4g tasks, PSS %.0f kB", w.processes, w.tasks, w.pss)
	if w.unread > 0 {
		s += fmt.Sprintf(", not counting the memory of %.4g", w.unread)
	}
	return s
}

// weigh weighs processes and their descendants, except those with some names.
func weigh(roots []int, without ...string) (w weight) {
	for _, root := range roots {
		pids := []int{root}
		for _, st := range proc.Descendants(root, 100_000) {
			if !slices.Contains(without, st.Comm) {
				pids = append(pids, st.PID)
			}
		}
		for _, pid := range pids {
			tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
			if err != nil {
				continue // it has exited
			}
			w.processes++
			w.tasks += float64(len(tasks))
			if kB, ok := pss(pid); ok {
				w.pss += kB
			} else {
				w.unread++
			}
		}
	}
	return w
}

// pss returns the proportional set size of a process in kB (proc_pid_smaps(5)).
func pss(pid int) (kB float64, ok bool) {
	_, rest, found := strings.Cut(measure.Read(fmt.Sprintf("/proc/%d/smaps_rollup", pid)), "\nPss:")
	line, _, _ := strings.Cut(rest, " kB")
	kB, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
	return kB, found && err == nil
}

// eachOf calls f for every number below n, several at a time.
func eachOf(n int, f func(int)) {
	var all sync.WaitGroup
	errs := make([]error, n)
	turn := make(chan struct{}, 4)
	for i := range n {
		all.Go(func() {
			turn <- struct{}{}
			if errs[i] = ctx.Err(); errs[i] == nil {
				errs[i] = caught(func() { f(i) })
			}
			<-turn
		})
	}
	all.Wait()
	must(errors.Join(errs...))
}
