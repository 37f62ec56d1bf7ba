package bwrap_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/nsenter"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// bound limits the commands that should end by themselves.
const bound = time.Minute

func sh(script string) *bwrap.Command {
	return &bwrap.Command{Args: []string{"sh", "-c", script}, Timeout: bound, ProofTimeout: bound}
}

// run runs a command and fails the test on an error.
func run(t *testing.T, ctx context.Context, c *bwrap.Command) *bwrap.Result {
	t.Helper()
	res, err := c.Run(ctx)
	check.Must(t, err)
	check.That(t, res.Verdict == result.Proven, "verdict %s", res.Verdict)
	return res
}

// code returns the code of an error, which must be a *[bwrap.Error].
func code(t *testing.T, err error) string {
	t.Helper()
	var e *bwrap.Error
	check.Require(t, errors.As(err, &e), "%v is no *Error", err)
	return e.Code
}

func TestStreams(t *testing.T) {
	var out, both bytes.Buffer
	c := sh("cat; echo to stderr >&2")
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader("in"), &out, &both
	run(t, t.Context(), c)
	check.That(t, out.String() == "in" && both.String() == "to stderr\n", "stdout %q, stderr %q", &out, &both)
	// A single writer for both streams gets the output in order.
	both.Reset()
	c = sh("for i in 1 2 3; do echo $i; echo $i >&2; done")
	c.Stdout, c.Stderr = &both, &both
	run(t, t.Context(), c)
	check.That(t, both.String() == "1\n1\n2\n2\n3\n3\n", "%q", &both)
	// Files are passed directly; nil is /dev/null.
	r, w := harness.Pipe(t)
	c = sh("readlink /proc/self/fd/1; wc -c; readlink /proc/self/fd/2 | grep -o null")
	c.Stdout = w
	run(t, t.Context(), c)
	w.Close()
	text, err := io.ReadAll(r)
	check.That(t, strings.HasPrefix(string(text), "pipe:[") && strings.HasSuffix(string(text), "\n0\nnull\n") && err == nil, "%q, %v", text, err)
}

// A reader that never returns does not block Wait and leaks no descriptor.
func TestStdinUnread(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	use := func() {
		c := sh("exit 5")
		c.Stdin = r
		res := run(t, t.Context(), c)
		check.That(t, res.ExitCode() == 5, "%+v", res)
	}
	use()
	before := held(t)
	for range 5 {
		use()
	}
	before.goroutines += 5 // each waits for the reader
	nothingSince(t, before)
}

// A read error of Stdin is not treated as the end of the input: the command is killed.
func TestStdinFails(t *testing.T) {
	in, fail := io.Pipe()
	out, w := io.Pipe()
	c := sh("cat; sleep 1000")
	c.Stdin, c.Stdout = in, w
	go func() {
		_, _ = fail.Write([]byte("part"))
		_, _ = io.ReadFull(out, make([]byte, 4)) // the command has read this part
		fail.CloseWithError(io.ErrUnexpectedEOF)
	}()
	res, err := c.Run(t.Context())
	check.That(t, code(t, err) == "input" && errors.Is(err, io.ErrUnexpectedEOF) && res != nil && res.Cause == result.Canceled && res.Verdict == result.Proven, "%+v, %v", res, err)
}

// An error of the reader is not mistaken for the error of a pipe to a command that does not read.
func TestStdinClosed(t *testing.T) {
	f, err := os.Open(os.DevNull)
	check.Must(t, err)
	f.Close()
	for _, want := range []error{os.ErrClosed, unix.EPIPE} {
		in := io.MultiReader(strings.NewReader("part"), bufio.NewReader(f))
		if want != os.ErrClosed {
			in = io.MultiReader(strings.NewReader("part"), iotest.ErrReader(want))
		}
		c := sh("cat; sleep 1000")
		c.Stdin, c.Timeout = in, bound
		res, err := c.Run(t.Context())
		check.That(t, err != nil && code(t, err) == "input" && errors.Is(err, want), "%v: %+v, %v", want, res, err)
	}
	// A closed file is an error that names the file.
	for i, c := range []*bwrap.Command{{Stdin: f}, {Stdout: f}, {Stderr: f}, {Stdout: f, MaxOutput: 1}} {
		c.Args = []string{"sh", "-c", "echo x"}
		_, err := c.Run(t.Context())
		check.That(t, errors.Is(err, os.ErrClosed) && strings.Contains(err.Error(), os.DevNull), "%d: %v", i, err)
	}
}

