package faults

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// fighter is a payload that fights back: it blocks all signals, passes out what it has, to
// be held by somebody outside, takes the names of sbxrun's processes, makes sessions and
// orphans, and traces, stops and kills whatever it can see.
const fighter = `
import array, ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
open("/out/ran-" + sys.argv[1], "w").close()
libc.prctl(36, 1, 0, 0, 0) # a subreaper
try:
    s = socket.socket(socket.AF_UNIX)
    s.connect("/out/sock")
    own = [os.open("/proc/self/ns/" + n, os.O_RDONLY) for n in ("pid", "mnt", "user")]
    own += [os.pidfd_open(os.getpid()), os.open("/proc", os.O_RDONLY), os.open("/", os.O_RDONLY), 0, 1, 2]
    s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own))])
except OSError:
    pass
for name in b"sbxrun-keeper", b"sbxrun-init", b"sbxrun-room", b"bwrap", b"sbxrun":
    if os.fork() == 0:
        os.setsid()
        os.fork()
        libc.prctl(15, name, 0, 0, 0)
        libc.unshare(0x10000000 | 0x20000000)
        while True:
            for p in os.listdir("/proc"):
                if p.isdigit() and int(p) != os.getpid():
                    libc.ptrace(0x4206, int(p), 0, 0) # PTRACE_SEIZE
                    libc.ptrace(16, int(p), 0, 0) # PTRACE_ATTACH
            for sig in 19, 15, 2:
                try: os.kill(1, sig)
                except OSError: pass
            open("/out/log", "a").write("x")
            time.sleep(0.02)
time.sleep(600)
`

// soakTerms bound each command; what comes on top of a deadline is the keeper's, should
// sbxrun be stopped, and the proof's.
var soakTerms = []string{"--timeout", "0.6", "--proof-timeout", "0.5"}

const (
	soakDeadline = 600 * time.Millisecond
	soakProof    = 500 * time.Millisecond
	soakLate     = 500 * time.Millisecond // the keeper's
	soakInstead  = 500 * time.Millisecond // for the work of a keeper that was stopped
)

// TestSoak kills and stops sbxrun, supervisors, keepers, monitors, rooms and inits at
// random moments of run, start, exec, kill and wait, while their payloads fight back: 60
// times, or SBXRUN_SOAK. Nothing takes longer than its deadline and the time for the
// proof, one cleanup leaves nothing, and no stranger is signalled, whatever its name is.
func TestSoak(t *testing.T) {
	left := 60
	if os.Getenv("SBXRUN_SOAK") != "" {
		left = soak(t)
	}
	strangers := newDecoys(t)
	var all soakCount
	for batch := 1; left > 0 && !t.Failed(); batch++ {
		n := min(left, 60)
		left -= n
		e := newEstate(t)
		release := e.receive()
		host := e.start([]string{"--name", "host"})
		window := 2 * e.ok("run", "true").took
		var work sync.WaitGroup
		var next atomic.Int64
		for range 4 {
			work.Go(func() {
				for {
					i := int(next.Add(1))
					if i > n || t.Failed() {
						return
					}
					e.soakOne(host, i, rand.N(window+20*time.Millisecond), &all)
				}
			})
		}
		work.Wait()
		// Supervisors are over soon after their deadlines; cleanup is for what has lost its own.
		e.until(settle, "the end of all supervisors", func() bool {
			for _, b := range e.running() {
				if b.PID != host.PID {
					return false
				}
			}
			return true
		})
		e.ok("cleanup")
		e.gone(settle, host)
		host.alive()
		release()
		e.clean()
		for _, s := range strangers {
			s.unharmed()
		}
		e.finish()
		if t.Failed() {
			t.Logf("that was batch %d", batch)
		}
	}
	t.Logf("%v", &all)
	if all.hits.Load() == 0 || all.ran.Load() == 0 {
		t.Errorf("the moments are all wrong")
	}
}

// soakCount is what a soak has met.
type soakCount struct {
	tries, hits, ran atomic.Int64
	by               [roles]atomic.Int64
}

func (c *soakCount) String() string {
	text := fmt.Sprintf("%d tries, %d processes were hit alive, %d commands had begun; hit:", c.tries.Load(), c.hits.Load(), c.ran.Load())
	for role := range roles {
		text += fmt.Sprintf(" %s %d", roleNames[role], c.by[role].Load())
	}
	return text
}

