package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// prologue poses as bubblewrap 0.8.0 and finds the descriptors in its command line: on 9 it names
// the room's PID 1, on 8 it says that the room is built. It misbehaves only in runs, and is honest
// when sbxrun tests the machine to explain a failure.
const prologue = `#!/bin/sh
case " $* " in
*" --info-fd "*) ;;
*) exec /usr/bin/bwrap "$@" ;;
esac
while [ $# -gt 0 ]; do
	case $1 in
	--info-fd) eval "exec 9>&$2 $2>&-" ;;
	esac
	shift
done
exec 8>&5 5>&-
`

const versions = `#!/bin/sh
case $1 in
--version) echo bubblewrap 0.8.0; exit 0 ;;
esac
`

// pose writes a fake bwrap, and returns the environment variable that selects it.
func pose(t *testing.T, script string) []string {
	t.Helper()
	dir := harness.Dir(t)
	check.Must(t, os.WriteFile(filepath.Join(dir, "bwrap"), []byte(script), 0o755))
	return []string{"SBXRUN_BWRAP=" + filepath.Join(dir, "bwrap")}
}

// fake is a bwrap that misbehaves on one of its two streams; TestStatus and its neighbours in package room have all
// kinds of malformed messages. In its script %[1]s is a victim's
// PID, and %[2]s the inode of the victim's PID namespace.
type fake struct {
	name, script string
}