func TestOutput(t *testing.T) {
	var out bytes.Buffer
	c := sh("yes")
	c.Stdout, c.MaxOutput = &out, 10
	res := run(t, t.Context(), c)
	check.That(t, res.Cause == result.OutputLimit && out.String() == "y\ny\ny\ny\ny\n", "%s, %q", res.Cause, &out)
	// A nil *os.File is /dev/null, also with MaxOutput.
	c = sh("echo x; exit 5")
	c.Stdout, c.MaxOutput = (*os.File)(nil), 10
	res = run(t, t.Context(), c)
	check.That(t, res.ExitCode() == 5, "%+v", res)
	// A single writer for both streams has one limit, and gets no empty writes.
	out.Reset()
	c = sh("printf 123456; printf 7890 >&2; sleep 0.1; yes")
	c.Stdout, c.MaxOutput = notEmpty{t, &out}, 8
	c.Stderr = c.Stdout
	res = run(t, t.Context(), c)
	check.That(t, res.Cause == result.OutputLimit && out.String() == "12345678", "%s, %q", res.Cause, &out)
	// A writer that fails, or that writes less without an error, ends the command.
	for _, w := range []io.Writer{failing{}, takesLess{}} {
		c = sh("yes")
		c.Stdout, c.Timeout = w, bound
		res, err := c.Run(t.Context())
		check.That(t, code(t, err) == "output" && errors.Is(err, io.ErrShortWrite) && res != nil && res.Verdict == result.Proven, "%T: %+v, %v", w, res, err)
	}
}

type takesLess struct{}

func (takesLess) Write(b []byte) (int, error) { return len(b) - 1, nil }

type notEmpty struct {
	t *testing.T
	io.Writer
}

func (w notEmpty) Write(b []byte) (int, error) {
	check.That(w.t, len(b) != 0, "an empty piece")
	return w.Writer.Write(b)
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := sh("sleep 1000")
	check.Must(t, c.Start(late{ctx}))
	cancel()
	res, err := c.Wait()
	check.That(t, err == nil && res.Cause == result.Timeout, "its deadline: %+v, %v", res, err)
	ctx, cancel = context.WithCancel(t.Context())
	r, w := io.Pipe()
	c = sh("trap 'echo told; exit 3' TERM; echo up; while :; do sleep 0.01; done")
	c.Stdout, c.Grace = w, bound
	check.Must(t, c.Start(ctx))
	go func() {
		_, _ = r.Read(make([]byte, 3)) // it is up
		cancel()
		_, _ = io.Copy(io.Discard, r)
	}()
	res, err = c.Wait()
	check.That(t, err == nil && res.Cause == result.Canceled && res.Payload != nil && res.Payload.ExitCode == 3, "cancelled: %+v, %v", res, err)
	cancel()
	_, err = sh("true").Run(ctx)
	check.That(t, code(t, err) == "ended" && errors.Is(err, context.Canceled), "cancelled before: %v", err)
}

