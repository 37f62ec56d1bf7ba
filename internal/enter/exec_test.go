package enter_test

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// idle starts a room without a command.
func idle(t *testing.T) *room.Room {
	t.Helper()
	plan, err := room.Prepare(room.Policy{Workdir: "/tmp"}, room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	defer plan.Close()
	null := harness.Null(t)
	sb, err := plan.Start(t.Context(), [3]*os.File{null, null, os.Stderr}, nil, false)
	check.Must(t, err)
	t.Cleanup(func() { end(t, sb) })
	return sb
}

// unharmed checks that the sandbox is running and that no other processes are left in it.
func unharmed(t *testing.T, sb *room.Room) {
	t.Helper()
	check.That(t, !sb.Room.Exited(), "the sandbox has ended")
	left := proc.Members(10, sb.RoomNS)
	check.That(t, len(left) == 1, "in the sandbox: %+v", left)
	left = children(t, sb.Keeper.PID)
	check.That(t, left == nil, "left behind: %+v", left)
}

func entry(sb *room.Room, command ...string) *enter.Entry {
	return &enter.Entry{Cred: sb.Cred, HostNet: sb.HostNet, Command: command, Path: "/usr/bin:/bin", Env: []string{"PATH=/usr/bin:/bin", "PWD=/tmp"}, Workdir: "/tmp", Filter: seccomp.Off}
}

func shell(sb *room.Room, script string) *enter.Entry { return entry(sb, "sh", "-c", script) }

// streams are a payload's stdin, stdout and stderr, and its output, which is complete when all processes with its stdout
// have exited.
type streams struct {
	stdio [3]*os.File
	w     *os.File
	text  chan string
}

func open(t *testing.T) *streams {
	t.Helper()
	r, w := harness.Pipe(t)
	s := &streams{stdio: [3]*os.File{harness.Null(t), w, os.Stderr}, w: w, text: make(chan string, 1)}
	go func() {
		b, _ := io.ReadAll(r) // after an error, compare what was read
		s.text <- string(b)
	}()
	return s
}

// run runs an entry to its end and checks the proof.
func run(t *testing.T, sb *room.Room, e *enter.Entry, o supervise.Options) (string, result.Result) {
	t.Helper()
	return runHeld(t, sb, e, o, func(*proc.Kept) {})
}

// runHeld calls held before the release.
func runHeld(t *testing.T, sb *room.Room, e *enter.Entry, o supervise.Options, held func(*proc.Kept)) (string, result.Result) {
	t.Helper()
	s := open(t)
	room, err := proc.Open(sb.Room.PID) // a separate pidfd: one wait at a time
	check.Must(t, err)
	defer room.Close()
	o.ProofTimeout, o.Stdout, o.Stderr = harness.Bound, s.stdio[1], s.stdio[2]
	c := supervise.Command{Options: o, Place: supervise.Place{Entry: e, Room: room}, Held: func(_ context.Context, c *supervise.Command) error {
		held(c.Kept())
		return nil
	}}
	res := *c.Run(t.Context())
	s.w.Close()
	check.That(t, res.Verdict == result.Proven, "%q: verdict %s: %v", e.Command, res.Verdict, res.Err)
	return <-s.text, res
}

func TestExecEnd(t *testing.T) {
	sb := idle(t)
	for _, tt := range []struct {
		script string
		want   string
		code   int
		cause  result.Cause
		strays int
	}{
		{"echo hello", "hello\n", 0, result.Exited, 0},
		{"exit 42", "", 42, result.Exited, 0},
		{"kill -9 $$", "", 137, result.Signaled, 0},
		{"exit 137", "", 137, result.Exited, 0},
		{"sleep 100 & setsid sleep 100 & echo done", "done\n", 0, result.Exited, 2},
		{"echo $$ $PPID; set -- /proc/[0-9]*; echo $#", "2 1\n2\n", 0, result.Exited, 0}, // init and sh
		{"ls /proc/self/fd | wc -l", "4\n", 0, result.Exited, 0},                         // 0, 1, 2 and the directory
		{"grep -E '^(Cap|NoNew)' /proc/self/status | cut -f2 | sort -u", "0000000000000000\n1\n", 0, result.Exited, 0},
		{"umount /proc 2>/dev/null || echo refused", "refused\n", 0, result.Exited, 0},
		{"tr -d '\\0' </proc/1/cmdline; cat /proc/1/environ 2>/dev/null || echo hidden", "hidden\n", 0, result.Exited, 0},
	} {
		text, res := run(t, sb, shell(sb, tt.script), supervise.Options{})
		check.That(t, text == tt.want && res.ExitCode() == tt.code && res.Cause == tt.cause && res.Strays == tt.strays, "%q: %q, %+v, payload %+v", tt.script, text, res, res.Payload)
	}
	unharmed(t, sb)
}

// A command gets its arguments and environment unchanged, including empty ones and invalid UTF-8.
func TestExecVerbatim(t *testing.T) {
	sb := idle(t)
	e := entry(sb, "sh", "-c", `printf '%s|' "$@" "$V" "$PWD" "${NOTHING-unset}"`, "sh", "", "a b", "\xff\n", "$HOME")
	e.Env = append(e.Env, "V=\xfe=\n", "NOTHING=")
	text, _ := run(t, sb, e, supervise.Options{})
	check.That(t, text == "|a b|\xff\n|$HOME|\xfe=\n|/tmp||", "%q", text)
	unharmed(t, sb)
}

// Commands are found as by execvp(3).
func TestExecFinds(t *testing.T) {
	sb := idle(t)
	prepare := `mkdir -p /tmp/a /tmp/b; echo 'echo "script $0 $1"' >/tmp/b/tool; chmod +x /tmp/b/tool; cp /tmp/b/tool /tmp/here; ln -s b /tmp/link; echo x >/tmp/a/tool; echo x >/tmp/a/data; ln -s loop /tmp/a/loop`
	_, res := run(t, sb, shell(sb, prepare), supervise.Options{})
	check.Require(t, res.ExitCode() == 0, "%+v", res)
	for _, tt := range []struct {
		path, command, want, code string
		exit                      int
	}{
		{"/tmp/a:/tmp/b:/bin", "tool", "script /tmp/b/tool arg\n", "", 0}, // the first is not executable, the second has no interpreter line
		{"/tmp/a:/nonexistent", "data", "", "not-executable", 126},
		{"/tmp/a", "nosuch", "", "not-found", 127},
		{"/tmp/a", "/tmp/b", "", "not-executable", 126},
		{"/tmp/a", "", "", "not-found", 127},
		// Relative to the working directory.
		{":/bin", "b/tool", "script b/tool arg\n", "", 0},
		{"/bin:b", "tool", "script b/tool arg\n", "", 0},
		{"/bin:link/../b", "tool", "script link/../b/tool arg\n", "", 0},
		{"/bin:", "here", "script ./here arg\n", "", 0},
		{":/bin", "here", "script ./here arg\n", "", 0},
		{".", "here", "script ./here arg\n", "", 0},
		{"/tmp/a", "/tmp/b/tool/x", "", "not-found", 127},
		{"/tmp/a", "loop", "", "not-executable", 126},
	} {
		e := entry(sb, tt.command, "arg")
		e.Path = tt.path
		text, res := run(t, sb, e, supervise.Options{})
		code := ""
		if res.Err != nil {
			code = res.Err.Code
		}
		check.That(t, text == tt.want && res.ExitCode() == tt.exit && code == tt.code && res.Started == (tt.exit == 0),
			"%q in %q: %q, exit %d, %q, started %v", tt.command, tt.path, text, res.ExitCode(), code, res.Started)
	}
	e := entry(sb, "true")
	e.Workdir = "/nonexistent"
	_, res = run(t, sb, e, supervise.Options{})
	check.That(t, res.ExitCode() == 125 && !res.Started && res.Err != nil && res.Err.Code == "workdir", "missing working directory: %+v %v", res, res.Err)
	unharmed(t, sb)
}

// held starts a shell that waits for its release, and returns its output, too.
func held(t *testing.T, sb *room.Room, script string) (*enter.Exec, <-chan string) {
	t.Helper()
	s := open(t)
	x, err := shell(sb, script).Start(t.Context(), sb.Room, s.stdio, nil)
	check.Must(t, err)
	s.w.Close()
	return x, s.text
}

// payloadOf waits for the payload, because init reports before it forks.
func payloadOf(t *testing.T, x *enter.Exec) (payload *proc.Process) {
	t.Helper()
	harness.Until(t, harness.Bound, "the payload", func() bool {
		var err error
		payload, err = x.Payload()
		return err == nil
	})
	return payload
}

// An exec that is given up before its release does not begin, even if its keeper and its init are stopped
// and cannot end it.
func TestExecGivenUp(t *testing.T) {
	sb := idle(t)
	x, output := held(t, sb, "echo ran")
	init, err := x.Init.Dup()
	check.Must(t, err)
	defer init.Close()
	signal := func(sig unix.Signal) {
		for _, p := range []*proc.Process{init, &x.Keeper.Process} { // the keeper reaps init
			check.Must(t, p.Signal(sig))
		}
	}
	payload := payloadOf(t, x)
	defer payload.Close()
	signal(unix.SIGSTOP)
	x.Close()
	check.OK(t, payload.Wait(soon()), "it has not ended")
	signal(unix.SIGCONT)
	check.OK(t, x.Kept.Collect(soon()))
	text := <-output
	check.That(t, text == "", "it ran: %q", text)
	unharmed(t, sb)
}

// A process that the payload leaves behind becomes a child of init, but is not mistaken for the payload.
func TestPayloadEnded(t *testing.T) {
	sb := idle(t)
	x, _ := held(t, sb, "sleep 100 >/dev/null & exit 0")
	defer x.Close()
	x.Release()
	select {
	case <-x.Exited():
	case <-time.After(time.Until(soon())):
		t.Error("it does not end")
	}
	list, err := proc.Children(x.Init.PID)
	check.That(t, len(list) == 1, "below init: %v, %v", list, err)
	p, err := x.Payload()
	check.That(t, err == proc.ErrGone, "taken for the payload: %+v, %v", p, err)
	out := supervise.Teardown(&x.Kept, soon())
	check.That(t, out.Verdict == result.Proven, "%+v", out)
	check.OK(t, x.Kept.Collect(soon()))
	unharmed(t, sb)
}

// A payload that is killed before its release has ended by a signal, even if init reports that after the release.
func TestPayloadKilledBeforeRelease(t *testing.T) {
	sb := idle(t)
	x, output := held(t, sb, "echo ran")
	defer x.Close()
	payload := payloadOf(t, x)
	defer payload.Close()
	check.Must(t, x.Init.Signal(unix.SIGSTOP))
	harness.Until(t, harness.Bound, "the stop", func() bool {
		st, err := proc.ReadStat(x.Init.PID)
		return err == nil && st.State == "T"
	})
	check.Must(t, payload.Signal(unix.SIGKILL))
	check.Must(t, payload.Wait(soon()))
	x.Release()
	check.Must(t, x.Init.Signal(unix.SIGCONT))
	<-x.Exited()
	p, _, err := x.ExitStatus()
	check.That(t, err == nil && p.Signal == unix.SIGKILL, "%+v, %v", p, err)
	check.Must(t, x.Kept.Collect(soon()))
	text := <-output
	check.That(t, text == "", "it ran: %q", text)
	unharmed(t, sb)
}

func TestExecDeadline(t *testing.T) {
	sb := idle(t)
	const stubborn = `trap '' TERM; setsid sh -c 'trap "" TERM; echo up; sleep 100' & wait`
	for _, tt := range []struct {
		script  string
		grace   time.Duration
		want    string
		atLeast time.Duration
	}{
		{stubborn, 0, "up\n", 0},
		{stubborn, 300 * time.Millisecond, "up\n", 300 * time.Millisecond},
		// The signal reaches the payload and a process in another session.
		{`trap 'echo got; exit 3' TERM; setsid sh -c "trap 'echo got; exit' TERM; while :; do sleep 0.05; done" & while :; do sleep 0.05; done`, 20 * time.Second, "got\ngot\n", 0},
	} {
		for timeout := harness.Deadline(time.Second); ; timeout *= 2 {
			text, res := run(t, sb, shell(sb, tt.script), supervise.Options{Timeout: timeout, Grace: tt.grace})
			if text != tt.want && timeout < harness.Bound/4 {
				continue // not all processes were up before the deadline
			}
			check.That(t, text == tt.want && res.Cause == result.Timeout && res.ExitCode() == 124 && res.Duration >= timeout+tt.atLeast && res.Duration <= timeout+15*time.Second,
				"%q: %q, %+v", tt.script, text, res)
			break
		}
	}
	unharmed(t, sb)
}

// begun waits, up to a limit, until a shell with two sleeps is running.
func begun(k *proc.Kept) {
	for end := soon(); len(harness.Descendants(k.Init.PID)) < 3 && time.Now().Before(end); { // the shell and two
		time.Sleep(time.Millisecond)
	}
}

// All processes of a command exit when its keeper or its init is killed, and the sandbox keeps running.
func TestExecKilled(t *testing.T) {
	sb := idle(t)
	kills := map[string]func(*proc.Kept) error{
		"keeper": func(k *proc.Kept) error { return k.Keeper.Signal(unix.SIGKILL) },
		"init":   func(k *proc.Kept) error { return k.Init.Signal(unix.SIGKILL) },
	}
	for name, kill := range kills {
		killed := make(chan error, 1)
		_, res := runHeld(t, sb, shell(sb, "setsid sleep 100 & sleep 100"), supervise.Options{}, func(k *proc.Kept) {
			go func() {
				begun(k)
				killed <- kill(k)
			}()
		})
		err := <-killed
		check.That(t, err == nil && res.Cause == result.Lost && res.ExitCode() == 137, "%s: %v, %+v", name, err, res)
		unharmed(t, sb)
	}
}

// Execs end with their sandbox.
func TestExecSandboxEnds(t *testing.T) {
	sb := idle(t)
	_, res := runHeld(t, sb, shell(sb, "setsid sleep 100 & sleep 100"), supervise.Options{}, func(k *proc.Kept) {
		go func() {
			begun(k)
			_ = sb.Room.Signal(unix.SIGKILL) // the checks below notice a failure
		}()
	})
	check.That(t, res.Cause == result.Lost && res.ExitCode() == 137, "%+v", res)
	err := sb.Room.Wait(soon())
	check.Must(t, err)
	s := open(t)
	_, err = shell(sb, "true").Start(t.Context(), sb.Room, s.stdio, nil)
	check.Equal(t, result.CodeOf(err), "ended", "after the end: %v", err)
}

// A sandbox's processes can see that another process enters, but not sbxrun's arguments, environment or memory.
func TestExecHidden(t *testing.T) {
	t.Setenv("API_KEY", "hidden-secret")
	sb, lines := sandbox(t, `echo up; while :; do for p in /proc/[0-9]*; do cat $p/cmdline $p/environ 2>/dev/null | tr '\0' '\n' | grep -a -o -E 'hidden[-]secret|[.]test$'; done; done`)
	read(t, lines, 1)
	for range 30 {
		_, res := run(t, sb, entry(sb, "true"), supervise.Options{})
		check.That(t, res.ExitCode() == 0, "%+v", res)
	}
	sb.Keeper.Kill() // ends all processes with the script's stdout
	var seen []string
	for lines.Scan() {
		seen = append(seen, lines.Text())
	}
	diff := cmp.Diff([]string(nil), seen)
	check.That(t, diff == "", "seen in the sandbox (-want +got):\n%s", strings.TrimSpace(diff))
}

// SignalAll fails instead of blocking when a stopped init reads nothing.
func TestSignalsStoppedInit(t *testing.T) {
	sb, lines := sandbox(t, "echo up; sleep 1000")
	read(t, lines, 1)
	check.Must(t, sb.Init.Signal(unix.SIGSTOP))
	var err error
	for range 10_000 {
		if err = sb.Exec.SignalAll(unix.SIGWINCH); err != nil {
			break
		}
	}
	check.That(t, errors.Is(err, unix.EAGAIN), "%v", err)
}

// A payload that lowers its init's descriptor limit (prlimit(2)), so that init can no longer poll, ends itself.
func TestDeafInit(t *testing.T) {
	sb := idle(t)
	deafen := shell(sb, "prlimit --pid 1 --nofile=0:0 || exit; (true &); sleep 1000")
	o := supervise.Options{Timeout: harness.Bound}
	_, r := run(t, sb, deafen, o)
	check.That(t, r.Cause == result.Lost, "%+v", r)
	r, _ = call(t, maker(t, sb), deafen, o)
	check.That(t, r.Cause == result.Lost, "in a warm room: %+v", r)
}
