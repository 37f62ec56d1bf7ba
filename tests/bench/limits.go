package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// limitsCost compares a run with limits to one without.
func limitsCost(builds []*build) {
	run := func(letter string, flags ...string) variant {
		name := strings.Join(flags, " ")
		if len(flags) == 0 {
			name = "no limits"
		}
		return variant{letter, name, func() time.Duration { return elapsed(builds[0].command(append(flags, "true")...)) }}
	}
	for _, flags := range [][]string{{"--memory", "256M"}, {"--pids", "64"}, {"--cpus", "1"}, {"--memory", "256M", "--pids", "64", "--cpus", "1"}} {
		what := "sbxrun with limits, and without, from start to exit"
		compare("limits", what, rounds(50), 5, []variant{run("A", flags...), run("B")})
	}
}

// forks measures fork and exec on the host.
func forks(n int) (s measure.Sample) {
	for range n {
		s = append(s, measure.MS(elapsed(exec.CommandContext(ctx, "/bin/true"))))
	}
	return s
}

// reported runs a command and returns its report.
func (b *build) reported(attr func(*exec.Cmd), args ...string) (rep struct {
	Cause string `json:"cause"`
	Code  int    `json:"exit_code"`
	Error *struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}, stderr string, err error) {
	cmd := b.command(append([]string{"--report", "fd:3"}, args...)...)
	var said bytes.Buffer
	cmd.Stderr = &said
	if attr != nil {
		attr(cmd)
	}
	err = caught(func() { withReport(cmd, &rep, func() { _ = cmd.Wait() }) }) // the report has the code
	if err != nil {
		err = fmt.Errorf("%w: %s", err, said.String())
	}
	return rep, said.String(), err
}

// withReport runs a command that writes its report to descriptor 3, and reads that. It calls wait
// after the start, to wait for the command.
func withReport(cmd *exec.Cmd, rep any, wait func()) {
	r, w, err := os.Pipe()
	must(err)
	defer r.Close()
	cmd.ExtraFiles = []*os.File{w}
	err = cmd.Start()
	w.Close()
	must(err)
	wait()
	if err := json.NewDecoder(r).Decode(rep); err != nil {
		fail("no report, %v: %w", cmd.ProcessState, err)
	}
}

const (
	bomb   = ":(){ :|:& };: ; sleep 60"
	memHog = "import time; x = bytearray(200 << 20); time.sleep(60)"
)

// hogs runs 50 hogs and 50 ordinary runs at once, and measures how that slows down the host.
func hogs(builds []*build) {
	const n = 50
	before := forks(200)
	causes := map[string]int{}
	var mu sync.Mutex
	note := func(kind string, cause string) {
		mu.Lock()
		defer mu.Unlock()
		causes[kind+" "+cause]++
	}
	var hogging, honest sync.WaitGroup
	for i := range n {
		hogging.Go(func() {
			kind, args := "fork bomb", []string{"--pids", "64", "--timeout", "10", "bash", "-c", bomb}
			if i%2 == 1 {
				kind, args = "memory hog", []string{"--memory", "64M", "--timeout", "30", "python3", "-c", memHog}
			}
			rep, _, err := builds[0].reported(nil, args...)
			if err != nil {
				rep.Cause = err.Error()
			}
			note(kind, rep.Cause)
		})
		honest.Go(func() {
			rep, stderr, err := builds[0].reported(nil, "--timeout", "60", "python3", "-c", "print(sum(range(100000)))")
			if err != nil {
				rep.Cause = err.Error()
			}
			if rep.Cause != "exited" || rep.Code != 0 {
				rep.Cause += " " + stderr
			}
			note("honest", rep.Cause)
		})
	}
	during := forks(200)
	honest.Wait()
	hogging.Wait()
	after := forks(200)
	fmt.Printf("%d hogs at once (fork bombs under --pids 64, memory hogs under --memory 64M), and %d honest runs beside them\n", n, n)
	for what, count := range causes {
		fmt.Printf("  %3d %s\n", count, what)
	}
	fmt.Printf("  fork and exec of the host, median: before %.3f ms, during %.3f ms (ratio %.2f), after %.3f ms\n\n",
		before.Quantile(0.5), during.Quantile(0.5), during.Quantile(0.5)/before.Quantile(0.5), after.Quantile(0.5))
}