// The deadline of a context acts like Timeout: with a grace period, resource usage, and the same cause, whether or not
// the command has a timeout and however it ends.
func TestContextDeadline(t *testing.T) {
	const work = "n=0; while [ $n -lt 60000 ]; do n=$((n+1)); done; echo up; "
	for _, timeout := range []time.Duration{0, time.Hour} {
		// overdue runs a command whose context reaches its deadline when the command has printed "up".
		overdue := func(script string, grace time.Duration) *result.Result {
			ctx, cancel := context.WithCancel(t.Context())
			r, w := io.Pipe()
			c := sh(script)
			c.Stdout, c.Grace, c.Timeout = w, grace, timeout
			check.Must(t, c.Start(late{ctx}))
			go func() {
				_, _ = r.Read(make([]byte, 3))
				cancel()
				_, _ = io.Copy(io.Discard, r)
			}()
			res, err := c.Wait()
			check.That(t, err == nil && res.Cause == result.Timeout, "timeout %v: %+v, %v", timeout, res, err)
			return res
		}
		res := overdue("trap 'sleep 0.1; exit 7' TERM; "+work+"while :; do sleep 0.01; done", bound)
		check.That(t, res.Payload != nil && res.Payload.ExitCode == 7, "timeout %v: no grace period: %+v", timeout, res)
		res = overdue(work+"sleep 1000", 0)
		check.That(t, res.CPUUser+res.CPUSystem >= 5*time.Millisecond, "timeout %v: the time it has used: %+v", timeout, res)
	}
}

// The largest durations mean no limit and do not overflow.
func TestLongestTimes(t *testing.T) {
	for _, timeout := range []time.Duration{bound, math.MaxInt64} {
		c := sh("sleep 1; exit 3")
		c.Timeout, c.Grace, c.ProofTimeout = timeout, math.MaxInt64, math.MaxInt64
		res := run(t, t.Context(), c)
		check.That(t, res.Cause == result.Exited && res.ExitCode() == 3, "timeout %v: %+v", timeout, res)
	}
}

// The timeout includes a slow execve(2), here because of a lease on the file (fcntl(2)).
func TestDeadlineOfExecve(t *testing.T) {
	name := filepath.Join(t.TempDir(), "program")
	check.Must(t, os.WriteFile(name, []byte("#!/bin/sh\n"), 0o755))
	f, err := os.Open(name)
	check.Must(t, err)
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	check.Must(t, err)
	c := &bwrap.Command{Args: []string{"/program"}, Timeout: 100 * time.Millisecond, Grace: bound, ProofTimeout: bound}
	c.Policy.Mounts = append(c.Policy.Mounts, bwrap.Mount{Source: name, Dest: "/program"})
	begin := time.Now()
	check.Must(t, c.Start(t.Context()))
	res, err := c.Wait()
	check.That(t, err == nil && res.Cause == result.Timeout && time.Since(begin) <= bound, "%v: %+v, %v", time.Since(begin), res, err)
}

// late is a context whose deadline passes when it is cancelled.
type late struct{ context.Context }

func (c late) Err() error {
	if c.Context.Err() != nil {
		return context.DeadlineExceeded
	}
	return nil
}

// Deadline, context and limits apply before Wait is called, for example while the caller reads.
func TestEndsWithoutWait(t *testing.T) {
	for _, want := range []result.Cause{result.Canceled, result.OutputLimit, result.Timeout} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c := sh("echo up; exec sleep 1000")
		switch want {
		case result.OutputLimit:
			c.Stdout, c.MaxOutput = io.Discard, 2
		case result.Timeout:
			c.Timeout = 100 * time.Millisecond
		}
		check.Must(t, c.Start(ctx))
		if want == result.Canceled {
			cancel()
		}
		harness.Until(t, bound/2, string(want)+" to end it", func() bool { return c.Signal(unix.SIGCONT) != nil })
		for range 2 { // the second call returns the same
			res, err := c.Wait()
			check.That(t, err == nil && res.Cause == want && res.Verdict == result.Proven, "%s: %+v, %v", want, res, err)
		}
	}
}

func TestSignal(t *testing.T) {
	c := sh("sleep 1000 & wait")
	check.Must(t, c.Start(t.Context()))
	for _, sig := range []syscall.Signal{-1, 65} {
		err := c.Signal(sig)
		check.That(t, errors.Is(err, unix.EINVAL), "a signal that there is not, %d: %v", sig, err)
	}
	check.OK(t, c.Signal(unix.SIGUSR1))
	res, err := c.Wait()
	check.That(t, err == nil && res.Cause == result.Signaled && res.Payload.Signal == unix.SIGUSR1, "%+v, %v", res, err)
	err = c.Signal(unix.SIGUSR1)
	check.That(t, err != nil && err.Error() == "no such process", "it has ended: %v", err)
}