var fakes = []fake{
	{"exits with 0", `exit 0`},
	{"exits with 1", `exit 1`},
	{"dies", `kill -KILL $$`},
	{"closes and stays", `exec 9>&- 8>&-; sleep 600`},
	{"closes and leaves a daemon", `exec 9>&- 8>&-; setsid sleep 600 & setsid setsid sleep 600 & exit 0`},
	{"closes, deaf and stopped", `trap "" TERM INT HUP; exec 9>&- 8>&-; setsid sh -c 'kill -STOP $$' & kill -STOP $$`},
	{"garbage", `echo "bubblewrap is not JSON" >&9; sleep 600`},
	{"endless zeros", `exec cat /dev/zero >&9`},
	{"endless string", `printf '{"child-pid' >&9; exec tr '\0' x </dev/zero >&9`},
	{"pid 1", `echo '{"child-pid": 1, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"pid -victim", `echo '{"child-pid": -%[1]s, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a stranger", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a stranger, and released", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; echo '{"exit-code": 0}' >&9; exit 0`},
	{"itself", `echo "{\"child-pid\": $$, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"the keeper", `echo "{\"child-pid\": $PPID, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"a child of the host's", `sleep 600 & echo "{\"child-pid\": $!, \"pid-namespace\": $(stat -Lc %%i /proc/self/ns/pid)}" >&9; wait`},
	{"a child that is dead", `sleep 0 & p=$!; wait $p; echo "{\"child-pid\": $p, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"a child that is a zombie", `sh -c 'sleep 0.01 & echo "{\"child-pid\": $!, \"pid-namespace\": %[2]s}" >&9; exec sleep 600'`},
	{"an init of its own, not the first", `unshare -Urpf --kill-child sleep 600 & sleep 0.05
		for t in /proc/$!/task/*/children; do read -r p <$t; done
		echo "{\"child-pid\": ${p%% }, \"pid-namespace\": %[2]s}" >&9; wait`},
	// These name an existing process, but lie about the room.
	{"a stranger that is built", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; echo >&8; sleep 600`},
	{"built, and no word", `echo >&8; exec 9>&-; sleep 600`},
	{"built, and dead", `echo >&8; kill -KILL $$`},
	{"built before it is named", `echo >&8; sleep 0.02; echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; echo >&8; sleep 600`},
	{"endless ready", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; exec yes >&8`},
	{"an own namespace, closed", ownNamespace + `exec 8>&-; wait`},
	{"an own namespace, and dead", ownNamespace + `kill -KILL $$`},
	{"an own namespace, built, and dead", ownNamespace + `echo >&8; kill -KILL $$`},
	{"an own namespace, built, and gone", ownNamespace + `echo >&8; exit 0`},
	{"an own namespace, whose first is dead", ownNamespace + `kill -KILL $p; echo >&8; wait`},
	{"an own namespace, and daemons", ownNamespace + `exec 8>&-; setsid sleep 600 & setsid setsid sleep 600 & exit 0`},
	{"another mouth", `(sleep 0.02; echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; sleep 600) & exit 0`},
}

// ownNamespace names PID 1 of a PID namespace below the keeper, but one generation too deep.
const ownNamespace = `
unshare -Urpf --kill-child sh -c 'exec 9>&- 8>&-; exec sleep 600' 2>/dev/null & u=$!
p=
while [ -z "$p" ]; do
	for t in /proc/$u/task/*/children; do read -r p <$t; done
	p=${p%% }
done
echo "{\"child-pid\": $p, \"pid-namespace\": $(stat -Lc %%i /proc/$p/ns/pid)}" >&9
`

// Whatever bwrap says, sbxrun exits with 125 and one line, leaves nothing, and signals only
// processes that it has verified. The victims are the test process, its child, and the room of
// another sandbox, where everything matches except that it is not below our bwrap.
func TestBwrapFake(t *testing.T) {
	victims := newVictims(t)
	for _, f := range fakes {
		t.Run(f.name, func(t *testing.T) {
			for i, victim := range victims {
				if i > 0 && !strings.Contains(f.script, "%[") {
					break // it names no victim
				}
				script := prologue + fmt.Sprintf(f.script+"\n: %[1]s %[2]s\n", strconv.Itoa(victim.id.PID), strconv.FormatUint(victim.id.Namespace, 10))
				r := start(t, harness.Options{Env: pose(t, script)}, "--timeout", "2", "sh", "-c", ": >/out/ran")
				o := r.Wait()
				check.That(t, o.ExitCode == 125 && o.Report != nil && !o.Report.Started && o.Report.Teardown.Verdict == "not_applicable", "%s: want 125 and never started: %v", victim.name, o)
				oneLine(t, o)
				check.Require(t, victim.unharmed(), "%s was signalled: %v", victim.name, o)
				harness.Within(t, "the run", o.Elapsed, 0, 2*time.Second)
				if t.Failed() {
					return
				}
			}
		})
	}
}

// The same when bwrap misbehaves later, while sbxrun looks for the cause of the failure. A signal ends that search too.
func TestBwrapFakeExplained(t *testing.T) {
	for _, f := range []fake{
		{"does not end", `trap "" TERM; sleep 600`},
		{"is stopped", `kill -STOP $$`},
	} {
		t.Run(f.name, func(t *testing.T) {
			script := versions + "case \" $* \" in *\" --info-fd \"*) exit 1;; esac\n: >\"$0.searched\"\n" + f.script + "\n"
			r := start(t, harness.Options{Env: pose(t, script)}, "--timeout", "1", "sh", "-c", ": >/out/ran")
			r.briefly(10 * time.Second)
			oneLine(t, r.Wait().Exits(t, 125))

			env := pose(t, script)
			r = start(t, harness.Options{Env: env}, "--timeout", "1", "sh", "-c", ": >/out/ran")
			r.until("the search", func() bool {
				_, err := os.Stat(strings.TrimPrefix(env[0], "SBXRUN_BWRAP=") + ".searched")
				return err == nil
			})
			r.signal(unix.SIGTERM)
			r.briefly(2 * time.Second)
			r.Wait()
		})
	}
}

// victim is a process that sbxrun must not touch.
type victim struct {
	name string
	bystander
}

func newVictims(t *testing.T) (victims []victim) {
	t.Helper()
	other, pids := begun(t, nil, busy)
	t.Cleanup(func() {
		other.signal(unix.SIGTERM)
		other.Wait()
	})
	stranger := newBystander(t)
	for name, pid := range map[string]int{"a stranger": stranger.id.PID, "another sandbox": pids[roleRoom], "the test": os.Getpid()} {
		start, ns := harness.Identify(t, pid)
		victims = append(victims, victim{name, bystander{t: t, id: harness.Identity{PID: pid, Start: start, Namespace: ns}}})
	}
	return victims
}

// A signal at once ends a run whose bwrap never names the room, or never says that it is built.
// Otherwise the run fails after 30 s.
func TestBwrapSilent(t *testing.T) {
	for _, f := range []fake{
		{"no word", prologue + `trap "" TERM; : >/proc/self/comm; setsid sleep 600 & while :; do sleep 600; done`},
		{"never built", fmt.Sprintf(relay, `pass_on(); os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)`)},
	} {
		t.Run(f.name, func(t *testing.T) {
			env := pose(t, f.script)
			for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGKILL} {
				r := start(t, harness.Options{Env: env}, "--timeout", harness.Deadline(300*time.Millisecond).String(), "sh", "-c", ": >/out/ran")
				r.until("the daemon", func() bool {
					pids := r.processes()
					return pids[roleMonitor] > 0 && len(harness.Descendants(pids[roleMonitor])) >= 2
				})
				from := time.Now()
				r.signal(sig)
				o := r.Wait()
				check.That(t, !r.wrote("ran"), "signal %v: the command has run: %v", sig, o)
				if sig == unix.SIGKILL {
					continue
				}
				o.Expect(t, 128+int(sig), "canceled")
				check.That(t, !o.Report.Started, "signal %v: it was started: %v", sig, o)
				harness.Within(t, "the end", o.Ended.Sub(from), 0, 500*time.Millisecond)
			}
		})
	}
}

// The same for a bwrap that the kernel cannot execute.
func TestBwrapNotExecutable(t *testing.T) {
	start(t, harness.Options{Env: pose(t, "\x7fELF nonsense")}, "true").Wait().Exits(t, 125)
}

// relay executes the real bwrap with a process in between, which reads what bwrap and the room
// write and passes it on to sbxrun. The room is real.
const relay = `#!/usr/bin/python3
import os, re, signal, sys, time
args = sys.argv[1:]
if "--info-fd" not in args: # no run: a question, or a trial
    os.execv("/usr/bin/bwrap", ["bwrap"] + args)
at = args.index("--info-fd") + 1
out, ready = int(args[at]), 5
back, its = os.pipe()
built, room = os.pipe()
if os.fork() == 0:
    os.close(its)
    os.close(room)
    for fd in set(range(3, 64)) - {out, ready, back, built}:
        try: os.close(fd)
        except OSError: pass
    bwrap = os.getppid()
    def say(b):
        os.write(out, b)
    def hear(): # the first object, which comes in several writes
        first = b""
        while b"}" not in first and (b := os.read(back, 4096)):
            first += b
        return first
    def pass_on():
        say(hear())
    def hear_built():
        os.read(built, 1)
    def say_built(b=b"x"):
        os.write(ready, b)
    def pass_built():
        hear_built()
        say_built()
    try:
        %s
    finally:
        os._exit(0)
os.close(back)
os.close(built)
os.dup2(its, 200) # far above the descriptors that bwrap is told of
os.set_inheritable(200, True)
os.close(out)
os.dup2(room, ready)
args[at] = "200"
os.execv("/usr/bin/bwrap", ["bwrap"] + args)
`

// relayed is a way to pass it on, and the exit codes that are correct then.
type relayed struct {
	name, script string
	codes        []int
}

var relays = []relayed{
	{"as it was", `pass_on(); pass_built()`, []int{7}},
	{"with members of the future", `say(hear().replace(b"{", b'{"future": [{"child-pid": 1}], ')); pass_built()`, []int{7}},
	{"another pid", `say(re.sub(rb'"child-pid": *[0-9]+', b'"child-pid": 1', hear())); pass_built()`, []int{125}},
	{"bwrap's own pid", `say(re.sub(rb'"child-pid": *[0-9]+', b'"child-pid": %%d' %% bwrap, hear())); pass_built()`, []int{125}},
	{"the relay's pid", `say(re.sub(rb'"child-pid": *[0-9]+', b'"child-pid": %%d' %% os.getpid(), hear())); pass_built()`, []int{125}},
	// The inode only serves to list survivors; sbxrun asks the kernel for PID 1.
	{"another namespace", `say(re.sub(rb'"pid-namespace": *[0-9]+', b'"pid-namespace": 4026531836', hear())); pass_built()`, []int{7, 125}},
	{"nothing, and the end", `pass`, []int{125}},
	{"built, late", `pass_on(); hear_built(); time.sleep(0.05); say_built()`, []int{7}},
	{"built, again and again", `pass_on(); hear_built(); say_built(b"x" * 60000)`, []int{7}},
	{"built, and daemons", `pass_on(); pass_built(); os.fork() or (os.setsid(), os.fork(), time.sleep(600))`, []int{7}},
	{"never built, and the end", `pass_on(); hear_built()`, []int{125}},
	// sbxrun trusts bwrap's report that the room is built, but must end in an orderly way even if it is wrong. 2 is
	// the shell's code for a missing /out. A room outlives a killed bwrap for a moment.
	{"built too early", `say_built(); pass_on()`, []int{2, 7, 125, 126, 127, 137}},
	{"built too early, and dead", `say_built(); pass_on(); os.kill(bwrap, 9)`, []int{2, 7, 125, 126, 127, 137}},
	{"built, and dead", `pass_on(); pass_built(); os.kill(bwrap, 9)`, []int{7, 125, 137}},
	{"dead, and built", `pass_on(); hear_built(); os.kill(bwrap, 9); say_built()`, []int{7, 125, 137}},
	{"dead, and never built", `pass_on(); hear_built(); os.kill(bwrap, 9)`, []int{125}},
	{"named, and dead", `pass_on(); os.kill(bwrap, 9); say_built()`, []int{2, 7, 125, 126, 127, 137}},
	{"built, and stopped", `pass_on(); pass_built(); os.kill(bwrap, 19)`, []int{7}},
	{"closed, and stopped", `pass_on(); os.kill(bwrap, 19)`, []int{125}},
}

// A run and the start of an idle sandbox, where sbxrun itself waits for the room, work with the real bwrap when its
// messages come late, in pieces or with additions, and fail with one line when they come too early or not at all.
func TestBwrapRelay(t *testing.T) {
	real, err := exec.LookPath("bwrap")
	check.Must(t, err)
	if real != "/usr/bin/bwrap" {
		harness.Skip(t, "bwrap is at "+real+", and the relay expects it in /usr/bin")
	}
	for _, f := range relays {
		t.Run(f.name, func(t *testing.T) {
			env := pose(t, fmt.Sprintf(relay, strings.ReplaceAll(f.script, "%%", "%")))
			for range scaled(t, 2) {
				r := start(t, harness.Options{Env: env}, append([]string{"--timeout", lifetime}, leaver...)...)
				r.briefly(5 * time.Second)
				o := r.Wait()
				check.That(t, slices.Contains(f.codes, o.ExitCode) && (o.ExitCode != 7 || r.wrote("ran")) && (o.ExitCode != 125 || !r.wrote("ran")), "want one of %v: %v; ran: %v", f.codes, o, r.wrote("ran"))
				if o.ExitCode == 125 {
					oneLine(t, o)
				}
				bound := 2 * time.Second
				if o.ExitCode == 125 && strings.Contains(f.script, "os.kill(bwrap, 9)") {
					bound = 10 * time.Second // doctor.Diagnose runs the bwrap, which is killed each time
				}
				harness.Within(t, "the run", o.Elapsed, 0, bound)
			}
			e := newEnv(t)
			e.wrap = append([]string{"env"}, env...)
			s := e.do(append(e.startFlags(), "--name", "box")...)
			harness.Within(t, "start", s.Elapsed, 0, 3*time.Second)
			e.wrap = nil
			check.That(t, s.ExitCode == 125 && slices.Contains(f.codes, 125) || s.ExitCode == 0 && !slices.Equal(f.codes, []int{125}), "want one of %v: %v", f.codes, s)
			if s.ExitCode == 125 {
				oneLine(t, s)
				e.gone(settle)
			} else if len(f.codes) == 1 {
				e.ok("exec", "--timeout", lifetime, "box", "true")
			}
			e.clean()
		})
	}
}
