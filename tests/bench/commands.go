package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// plain returns the bwrap command for sbxrun's policy without flags, to be started without sbxrun.
func plain(command ...string) (*exec.Cmd, *room.Plan) {
	plan := got(room.Prepare(room.Policy{Command: command}, room.Caller{
		Path: os.Getenv("PATH"), Home: os.Getenv("HOME"), UID: os.Geteuid(), GID: os.Getegid()}))
	p := plan.Plain()
	if len(p.Staged) > 0 {
		plan.Close()
		fail("a plan with sources that only root can reach has no plain command")
	}
	if p.Filter != nil {
		p.Options = append(p.Options, "--seccomp", strconv.Itoa(room.FirstCopy+len(p.Copies)))
		p.Copies = append(p.Copies, room.Copy{Data: p.Filter})
	}
	cmd := exec.CommandContext(ctx, plan.Program.Path, append(append(p.Options, "--"), command...)...)
	cmd.Env, cmd.Stderr, cmd.ExtraFiles = []string{}, os.Stderr, make([]*os.File, room.FirstCopy-3)
	for _, c := range p.Copies {
		cmd.ExtraFiles = append(cmd.ExtraFiles, got(helper.TextFile("copy", string(c.Data))))
	}
	if cred := plan.Cred(); cred != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: cred.UID, Gid: cred.GID}}
	}
	return cmd, plan
}

// inPlain measures such a command.
func inPlain(measure func(*exec.Cmd) time.Duration, command ...string) time.Duration {
	cmd, plan := plain(command...)
	defer plan.Close()
	return measure(cmd)
}

// elapsed returns the time from the start of a process to its exit.
func elapsed(cmd *exec.Cmd) time.Duration {
	if cmd.Stderr == nil {
		cmd.Stderr = os.Stderr
	}
	begin := time.Now()
	must(cmd.Run())
	return time.Since(begin)
}

// told returns the time that a process has measured itself.
func told(cmd *exec.Cmd) time.Duration {
	cmd.Stderr = os.Stderr
	return got(time.ParseDuration(strings.TrimSpace(string(got(cmd.Output())))))
}

func startup(builds []*build) {
	var variants []variant
	for _, b := range builds {
		variants = append(variants, variant{b.letter, b.name, func() time.Duration { return elapsed(b.command("true")) }})
	}
	variants = append(variants,
		variant{"C", "bwrap alone", func() time.Duration { return inPlain(elapsed, "true") }},
		variant{"D", "a Go program around it", func() time.Duration { return inPlain(elapsedAround, "true") }})
	compare("startup", "sbxrun true, from start to exit; C is the same sandbox, D the smallest Go program that starts it and waits", rounds(100), 5, variants)
}

// elapsedAround is elapsed for the smallest Go program that runs a command.
func elapsedAround(cmd *exec.Cmd) time.Duration {
	program := filepath.Join(filepath.Dir(self), "around")
	if _, err := os.Stat(program); err != nil {
		fail("./setup.sh bench builds it: %w", err)
	}
	a := exec.CommandContext(ctx, program, slices.Concat([]string{strconv.Itoa(3 + len(cmd.ExtraFiles)), cmd.Path}, cmd.Args)...)
	a.Env, a.ExtraFiles, a.SysProcAttr, a.Stderr = cmd.Env, cmd.ExtraFiles, cmd.SysProcAttr, cmd.Stderr
	return elapsed(a)
}