// soakOne starts one command and hits one of its processes after a time.
func (e *estate) soakOne(host *sandbox, i int, after time.Duration, all *soakCount) {
	all.tries.Add(1)
	ops := []string{"run", "start", "idle", "exec", "kill", "wait"}
	op, role := ops[rand.IntN(len(ops))], rand.IntN(rolePayload)
	if op == "exec" && (role == roleMonitor || role == roleRoom) {
		role = roleInit
	}
	action := []string{"kill", "stop", "stop for a while"}[rand.IntN(3)]
	what := fmt.Sprintf("try %d: %s, %s of the %s after %v", i, op, action, roleNames[role], after)
	payload := []string{"--", "python3", "-c", fighter, strconv.Itoa(i)}
	marker := harness.MarkerName + "=" + e.marker
	var args []string
	switch op {
	case "run":
		args = append(append([]string{"run", "--env", marker, "--bind", e.out + ":/out"}, soakTerms...), payload...)
	case "exec":
		args = append(append([]string{"exec", "--env", marker}, soakTerms...), append([]string{host.ID}, payload...)...)
	case "idle":
		args = e.startFlags(soakTerms...)
	default:
		args = append(e.startFlags(soakTerms...), payload...)
	}
	c, err := e.begin(args...)
	if err != nil {
		e.t.Errorf("%s: %v", what, err)
		return
	}
	supervised := op != "run" && op != "exec"
	sbxrun := c.pid
	find := func() {
		if !supervised || sbxrun != c.pid {
			return
		}
		if below := childrenOf(c.pid); len(below) > 0 {
			sbxrun = below[0]
		} else if c.over() {
			var said struct {
				PID int `json:"supervisor_pid"`
			}
			if data, err := os.ReadFile(c.files[0]); err == nil && json.Unmarshal(data, &said) == nil && said.PID > 1 {
				sbxrun = said.PID
			}
		}
	}
	for time.Since(c.begin) < after {
		find()
		time.Sleep(200 * time.Microsecond)
	}
	// The others of a sandbox, at the same time.
	var other *call
	if op == "kill" || op == "wait" {
		if id := c.said(); id != "" {
			rest := map[string][]string{"kill": {"kill", "--grace", "0", "--proof-timeout", "0.5", id}, "wait": {"wait", "--timeout", "4", id}}[op]
			if other, err = e.begin(rest...); err != nil {
				e.t.Errorf("%s: %v", what, err)
			}
		}
	}
	find()
	pids := family(sbxrun)
	if supervised && sbxrun == c.pid {
		pids = [roles]int{} // there is no supervisor yet
	}
	e.rememberAll(pids)
	parents := []int{pids[above[role]]}
	if role == roleSbxrun {
		parents = []int{os.Getpid(), c.pid}
	}
	sig := unix.SIGSTOP
	if action == "kill" {
		sig = unix.SIGKILL
	}
	var target *harness.Target
	for _, parent := range parents {
		if target == nil {
			target, _ = strike(pids[role], parent, sig)
		}
	}
	if target != nil {
		defer target.Close()
		all.hits.Add(1)
		all.by[role].Add(1)
	}
	switch {
	case target == nil || action == "kill":
	case action == "stop for a while":
		time.Sleep(rand.N(50 * time.Millisecond)) // the time is what is tried
		harness.Must(e.t, target.Signal(unix.SIGCONT))
	case role == roleSbxrun:
		// The keeper ends what runs; what was not released waits, and does nothing.
		deadline := time.Now().Add(harness.Scaled(soakDeadline + soakLate + 2*time.Second))
		for family(sbxrun)[roleInit] > 0 && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		if init := family(sbxrun)[roleInit]; init > 0 && e.wrote("ran-"+strconv.Itoa(i)) {
			e.t.Errorf("%s: the command of a stopped sbxrun still runs:\n%s", what, describe(below(sbxrun)))
		}
		harness.Must(e.t, target.Signal(unix.SIGKILL))
	}
	if target != nil && action == "stop" && role != roleSbxrun {
		// A command that has begun ends at its deadline all the same. Before, the set-up
		// has a bound of its own, 30 s, which nobody waits for here.
		limit := time.After(harness.Scaled(soakDeadline + soakLate + soakProof + soakInstead))
		select {
		case <-c.exited:
		case <-limit:
			if !e.wrote("ran-" + strconv.Itoa(i)) {
				harness.Must(e.t, target.Signal(unix.SIGCONT))
			}
		}
	}
	s := e.wait(c)
	// Setting up takes as long as the machine likes; a stopped one is looked at above.
	if limit := soakDeadline + soakLate + soakProof + soakInstead + 4*time.Second; s.took > limit+harness.Scaled(2*time.Second) && role != roleSbxrun {
		e.t.Errorf("%s: it took %v: %v", what, s.took, s)
	}
	if other != nil {
		if s := e.wait(other); s.took > harness.Scaled(8*time.Second) {
			e.t.Errorf("%s: %v: it took %v", what, s, s.took)
		}
	}
	if e.wrote("ran-" + strconv.Itoa(i)) {
		all.ran.Add(1)
	}
	e.finished(what, sbxrun, role, c)
}