// Invalid fields are errors before anything runs.
func TestRefused(t *testing.T) {
	for want, c := range map[string]*bwrap.Command{
		"usage":          {},
		"usage ":         {Args: []string{"true"}, Policy: bwrap.Policy{Network: "some"}},
		"usage  ":        {Args: []string{"true"}, Policy: bwrap.Policy{Env: []string{"HOME"}}},
		"usage   ":       {Args: []string{"true"}, Policy: bwrap.Policy{Dir: "here"}},
		"usage    ":      {Args: []string{"true"}, Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Source: "relative"}}}},
		"usage     ":     {Args: []string{"true"}, Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Dest: "/x", Writable: true}}}},
		"usage      ":    {Args: []string{"true"}, Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Dest: "/proc"}}}},
		"usage       ":   {Args: []string{"true"}, Policy: bwrap.Policy{User: &bwrap.User{UID: 1<<32 - 1, GID: 1<<32 - 1}}},
		"limit":          {Args: []string{"true"}, Limits: bwrap.Limits{Pids: 1}},
		"not-found":      {Args: []string{"no-such-program"}},
		"not-executable": {Args: []string{"/etc/passwd"}},
	} {
		res, err := c.Run(t.Context())
		got := code(t, err)
		check.That(t, got == strings.TrimSpace(want) && res == nil, "%+v: %s: %v", c.Args, got, err)
	}
	// Unlike zero, a negative value, such as the time until a past deadline, does not mean "no limit".
	for _, c := range []*bwrap.Command{
		{Timeout: -1}, {Grace: -1}, {ProofTimeout: -1}, {MaxOutput: -1}, {Policy: bwrap.Policy{TmpSize: -1}}, {Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Dest: "/x", Size: -1}}}},
	} {
		c.Args = []string{"true"}
		res, err := c.Run(t.Context())
		check.That(t, err != nil && code(t, err) == "usage", "%+v: %+v, %v", c, res, err)
	}
	for _, r := range []*bwrap.Room{{Timeout: -1}, {ProofTimeout: -1}} {
		if err := r.Start(t.Context()); err == nil || code(t, err) != "usage" {
			t.Errorf("%+v: %v", r, err)
			_, _ = r.Close()
		}
	}
	c, room := sh("true"), &bwrap.Room{}
	_, before := c.Wait()
	_, closed := room.Close()
	_, entered := room.Command("true").Run(t.Context())
	run(t, t.Context(), c)
	check.That(t, strings.Contains(entered.Error(), "not started"), "in a room that was not started: %v", entered)
	for i, err := range []error{before, closed, entered, room.Signal(unix.SIGTERM), c.Start(t.Context())} {
		got := code(t, err)
		check.That(t, got == "usage" || got == "enter", "%d: %s: %v", i, got, err)
	}
}

// A sandbox gets no variable, descriptor or directory of this process.
func TestNothingOfOurs(t *testing.T) {
	t.Setenv("SECRET", "x")
	f := harness.Null(t)
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0)
	check.Must(t, err) // as in a careless program
	var out bytes.Buffer
	c := sh("env; ls /proc/self/fd; pwd; ls -A")
	c.Stdout = &out
	run(t, t.Context(), c)
	text := out.String()
	check.That(t, !strings.Contains(text, "SECRET") && strings.HasSuffix(text, "\n0\n1\n2\n3\n/home/sandbox\n"), "%s", text) // 3 is ls's own descriptor
}