func execs(builds []*build) {
	var variants []variant
	var before []weight
	for _, b := range builds {
		b.start(1)
		defer b.end()
		before = append(before, weigh(b.supervisors))
		variants = append(variants, variant{b.letter, b.name, func() time.Duration { return elapsed(b.command("exec", sandboxName(0), "true")) }})
	}
	variants = append(variants, variant{"C", "bwrap, a new sandbox", func() time.Duration {
		return elapsed(exec.CommandContext(ctx, "bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"))
	}}, variant{"D", "a Go program around nsenter", func() time.Duration {
		room := roomBelow(builds[0].supervisors[0])
		enter := got(exec.LookPath("nsenter"))
		return elapsedAround(exec.CommandContext(ctx, enter, "--target", strconv.Itoa(room), "--user", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--preserve-credentials", "true"))
	}})
	what := "sbxrun exec SANDBOX true, from start to exit; C is bwrap --unshare-all --ro-bind / / true, D the smallest Go program that has nsenter run true in the sandbox: no init and no proof, but one program more to load"
	compare("exec", what, rounds(100), 5, variants)
	for i, b := range builds {
		fmt.Printf("  %s  the sandbox before: %v\n     and after:          %v\n", b.letter, before[i], weigh(b.supervisors))
		for _, args := range [][]string{{"exec", sandboxName(0)}, nil} {
			fmt.Printf("     what sbxrun %s takes while its command waits, the command apart: %v\n", strings.Join(append(args, "COMMAND"), " "), b.weighRunning(args...))
		}
	}
	fmt.Println()
}

// roomBelow returns PID 1 of a supervisor's sandbox.
func roomBelow(supervisor int) int {
	for _, p := range proc.Descendants(supervisor, 10) {
		if p.Comm == "sbxrun-room" {
			return p.PID
		}
	}
	fail("the sandbox has no PID 1")
	return 0
}

// weighRunning weighs an sbxrun and its descendants while its command waits, without the command.
func (b *build) weighRunning(args ...string) weight {
	cmd := b.command(append(args, "sh", "-c", "echo ready; read x; exit 0")...)
	cmd.Stderr = os.Stderr
	in, out := piped(cmd)
	got(out.ReadString('\n'))
	time.Sleep(rest) // sbxrun has released what only the start needs
	w := weigh([]int{cmd.Process.Pid}, "sh")
	in.Close()
	must(cmd.Wait())
	return w
}

// piped starts a command with pipes for stdin and stdout.
func piped(cmd *exec.Cmd) (in io.WriteCloser, out *bufio.Reader) {
	in, out = got(cmd.StdinPipe()), bufio.NewReader(got(cmd.StdoutPipe()))
	must(cmd.Start())
	return in, out
}

// rest is how long a tree is idle before it is ended, because processes that were just started are
// still in the CPU's caches.
const rest = 200 * time.Millisecond

// tree returns a shell program with n child processes, which prints a line when all exist.
func tree(n int) []string {
	return []string{"sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do sleep 600 & i=$((i+1)); done; echo ready; wait", n)}
}

func teardown(builds []*build) {
	for _, field := range strings.Split(*trees, ",") {
		n := got(strconv.Atoi(field))
		var variants []variant
		for _, b := range builds {
			timeout := rest + 200*time.Millisecond + time.Duration(n)*time.Millisecond
			variants = append(variants, variant{b.letter, b.name, func() time.Duration { return b.endTree(n, &timeout) }})
		}
		variants = append(variants,
			variant{"C", "kill of init by pidfd", func() time.Duration { return killTree(n) }},
			variant{"D", "a Go program around that", func() time.Duration { return holdTree(n) }})
		pairs := 10
		if n > 1000 {
			pairs = 5
		}
		what := fmt.Sprintf("a tree of %d, from the deadline to the exit of sbxrun; C is a pidfd kill of bwrap's PID 1 until its end, D the exit of a Go program that does this and reaps bwrap", n)
		compare(fmt.Sprintf("teardown %d", n), what, rounds(pairs), 1, variants)
	}
}

// complete waits until a tree is complete.
func complete(root, n int, out *bufio.Reader, until time.Time) {
	if line := got(out.ReadString('\n')); line != "ready\n" {
		fail("the tree said %q", line)
	}
	settled(root, n, until)
}

// settled waits until n processes below root execute sleep.
func settled(root, n int, until time.Time) {
	must(measure.Until(ctx, fmt.Sprintf("%d processes", n), until, func() bool { return countBelow(root, "sleep") == n }))
}

// endTree returns the time from a tree's deadline to sbxrun's exit. If the tree was not complete
// and idle by then, it tries again with a longer timeout.
//
// The deadline counts from the command's release, which is not visible from outside. sbxrun
// reports when it started (started_at, in whole milliseconds, so half of one is added) and how
// long after that it released the command (setup_ms). That is exact to half a millisecond, and
// unbiased.
func (b *build) endTree(n int, timeout *time.Duration) time.Duration {
	for range 8 {
		took, left := b.runTree(n, *timeout)
		must(ctx.Err())
		if left >= rest {
			*timeout -= max(0, left-2*rest)
			return took
		}
		*timeout += *timeout/2 + rest
	}
	fail("a tree of %d was not complete in %v", n, *timeout)
	return 0
}

// runTree also returns for how long the tree was complete at the deadline; negative if it was not.
func (b *build) runTree(n int, timeout time.Duration) (took, left time.Duration) {
	cmd := b.command(append([]string{"--quiet", "--timeout", timeout.String(), "--proof-timeout", "60", "--report", "fd:3"}, tree(n)...)...)
	cmd.Stderr = os.Stderr
	out := got(cmd.StdoutPipe())
	var begin, there, end time.Time
	var treeErr, waitErr error
	var rep struct {
		Cause     string    `json:"cause"`
		StartedAt time.Time `json:"started_at"`
		Setup     float64   `json:"setup_ms"`
		Verdict   struct {
			Verdict string `json:"verdict"`
		} `json:"teardown"`
	}
	withReport(cmd, &rep, func() {
		begin = time.Now()
		treeErr = caught(func() { complete(cmd.Process.Pid, n, bufio.NewReader(out), begin.Add(timeout)) })
		there = time.Now()
		waitErr = cmd.Wait()
		end = time.Now()
	})
	if rep.Cause != "timeout" || rep.Verdict.Verdict != "proven" || cmd.ProcessState.ExitCode() != 124 {
		fail("cause %s, verdict %s, %v", rep.Cause, rep.Verdict.Verdict, waitErr)
	}
	// Use the wall clock until the Go runtime reaches main, and the monotonic clock from there.
	toMain := rep.StartedAt.Sub(begin) + time.Millisecond/2
	deadline := begin.Add(toMain + time.Duration(rep.Setup*float64(time.Millisecond)) + timeout)
	if treeErr != nil {
		return 0, -1
	}
	return end.Sub(deadline), deadline.Sub(there)
}

// killTree returns the time from a kill of PID 1 of the same tree in plain bwrap until its pidfd
// is readable, when the kernel has ended and reaped all other processes.
func killTree(n int) time.Duration {
	return inPlain(func(cmd *exec.Cmd) time.Duration {
		_, out := piped(cmd)
		defer reap(cmd)
		complete(cmd.Process.Pid, n, out, time.Now().Add(time.Minute))
		init := initOf(cmd)
		defer init.Close()
		time.Sleep(rest)
		return kill([]*proc.Process{init})
	}, tree(n)...)
}

// initOf opens PID 1 of a plain bwrap's sandbox: its only child.
func initOf(cmd *exec.Cmd) *proc.Process {
	children := proc.Descendants(cmd.Process.Pid, 1)
	if len(children) != 1 {
		fail("bwrap has no child")
	}
	return got(proc.Open(children[0].PID))
}

// reap ends a plain bwrap, and with it its sandbox (--die-with-parent).
func reap(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // fails only if it has exited
	_ = cmd.Wait()         // it was killed
}

// kill kills by pidfds, and waits until all are readable.
func kill(list []*proc.Process) time.Duration {
	begin := time.Now()
	for _, p := range list {
		must(p.Signal(unix.SIGKILL))
	}
	for _, p := range list {
		fds := []unix.PollFd{{Fd: int32(p.FD()), Events: unix.POLLIN}}
		for {
			n, err := unix.Poll(fds, 60000)
			if err == nil && n == 1 {
				break
			}
			if err != unix.EINTR {
				fail("a PID 1 that was killed has not ended: %v", err)
			}
		}
	}
	return time.Since(begin)
}