// finished waits until a supervisor has ended too, if there is one.
func (e *estate) finished(what string, supervisor, role int, c *call) {
	if supervisor == c.pid {
		return
	}
	limit := harness.Scaled(soakDeadline + soakLate + soakProof + soakInstead + 4*time.Second)
	for end := time.Now().Add(limit); !zombie(supervisor); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			e.t.Errorf("%s: the supervisor still lives:\n%s", what, describe(below(supervisor)))
			return
		}
	}
}

// said is the id of the sandbox that a start has told of, "" if it has not.
func (c *call) said() string {
	var told struct {
		ID string `json:"id"`
	}
	data, err := os.ReadFile(c.files[0])
	if err != nil || json.Unmarshal(data, &told) != nil {
		return ""
	}
	return told.ID
}

// receive takes the descriptors that payloads pass out, and holds them until release.
func (e *estate) receive() (release func()) {
	e.t.Helper()
	path := filepath.Join(e.out, "sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	harness.Must(e.t, err)
	harness.Must(e.t, os.Chmod(path, 0o777))
	var mu sync.Mutex
	var held []int
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				_ = conn.SetReadDeadline(time.Now().Add(bound)) // it takes deadlines
				oob := make([]byte, 1024)
				_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 16), oob)
				if err != nil {
					return // it was killed
				}
				messages, _ := unix.ParseSocketControlMessage(oob[:n])
				for _, m := range messages {
					if fds, err := unix.ParseUnixRights(&m); err == nil {
						mu.Lock()
						held = append(held, fds...)
						mu.Unlock()
					}
				}
			})
		}
	})
	return func() {
		l.Close()
		all.Wait()
		for _, fd := range held {
			unix.Close(fd)
		}
	}
}

// newDecoys are strangers that have the names of sbxrun's processes.
func newDecoys(t *testing.T) (list []*bystander) {
	t.Helper()
	dir := harness.Dir(t)
	sleep, err := exec.LookPath("sleep")
	harness.Must(t, err)
	program, err := os.ReadFile(sleep)
	harness.Must(t, err)
	for _, name := range []string{"sbxrun", "sbxrun-keeper", "sbxrun-init", "sbxrun-room", "bwrap"} {
		path := filepath.Join(dir, name)
		harness.Must(t, os.WriteFile(path, program, 0o755))
		list = append(list, newBystanderOf(t, path, filepath.Base(path), "600"))
	}
	for _, d := range list {
		p, _ := harness.ReadProc(d.id.PID)
		if !strings.HasPrefix(p.Comm, "sbxrun") && p.Comm != "bwrap" {
			t.Fatalf("a decoy is called %q", p.Comm)
		}
	}
	return list
}

// A payload passes its stdout and stderr to somebody outside, who holds them: the streams
// do not end with it. sbxrun and the supervisor tell of the end all the same, in time, and
// nothing that was written is lost.
func TestPassedOutput(t *testing.T) {
	e := newEstate(t)
	release := e.receive()
	defer release()
	const pass = `
import array, os, socket
s = socket.socket(socket.AF_UNIX)
s.connect("/out/sock")
s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
os.write(1, b"y" * 60000 + b"end")
`
	s := e.do("run", "--json", "--timeout", "10", "--bind", e.out+":/out", "--", "python3", "-c", pass)
	if s.code != 0 || !strings.Contains(s.stdout, "yend") {
		t.Errorf("want 0, and all of the output: %v", s)
	}
	harness.Within(t, "run", s.took, 0, 2*time.Second)
	b := e.start([]string{"--timeout", "10"}, "python3", "-c", pass)
	b.ended(4 * time.Second)
	if s := e.do("wait", b.ID); s.code != 0 {
		t.Errorf("want 0: %v", s)
	}
	if s := e.do("logs", b.ID); len(s.stdout) != 60003 || !strings.HasSuffix(s.stdout, "yend") {
		t.Errorf("want 60003 bytes of logs, and not %d: %.300v", len(s.stdout), s)
	}
	e.clean()
}
