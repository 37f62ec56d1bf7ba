// Command bench measures sbxrun against the same thing done without it, side by
// side in one run, and prints the ratios with the raw figures. Machines differ
// and are noisy, so only the ratios can be compared, and nothing here passes or
// fails.
//
//	go run ./tests/bench [-sbxrun bin/sbxrun] [-runs 200] [-trees 1,10,100,1000,5000]
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/proc"
)

var (
	binary = flag.String("sbxrun", "bin/sbxrun", "the program to measure")
	runs   = flag.Int("runs", 200, "pairs of runs of the start-up comparison, and runs of the deadline")
	trees  = flag.String("trees", "1,10,100,1000,5000", "sizes of the trees to be ended")
	only   = flag.String("only", "start,deadline,trees,memory,exec,many,limits,hogs,budget", "which parts to run")
)

func main() {
	flag.Parse()
	if err := bench(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench() error {
	path, err := filepath.Abs(*binary)
	if err != nil {
		return err
	}
	*binary = path
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err
	}
	fmt.Printf("Linux %s, %d CPUs, uid %d\n\n", unix.ByteSliceToString(uts.Release[:]), runtime.NumCPU(), os.Getuid())
	for _, part := range []struct {
		name string
		run  func() error
	}{{"start", start}, {"deadline", deadline}, {"trees", teardowns}, {"memory", memory}, {"exec", execs}, {"many", many}, {"limits", limitsCost}, {"hogs", hogs}, {"budget", budget}} {
		if strings.Contains(*only, part.name) {
			if err := part.run(); err != nil {
				return fmt.Errorf("%s: %w", part.name, err)
			}
		}
	}
	return nil
}

// sample is a series of measurements of the same thing.
type sample []time.Duration

func (s sample) quantile(q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func (s sample) String() string {
	return fmt.Sprintf("median %s  (min %s, 90 %% %s, 99 %% %s, n %d)",
		ms(s.quantile(0.5)), ms(s.quantile(0)), ms(s.quantile(0.9)), ms(s.quantile(0.99)), len(s))
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }

func ratio(a, b sample) float64 { return float64(a.quantile(0.5)) / float64(b.quantile(0.5)) }

// plain is the bwrap command that sbxrun would use, ready to be started without
// it.
func plain(command ...string) (*exec.Cmd, *bwrap.Plan, error) {
	plan, err := bwrap.Prepare(bwrap.Policy{Command: command}, bwrap.Caller{
		Path: os.Getenv("PATH"), Home: os.Getenv("HOME"), UID: os.Geteuid(), GID: os.Getegid()})
	if err != nil {
		return nil, nil, err
	}
	cmd, err := plan.Cmd()
	if err != nil {
		plan.Close()
		return nil, nil, err
	}
	return cmd, plan, nil
}

// start compares `sbxrun true` with the bwrap command it prints, pair by pair.
func start() error {
	var with, without sample
	for i := range *runs + 10 {
		cmd, plan, err := plain("true")
		if err != nil {
			return err
		}
		a, err := elapsed(cmd)
		plan.Close()
		if err != nil {
			return err
		}
		b, err := elapsed(exec.Command(*binary, "true"))
		if err != nil {
			return err
		}
		if i >= 10 { // the first ones warm up
			without, with = append(without, a), append(with, b)
		}
	}
	fmt.Printf("start to finish of `true`\n  sbxrun      %v\n  bwrap alone %v\n  ratio       %.2f\n\n", with, without, ratio(with, without))
	return nil
}

func elapsed(cmd *exec.Cmd) (time.Duration, error) {
	cmd.Stderr = os.Stderr
	begin := time.Now()
	err := cmd.Run()
	return time.Since(begin), err
}

// report is what is needed of --report.
type report struct {
	Cause    string  `json:"cause"`
	Duration float64 `json:"duration_ms"`
	Setup    float64 `json:"setup_ms"`
	Teardown float64 `json:"teardown_ms"`
	Verdict  struct {
		Verdict string `json:"verdict"`
	} `json:"teardown"`
}

// timedOut runs a command to its deadline, which must have been proven.
func timedOut(timeout time.Duration, command ...string) (rep report, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return rep, err
	}
	defer r.Close()
	args := append([]string{"--quiet", "--timeout", timeout.String(), "--proof-timeout", "60", "--report", "fd:3"}, command...)
	cmd := exec.Command(*binary, args...)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{w}, os.Stderr
	err = cmd.Start()
	w.Close()
	if err != nil {
		return rep, err
	}
	text, err := io.ReadAll(r)
	if werr := cmd.Wait(); err == nil && cmd.ProcessState.ExitCode() != 124 {
		err = fmt.Errorf("ended with %v", werr)
	}
	if err == nil {
		err = json.Unmarshal(text, &rep)
	}
	if err == nil && (rep.Cause != "timeout" || rep.Verdict.Verdict != "proven") {
		err = fmt.Errorf("cause %s, verdict %s", rep.Cause, rep.Verdict.Verdict)
	}
	return rep, err
}

func toDuration(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// deadline measures by how much it is missed: from its instant until the
// teardown begins.
func deadline() error {
	const timeout = 30 * time.Millisecond
	var late sample
	for range *runs {
		rep, err := timedOut(timeout, "sleep", "10")
		if err != nil {
			return err
		}
		late = append(late, toDuration(rep.Duration-rep.Setup-rep.Teardown)-timeout)
	}
	fmt.Printf("deadline missed by\n  %v\n\n", late)
	return nil
}

// tree is a shell program with n processes below it, each in a session of its
// own, that says when all are there.
func tree(n int) []string {
	return []string{"sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do setsid sleep 600 & i=$((i+1)); done; echo ready; wait", n)}
}

// rest is how long a tree is left alone before it is killed.
const rest = 200 * time.Millisecond

// teardowns compares the time from the deadline to the proof with a bare pidfd
// kill of the same tree in the same sandbox.
func teardowns() error {
	fmt.Println("from the deadline to the proof, a tree of n processes each in a session of its own")
	for _, field := range strings.Split(*trees, ",") {
		n, err := strconv.Atoi(field)
		if err != nil {
			return err
		}
		pairs := max(3, min(30, 10000/n))
		var with, without sample
		for range pairs {
			took, killed, err := bareKill(n)
			if err != nil {
				return err
			}
			// As long as it takes to start them, and half as much again.
			rep, err := timedOut(took*3/2+rest, tree(n)...)
			if err != nil {
				return err
			}
			with, without = append(with, toDuration(rep.Teardown)), append(without, killed)
		}
		fmt.Printf("  n %d\n    sbxrun     %v\n    pidfd kill %v\n    ratio      %.2f\n", n, with, without, ratio(with, without))
	}
	fmt.Println()
	return nil
}

// bareKill starts the tree under plain bwrap, kills init by a pidfd and waits
// for that to be readable. took is how long the tree needed to be complete.
func bareKill(n int) (took, killed time.Duration, err error) {
	cmd, plan, err := plain(tree(n)...)
	if err != nil {
		return 0, 0, err
	}
	defer plan.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, 0, err
	}
	defer func() { _ = cmd.Wait() }() // bwrap reports the kill, which is ours
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		return 0, 0, fmt.Errorf("the tree said %q: %w", line, err)
	}
	took = time.Since(begin)
	// bwrap's only child.
	children := proc.Children(cmd.Process.Pid, cmd.Process.Pid)
	if len(children) != 1 {
		return 0, 0, fmt.Errorf("bwrap has children %v", children)
	}
	init, err := proc.Open(children[0])
	if err != nil {
		return 0, 0, err
	}
	defer init.Close()
	if err := settled(init.PID, n, "sleep"); err != nil {
		return 0, 0, err
	}
	time.Sleep(rest) // as long as sbxrun waits for its deadline: an idle machine has cold caches
	begin = time.Now()
	if err := init.Signal(unix.SIGKILL); err != nil {
		return 0, 0, err
	}
	fds := []unix.PollFd{{Fd: int32(init.FD()), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, 60000); err != unix.EINTR {
			break
		}
	}
	return took, time.Since(begin), nil
}

// memory shows what a waiting sbxrun costs.
func memory() error {
	cmd := exec.Command(*binary, "sh", "-c", "echo ready; read x; exit 0")
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return err
	}
	fmt.Println("while the command runs")
	pids := []int{cmd.Process.Pid}
	for _, st := range proc.Descendants(cmd.Process.Pid, 3) {
		pids = append(pids, st.PID)
	}
	for i, name := range []string{"sbxrun", "keeper", "bwrap monitor", "bwrap init"} {
		if i == len(pids) {
			break
		}
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pids[i]))
		if err != nil {
			return err
		}
		fmt.Printf("  %-14s %d tasks, RSS %s, PSS %s\n", name, len(tasks), field(pids[i], "status", "VmRSS:"), field(pids[i], "smaps_rollup", "Pss:"))
	}
	in.Close()
	return cmd.Wait()
}

// field is a line of a file of /proc/PID, without its name.
func field(pid int, file, name string) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return "unknown"
	}
	for _, line := range strings.Split(string(data), "\n") {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(rest)
		}
	}
	return "unknown"
}
