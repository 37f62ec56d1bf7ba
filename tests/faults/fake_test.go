package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// prologue poses as bubblewrap 0.8.0, and takes the descriptors from its command
// line: 9 is the status stream, 8 holds init. It misbehaves in a run only: when
// sbxrun tries what this machine allows, to explain the failure, it is honest.
const prologue = versions + `
case " $* " in
*" --json-status-fd "*) ;;
*) exec /usr/bin/bwrap "$@" ;;
esac
while [ $# -gt 0 ]; do
	case $1 in
	--json-status-fd) eval "exec 9>&$2" ;;
	--block-fd) eval "exec 8<&$2" ;;
	esac
	shift
done
`

const versions = `#!/bin/sh
case $1 in
--version) echo bubblewrap 0.8.0; exit 0 ;;
--help) echo --size --disable-userns --json-status-fd; exit 0 ;;
esac
`

// pose writes a bwrap of our own, and returns the environment that finds it.
func pose(t *testing.T, script string) []string {
	t.Helper()
	dir := harness.Dir(t)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "bwrap"), []byte(script), 0o755))
	return []string{"PATH=" + dir + ":" + harness.Path}
}

// fake is a bwrap that misbehaves on the status stream; %[1]s in its script is
// a victim's pid, %[2]s the inode of the victim's PID namespace.
type fake struct {
	name, script string
}