// budget makes 1,000 calls from 50 clients with a limit of 300 tasks: once with callers that wait
// for room, and once with callers that give up.
func budget(builds []*build) {
	budgetOf(builds[0], "waiting", "--pids", "24", "--max-parallel", "4", "--on-pressure", "wait", "--wait-timeout", "120")
	budgetOf(builds[0], "refused when it is busy", "--pids", "24")
}

func budgetOf(b *build, how string, flags ...string) {
	const tasks, calls, clients = 300, 1000, 50
	const tree = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do sleep 60 & done; wait"
	dir, remove, err := pidsCgroup(tasks)
	if err != nil {
		fmt.Printf("a budget of %d tasks: not measured, no pids cgroup can be made: %v\n\n", tasks, err)
		return
	}
	defer remove()
	baseline := measure.Read(dir + "/pids.current")
	results := map[string]int{}
	var mu sync.Mutex
	var next atomic.Int64
	var all sync.WaitGroup
	begin := time.Now()
	for range clients {
		all.Go(func() {
			for i := next.Add(1); i <= calls; i = next.Add(1) {
				args := append(slices.Clone(flags), "--timeout", "20", "sh", "-c", "exit 0")
				if i%3 == 0 {
					args = append(slices.Clone(flags), "--timeout", "0.2", "sh", "-c", tree)
				}
				rep, stderr, err := b.reported(func(cmd *exec.Cmd) { within(cmd, dir) }, args...)
				what := fmt.Sprintf("%s %d", rep.Cause, rep.Code)
				if err != nil {
					what, _, _ = strings.Cut(err.Error(), "\n")
				} else if rep.Error != nil {
					what += " " + rep.Error.Code
				}
				if rep.Code != 75 && (strings.Contains(stderr, "temporarily unavailable") || strings.Contains(stderr, "errno=11") || strings.Contains(stderr, "annot fork")) {
					what += ", EAGAIN"
				}
				mu.Lock()
				results[what]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	fmt.Printf("a budget of %d tasks, callers %s: %d calls from %d clients, every third with a tree of 20 that times out, in %v\n", tasks, how, calls, clients, time.Since(begin).Round(time.Millisecond))
	for what, count := range results {
		fmt.Printf("  %4d %s\n", count, what)
	}
	fmt.Printf("  tasks before %s, after %s, at once at most %s; forks refused: %s\n\n", baseline, measure.Read(dir+"/pids.current"), measure.Read(dir+"/pids.peak"), strings.TrimPrefix(measure.Read(dir+"/pids.events"), "max "))
}

// pidsCgroup creates a cgroup with a limit of tasks, in v1 or v2, where that is possible.
func pidsCgroup(max int) (dir string, remove func(), err error) {
	for _, parent := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		dir = filepath.Join(parent, fmt.Sprintf("bench-%d", os.Getpid()))
		if err = os.Mkdir(dir, 0o755); err != nil {
			continue
		}
		remove = func() {
			for range 1000 {
				if unix.Rmdir(dir) != unix.EBUSY {
					return
				}
				time.Sleep(time.Millisecond)
			}
		}
		if err = os.WriteFile(dir+"/pids.max", []byte(fmt.Sprint(max)), 0); err == nil {
			return dir, remove, nil
		}
		remove()
	}
	return "", nil, err
}

// within starts the command in a cgroup.
func within(cmd *exec.Cmd, dir string) {
	cmd.Args = append([]string{"sh", "-c", `echo 0 >"$0/cgroup.procs" && exec "$@"`, dir, cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
}