func TestRoom(t *testing.T) {
	room := &bwrap.Room{Policy: bwrap.Policy{Env: []string{"OF=room"}, Dir: "/tmp"}, ProofTimeout: bound}
	check.Must(t, room.Start(t.Context()))
	defer room.Close()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			var out bytes.Buffer
			c := room.Command("sh", "-c", "echo $OF $MINE; pwd; ls -d /proc/[0-9]* | wc -l; exit "+string(rune('0'+i)))
			c.Env, c.Stdout, c.Timeout, c.ProofTimeout = []string{"MINE=" + string(rune('a'+i))}, &out, bound, bound
			res, err := c.Run(t.Context())
			check.That(t, err == nil && res.ExitCode() == i && res.Verdict == result.Proven, "%d: %+v, %v", i, res, err)
			// Its init, sh, ls and wc: no process of the others, and no PID 1 of the room.
			text := out.String()
			check.That(t, strings.HasPrefix(text, "room "+string(rune('a'+i))+"\n/tmp\n") && strings.Fields(text)[3] <= "4", "%d: %q", i, text)
		})
	}
	all.Wait()
	way := room.Way()
	way.User, way.Group = 1<<32-1, 1<<32-1 // means "unchanged" (setresuid(2))
	_, err := (&nsenter.Command{Room: &way, Args: []string{"true"}}).Run(t.Context())
	check.That(t, err != nil && code(t, err) == "usage", "as no user: %v", err)
	_, err = room.Close()
	check.That(t, err == nil, "%v", err)
	_, err = room.Command("true").Run(t.Context())
	check.That(t, code(t, err) == "ended", "in a room that has ended: %v", err)
}

// A room ends with its context and at its timeout, without Close.
func TestRoomEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, room := range []*bwrap.Room{{ProofTimeout: bound}, {Timeout: 300 * time.Millisecond, ProofTimeout: bound}} {
		check.Must(t, room.Start(ctx))
		if room.Timeout == 0 {
			cancel()
			ctx = t.Context()
		}
		select {
		case <-room.Ended():
		case <-time.After(bound):
			t.Fatal("it did not end")
		}
		want := result.Canceled
		if room.Timeout > 0 {
			want = result.Timeout
		}
		res, err := room.Close()
		check.That(t, err == nil && res.Cause == want && res.Verdict == result.Proven, "%+v, %v; want %s", res, err, want)
	}
}

// A process that is not the PID 1 of a room is not entered.
func TestNoRoom(t *testing.T) {
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	check.Must(t, err)
	pidfd := os.NewFile(uintptr(self), "pidfd")
	defer pidfd.Close()
	null := harness.Null(t)
	for _, f := range []*os.File{pidfd, null, nil} {
		c := &nsenter.Command{Room: &nsenter.Room{Init: f, Filter: "default"}, Args: []string{"true"}}
		if _, err := c.Run(t.Context()); err == nil {
			t.Errorf("%v was entered", f)
		} else {
			code(t, err)
		}
	}
}

// Commands leave nothing in this process: no child, descriptor or goroutine.
func TestNothingIsLeft(t *testing.T) {
	use := func() {
		run(t, t.Context(), &bwrap.Command{Args: []string{"true"}, Stdin: strings.NewReader("x"), Stdout: io.Discard, ProofTimeout: bound})
		room := &bwrap.Room{ProofTimeout: bound}
		check.Must(t, room.Start(t.Context()))
		c := room.Command("true")
		c.ProofTimeout = bound
		_, err := c.Run(t.Context())
		check.That(t, err == nil, "%v", err)
		_, err = room.Close()
		check.That(t, err == nil, "%v", err)
		_, err = (&bwrap.Command{Args: []string{"no-such-program"}, Stdout: io.Discard}).Run(t.Context())
		check.That(t, err != nil, "no error")
	}
	use()
	before := held(t)
	for range 10 {
		use()
	}
	nothingSince(t, before)
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}

// Nothing is started if /proc shows another PID namespace, because its PIDs belong to other processes.
func TestForeignProc(t *testing.T) {
	const inside = "SBXRUN_TEST_FOREIGN_PROC"
	if os.Getenv(inside) != "" {
		_, err := sh("true").Run(t.Context())
		check.Equal(t, code(t, err), "proc", "a command: %v", err)
		check.Equal(t, code(t, (&bwrap.Room{}).Start(t.Context())), "proc", "a room")
		return
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", "^TestForeignProc$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(out), "--- PASS: TestForeignProc"), "%v: %s", err, out)
}