var fakes = []fake{
	{"exits with 0", `exit 0`},
	{"exits with 1", `exit 1`},
	{"dies", `kill -KILL $$`},
	{"closes and stays", `exec 9>&- 5>&-; sleep 600`},
	{"closes and leaves a daemon", `exec 9>&- 5>&-; setsid sleep 600 & setsid setsid sleep 600 & exit 0`},
	{"closes, deaf and stopped", `trap "" TERM INT HUP; exec 9>&- 5>&-; setsid sh -c 'kill -STOP $$' & kill -STOP $$`},
	{"garbage", `echo "bubblewrap is not JSON" >&9; sleep 600`},
	{"binary", `head -c 300 /dev/urandom >&9; echo '}' >&9; sleep 600`},
	{"endless zeros", `exec cat /dev/zero >&9`},
	{"endless objects", `exec yes '{}' >&9`},
	{"endless string", `printf '{"child-pid' >&9; exec tr '\0' x </dev/zero >&9`},
	{"deep", `head -c 60000 /dev/zero | tr '\0' '[' >&9; sleep 600`},
	{"cut", `printf '{"child-pid": 12' >&9; exit 0`},
	{"cut after the pid", `printf '{"child-pid": %[1]s' >&9; exit 0`},
	{"cut into two", `printf '{"child-pid": %[1]s, "pid-namespace": ' >&9; printf '%[2]s' >&9; exit 0`},
	{"no namespace", `echo '{"child-pid": %[1]s}' >&9; sleep 600`},
	{"a list", `echo '[%[1]s]' >&9; sleep 600`},
	{"a string", `echo '{"child-pid": "%[1]s", "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"null", `echo '{"child-pid": null} null {"child-pid": null}' >&9; exit 0`},
	{"pid 0", `echo '{"child-pid": 0, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"pid 1", `echo '{"child-pid": 1, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"pid -1", `echo '{"child-pid": -1, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"pid -victim", `echo '{"child-pid": -%[1]s, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a pid of 64 bits", `echo "{\"child-pid\": $((4294967296 + %[1]s)), \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"a pid beyond", `echo '{"child-pid": 99999999999999999999999, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a fraction", `echo '{"child-pid": %[1]s.5, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"two pids", `echo '{"child-pid": 2, "child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a stranger", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; sleep 600`},
	{"a stranger, slowly", `for c in '{"child' '-pid": ' %[1]s ', "pid-names' 'pace":' ' %[2]s' '}'; do printf '%%s' "$c" >&9; sleep 0.01; done; sleep 600`},
	{"a stranger, and released", `echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; echo '{"exit-code": 0}' >&9; exit 0`},
	{"itself", `echo "{\"child-pid\": $$, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"the keeper", `echo "{\"child-pid\": $PPID, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"a child of the host's", `sleep 600 & echo "{\"child-pid\": $!, \"pid-namespace\": $(stat -Lc %%i /proc/self/ns/pid)}" >&9; wait`},
	{"a child that is dead", `sleep 0 & p=$!; wait $p; echo "{\"child-pid\": $p, \"pid-namespace\": %[2]s}" >&9; sleep 600`},
	{"a child that is a zombie", `sh -c 'sleep 0.01 & echo "{\"child-pid\": $!, \"pid-namespace\": %[2]s}" >&9; exec sleep 600'`},
	{"an init of its own, not the first", `unshare -Urpf --kill-child sleep 600 & sleep 0.05
		for t in /proc/$!/task/*/children; do read -r p <$t; done
		echo "{\"child-pid\": ${p%% }, \"pid-namespace\": %[2]s}" >&9; wait`},
	{"another mouth", `(sleep 0.02; echo '{"child-pid": %[1]s, "pid-namespace": %[2]s}' >&9; sleep 600) & exit 0`},
}

// R19: whatever bwrap says, sbxrun answers 125 in one line, leaves nothing, and
// never signals a process that it has not verified. The victims are the test's
// own process, a child of the test, and the init of another sandbox, of which
// all is true but that it is below our bwrap.
func TestR19Fakes(t *testing.T) {
	other := newVictim(t)
	for _, f := range fakes {
		t.Run(f.name, func(t *testing.T) {
			for _, victim := range other {
				script := prologue + fmt.Sprintf(f.script+"\n: %[1]s %[2]s\n", strconv.Itoa(victim.pid), strconv.FormatUint(victim.ns, 10))
				r := start(t, options{env: pose(t, script)}, "--timeout", "2", "sh", "-c", ": >/out/ran")
				o := r.wait()
				if o.code != 125 || o.report == nil || o.report.Started || o.report.Teardown.Verdict != "not_applicable" {
					t.Errorf("%s: want 125 and never started: %v", victim.name, o)
				}
				o.oneLine(t)
				if victim.target != nil && victim.target.Ended() {
					t.Fatalf("%s was killed: %v", victim.name, o)
				}
				if p, ok := harness.ReadProc(victim.pid); !ok || p.State == "T" || p.Start != victim.start {
					t.Errorf("%s was stopped: %v", victim.name, p)
				}
				harness.Within(t, "the run", r.end.Sub(r.begin), 0, 2*time.Second)
				if t.Failed() {
					return
				}
			}
		})
	}
}

// R19: a bwrap that misbehaves when it is tried once more, to explain why the run
// came to nothing, leaves no more behind than one in a run; and the explanation
// does not outlast a signal.
func TestR19Explained(t *testing.T) {
	for _, f := range []fake{
		{"does not end", `trap "" TERM; sleep 600`},
		{"is stopped", `kill -STOP $$`},
	} {
		t.Run(f.name, func(t *testing.T) {
			script := versions + "case \" $* \" in *\" --json-status-fd \"*) exit 1;; esac\n" + f.script + "\n"
			r := start(t, options{env: pose(t, script)}, "--timeout", "1", "sh", "-c", ": >/out/ran")
			r.briefly(10 * time.Second)
			if o := r.wait(); o.code != 125 {
				t.Errorf("want 125: %v", o)
			} else {
				o.oneLine(t)
			}

			r = start(t, options{env: pose(t, script)}, "--timeout", "1", "sh", "-c", ": >/out/ran")
			r.until("the end of the run's own bwrap", func() bool { return time.Since(r.begin) > 300*time.Millisecond })
			r.signal(unix.SIGTERM)
			r.briefly(2 * time.Second)
			r.wait()
		})
	}
}

// victim is a process that sbxrun has no business with.
type victim struct {
	name   string
	pid    int
	ns     uint64
	start  string
	target *harness.Target // nil for the test itself
}

func newVictim(t *testing.T) []victim {
	t.Helper()
	// Both end with the test; they are known, so they are not taken for leftovers.
	sleep := exec.Command("sleep", "600")
	done, err := harness.Register(func() (int, error) {
		if err := sleep.Start(); err != nil {
			return 0, err
		}
		return sleep.Process.Pid, nil
	})
	harness.Must(t, err)
	registered[sleep.Process.Pid] = true
	t.Cleanup(func() {
		_ = sleep.Process.Kill() // it has been killed by sbxrun: the test has failed
		_ = sleep.Wait()
		delete(registered, sleep.Process.Pid)
		done()
	})
	other, pids := begun(t, nil, busy)
	t.Cleanup(func() {
		other.signal(unix.SIGTERM)
		other.wait()
	})
	host := namespace(t, os.Getpid())
	victims := []victim{
		{name: "a stranger", pid: sleep.Process.Pid, ns: host},
		{name: "another sandbox", pid: pids[roleRoom], ns: namespace(t, pids[roleRoom])},
		{name: "the test", pid: os.Getpid(), ns: host},
	}
	for i := range victims {
		v := &victims[i]
		p, ok := harness.ReadProc(v.pid)
		if !ok {
			t.Fatalf("%s does not run", v.name)
		}
		v.start = p.Start
		if v.pid == os.Getpid() {
			continue // were it killed, nobody would ask
		}
		v.target, err = harness.Open(v.pid)
		harness.Must(t, err)
		t.Cleanup(v.target.Close)
	}
	return victims
}

func namespace(t testing.TB, pid int) uint64 {
	t.Helper()
	var st unix.Stat_t
	harness.Must(t, unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", pid), &st))
	return st.Ino
}

// R19: a bwrap that never says anything. A signal ends the wait at once; by
// itself it is over after 30 s, which only a long test waits for.
func TestR19Silent(t *testing.T) {
	env := pose(t, prologue+`trap "" TERM; : >/proc/self/comm; setsid sleep 600 & while :; do sleep 600; done`)
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGKILL} {
		r := start(t, options{env: env}, "--timeout", "0.1", "true")
		r.until("the daemon", func() bool {
			pids := r.processes()
			return pids[roleMonitor] > 0 && len(harness.Descendants(pids[roleMonitor])) >= 2
		})
		r.signal(sig)
		o := r.wait()
		if sig == unix.SIGKILL {
			continue
		}
		if o.code != 128+int(sig) || o.report == nil || o.report.Cause != "canceled" || o.report.Started {
			t.Errorf("signal %v: want canceled: %v", sig, o)
		}
		harness.Within(t, "the run", r.end.Sub(r.begin), 0, time.Second)
	}
	if soak(t) < 1000 {
		return
	}
	r := start(t, options{env: env}, "--timeout", "0.1", "true")
	select {
	case <-r.exited:
	case <-time.After(40 * time.Second):
		t.Errorf("it waits for ever")
	}
	if o := r.wait(); o.code != 125 {
		t.Errorf("want 125: %v", o)
	} else {
		o.oneLine(t)
	}
}

// R19: a program that does not answer as bubblewrap does, when it is asked for
// its version.
func TestR19Version(t *testing.T) {
	for _, f := range []fake{
		{"says nothing", `exit 0`},
		{"fails", `echo no such option >&2; exit 1`},
		{"says something else", `echo busybox 1.36`},
		{"is too old", `echo bubblewrap 0.4.1`},
		{"has no number", `echo bubblewrap`},
		{"has no help", `case $1 in --version) echo bubblewrap 0.8.0;; *) exit 1;; esac`},
		{"dies", `kill -KILL $$`},
		{"does not end", `exec sleep 600`},
		{"says too much", `exec yes bubblewrap`},
	} {
		t.Run(f.name, func(t *testing.T) {
			r := start(t, options{env: pose(t, "#!/bin/sh\n"+f.script+"\n")}, "--timeout", "1", "sh", "-c", ": >/out/ran")
			r.briefly(8 * time.Second)
			o := r.wait()
			if o.code != 125 || r.wrote("ran") {
				t.Errorf("want 125: %v", o)
			}
			o.oneLine(t)
		})
	}
	t.Run("is not executable", func(t *testing.T) {
		r := start(t, options{env: pose(t, "\x7fELF nonsense")}, "true")
		if o := r.wait(); o.code != 125 {
			t.Errorf("want 125: %v", o)
		}
	})
}

// briefly fails the test, and ends the run, if sbxrun takes longer.
func (r *run) briefly(limit time.Duration) {
	r.t.Helper()
	select {
	case <-r.exited:
	case <-time.After(limit):
		r.t.Errorf("sbxrun still runs after %v; below it:\n%s", limit, describe(below(r.pid)))
		r.abort()
	}
}

// relay becomes the real bwrap, with a program of ours in the way of its status:
// it reads what bwrap writes, and writes what sbxrun reads.
const relay = `#!/usr/bin/python3
import os, re, sys, time
args = sys.argv[1:]
if "--json-status-fd" not in args: # no run: a question, or a trial
    os.execv("/usr/bin/bwrap", ["bwrap"] + args)
at = args.index("--json-status-fd") + 1
out = int(args[at])
back, its = os.pipe()
if os.fork() == 0:
    os.close(its)
    os.closerange(3, min(back, out))
    def say(b):
        os.write(out, b)
    def hear(): # the first object, which comes in several writes
        first = b""
        while b"}" not in first and (b := os.read(back, 4096)):
            first += b
        return first
    def all_of_it():
        while b := os.read(back, 4096):
            yield b
    %s
    os._exit(0)
os.close(back)
os.dup2(its, 200) # far above the descriptors that bwrap is told of
os.set_inheritable(200, True)
os.close(out)
args[at] = "200"
os.execv("/usr/bin/bwrap", ["bwrap"] + args)
`

// R19: the real bwrap, whose words come late, in pieces, with more than there
// was, or not at all.
func TestR19Relay(t *testing.T) {
	real, err := exec.LookPath("bwrap")
	harness.Must(t, err)
	if real != "/usr/bin/bwrap" {
		harness.Skip(t, "bwrap is at "+real+", and the relay expects it in /usr/bin")
	}
	for _, f := range []struct {
		name, script string
		code         int
	}{
		{"as it was", `for b in all_of_it(): say(b)`, 7},
		{"byte by byte", `for b in all_of_it(): [(say(b[i:i+1]), time.sleep(0.0002)) for i in range(len(b))]`, 7},
		{"with members of the future", `say(b'{"hello": {}} {}'); [say(b.replace(b"{", b'{"future": [{"child-pid": 1}], ')) for b in all_of_it()]`, 7},
		{"without line breaks", `for b in all_of_it(): say(b.replace(b"\n", b""))`, 7},
		// Then only a kernel that tells it (Linux 6.15) knows the code; and only
		// if the command was seen while it lived.
		{"never how it ended", `say(hear()); [0 for b in all_of_it()]`, 137},
		{"nonsense in the end", `for b in all_of_it(): say(re.sub(rb'"exit-code": *[0-9]+', b'"exit-code": "', b))`, 137},
		{"another pid", `for b in all_of_it(): say(re.sub(rb'"child-pid": *[0-9]+', b'"child-pid": 1', b))`, 125},
		{"another namespace", `for b in all_of_it(): say(re.sub(rb'"pid-namespace": *[0-9]+', b'"pid-namespace": 4026531836', b))`, 125},
		{"cut in the middle", `say(hear()[:20])`, 125},
		{"nothing, and the end", ``, 125},
	} {
		t.Run(f.name, func(t *testing.T) {
			for range scaled(t, 2) {
				env := pose(t, fmt.Sprintf(relay, f.script))
				r := start(t, options{env: env}, append([]string{"--timeout", "3"}, leaver...)...)
				r.briefly(5 * time.Second)
				o := r.wait()
				known := o.code == f.code || f.code == 137 && o.code == 7
				if !known || r.wrote("ran") == (f.code == 125) {
					t.Errorf("want code %d: %v", f.code, o)
				}
				if f.code == 125 {
					o.oneLine(t)
				}
			}
		})
	}
}
