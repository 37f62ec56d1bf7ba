package pool_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/pool"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// bound limits each wait in these tests.
var bound = harness.Bound

// bare is a policy that shows only the host's system directories.
var bare = room.Policy{Cwd: room.CwdNone}

// policy returns a policy that also shows the fixtures.
func policy(t *testing.T) room.Policy {
	return room.Policy{
		Cwd: room.CwdNone, TmpSize: 16 << 20,
		Mounts: []room.Mount{{Source: harness.FixturesDir(t), Dest: "/fixtures"}, {Kind: room.Tmpfs, Dest: "/var/data", Size: 1 << 20}},
	}
}

// warm returns a pool and checks at the end of the test that all its processes have exited.
func warm(t *testing.T, policy room.Policy, sizes pool.Sizes) *pool.Pool {
	t.Helper()
	p := pool.New(slot.Policy{Policy: policy}, sizes, func(err error) { t.Error(err) })
	t.Cleanup(func() {
		p.Close()
		left := below(t)
		check.That(t, len(left) == 0, "left: %+v", left)
	})
	return p
}

// below returns this process's descendants.
func below(t *testing.T) []proc.Stat {
	t.Helper()
	return proc.Descendants(os.Getpid(), 1000)
}

// take waits for a room.
func take(t *testing.T, p *pool.Pool, tenant string) *pool.Room {
	t.Helper()
	for end := time.Now().Add(bound); ; time.Sleep(time.Millisecond) {
		if r := p.Take(tenant, limits.Request{}); r != nil {
			return r
		}
		check.Require(t, !time.Now().After(end), "no room is ready")
	}
}

// in runs a command in a taken room and gives the room back.
func in(t *testing.T, r *pool.Room, spec supervise.Options, args ...string) (*result.Result, string) {
	t.Helper()
	defer r.Give()
	var out bytes.Buffer
	spec.Stdout, spec.Stderr = &out, &out
	if spec.Timeout == 0 {
		spec.Timeout = bound
	}
	spec.ProofTimeout = harness.Scaled(5 * time.Second)
	run, err := r.Start(t.Context(), slot.Command{Args: args, Options: spec})
	check.Must(t, err)
	res, err := run.Wait()
	check.Require(t, res != nil && res.Verdict == result.Proven, "%q: %+v, %v", args, res, err)
	return res, out.String()
}

// leave writes wherever a command can write, and look prints what it finds there.
const (
	leave = `for d in /tmp /home/sandbox /dev/shm /var/data; do echo secret >$d/left || exit 1; done
		ipcmk -Q >/dev/null && ipcmk -M 100 >/dev/null && ipcmk -S 1 >/dev/null || exit 2
		mkfifo ready; python3 -c 'import socket, time
s = socket.socket(socket.AF_UNIX); s.bind("\0left"); s.listen()
open("ready", "w").write("ready\\n"); time.sleep(1000)' & read -r x <ready; setsid sleep 1000 & export LEFT=1; umask 0; exit 0`
	look = `ls -A /tmp /home/sandbox /dev/shm /var/data; ipcs -qms | grep 0x; set -- /proc/[0-9]*; echo $#; env | grep LEFT; cat /proc/net/unix | grep -c left; umask; pwd; ls -l /proc/self/fd | grep -c -e pipe -e socket`
)

const nothing = "/dev/shm:\n\n/home/sandbox:\n\n/tmp:\n\n/var/data:\n2\n0\n0022\n/home/sandbox\n2\n"

// Close does not wait for a room whose build hangs.
func TestCloseWhileBuilding(t *testing.T) {
	dir := t.TempDir()
	text := "#!/bin/sh\nexec sleep 1000\n"
	check.Must(t, os.WriteFile(filepath.Join(dir, "bwrap"), []byte(text), 0o700))
	for _, name := range []string{filepath.Join(dir, "bwrap"), dir, filepath.Dir(dir)} { // also for whom root becomes
		check.Must(t, os.Chmod(name, 0o755))
	}
	t.Setenv("SBXRUN_BWRAP", filepath.Join(dir, "bwrap"))
	p := warm(t, bare, pool.Sizes{Min: 1, Max: 1})
	harness.Until(t, bound, "a bwrap that builds", func() bool {
		return slices.ContainsFunc(below(t), func(st proc.Stat) bool { return st.Comm == "sleep" })
	})
	begun := time.Now()
	p.Close()
	took := time.Since(begun)
	check.That(t, took <= room.SetupBound/2, "it took %v", took)
}

// A call finds no trace of the call before it.
func TestCallsAreIsolated(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	for range 3 {
		_, text := in(t, take(t, p, "a"), supervise.Options{}, "sh", "-c", look)
		check.That(t, text == nothing, "%q", text)
		res, text := in(t, take(t, p, "a"), supervise.Options{}, "sh", "-c", leave)
		check.That(t, res.ExitCode() == 0 && res.Strays == 2, "%+v, %q", res, text)
	}
}

// An init uses no CPU time while its command runs.
func TestInitSleeps(t *testing.T) {
	p := warm(t, bare, pool.Sizes{Min: 1, Max: 1})
	r := take(t, p, "a")
	defer r.Give()
	in, hold := io.Pipe()
	defer hold.Close()
	out, w := io.Pipe()
	run, err := r.Start(t.Context(), slot.Command{
		Args: []string{"sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; read x"}, Options: supervise.Options{Stdin: in, Stdout: w, Timeout: bound},
	})
	check.Must(t, err)
	line, err := bufio.NewReader(out).ReadString('\n')
	check.Require(t, line == "done\n", "%q, %v", line, err)
	var init, payload proc.Stat
	// A list of children that changes during the read may be incomplete (proc(5)).
	harness.Until(t, bound, "the command among what is below", func() bool {
		list := below(t)
		of := func(is func(proc.Stat) bool) (st proc.Stat) {
			if i := slices.IndexFunc(list, is); i >= 0 {
				st = list[i]
			}
			return st
		}
		payload = of(func(st proc.Stat) bool { return st.Comm == "sh" })
		init = of(func(st proc.Stat) bool { return st.PID == payload.Parent })
		return init.PID != 0
	})
	own, its := init.CPU.User+init.CPU.System, payload.CPU.User+payload.CPU.System
	check.That(t, its != 0 && own <= its/4, "init has used %v while its command used %v", own, its)
	hold.Close()
	res, err := run.Wait()
	check.That(t, err == nil && res.Verdict == result.Proven, "%+v, %v", res, err)
}

// one identifies a process even after its PID is reused.
type one struct {
	pid   int
	start uint64
}

// theRoom returns PID 1 of the only room.
func theRoom(t *testing.T) (room one) {
	t.Helper()
	harness.Until(t, bound, "the room among what is below", func() bool { // a list that changes may be incomplete (proc(5))
		for _, st := range below(t) {
			if st.Comm != "sbxrun-room" || st.State == "Z" {
				continue
			}
			check.That(t, room.pid == 0, "more than one room: %d, %d", room.pid, st.PID)
			room = one{st.PID, st.Start}
		}
		return room.pid != 0
	})
	return room
}

// A room serves one tenant; if another tenant needs its slot, the pool ends it and builds a new one.
func TestRoomServesOneTenant(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	of := func(tenant string) one {
		r := take(t, p, tenant)
		room := theRoom(t)
		in(t, r, supervise.Options{}, "true")
		return room
	}
	a := of("a")
	check.Equal(t, of("a"), a)
	b := of("b")
	check.That(t, b != a, "two tenants have had one room: %v", a)
	check.Equal(t, of("b"), b)
}

// A room is replaced after Sizes.Calls calls.
func TestRoomIsReplacedAfterCalls(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1, Calls: 2})
	var rooms []one
	for range 6 {
		r := take(t, p, "a")
		rooms = append(rooms, theRoom(t))
		in(t, r, supervise.Options{}, "true")
	}
	for i, room := range rooms {
		check.That(t, i <= 0 || (room == rooms[i-1]) == (i%2 == 1), "%v", rooms)
	}
}

// The result of a call states its cause, exit code and output, however the call ends.
func TestResultOfEachEnd(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 2, Max: 4})
	short := harness.Deadline(300 * time.Millisecond)
	for _, c := range []struct {
		name  string
		spec  supervise.Options
		args  []string
		cause result.Cause
		code  int
	}{
		{"a script without an interpreter line", supervise.Options{}, []string{"sh", "-c", "echo exit 5 >x; chmod +x x; exec env ./x"}, result.Exited, 5},
		{"output", supervise.Options{MaxOutput: 1000}, []string{"yes"}, result.OutputLimit, 153},
		{"daemon", supervise.Options{Timeout: short}, []string{"/fixtures/tree-daemon"}, result.Timeout, 124},
		{"session", supervise.Options{Timeout: short}, []string{"/fixtures/tree-setsid"}, result.Timeout, 124},
		{"immune", supervise.Options{Timeout: short, Grace: short}, []string{"/fixtures/tree-term-immune"}, result.Timeout, 124},
		{"stopped", supervise.Options{Timeout: short}, []string{"/fixtures/tree-stopped"}, result.Timeout, 124},
		{"signal to all", supervise.Options{Timeout: short}, []string{"/fixtures/signal-all", "kill-init"}, result.Timeout, 124},
		{"stopped init", supervise.Options{Timeout: short}, []string{"/fixtures/signal-all", "stop-parent"}, result.Timeout, 124},
		{"fork bomb", supervise.Options{Timeout: short}, []string{"/fixtures/fork-bomb", "sleep"}, result.Timeout, 124},
		{"nested namespaces", supervise.Options{}, []string{"/fixtures/nested", "unshare"}, result.Exited, 1},
		{"nested sandbox", supervise.Options{}, []string{"/fixtures/nested", "bwrap"}, result.Exited, 1},
		{"zombies", supervise.Options{Timeout: short}, []string{"/fixtures/leave-zombies"}, "", -1},
		{"writer left", supervise.Options{Timeout: short}, []string{"/fixtures/leave-writer"}, "", -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for range 2 {
				res, text := in(t, take(t, p, "a"), c.spec, c.args...)
				check.That(t, c.code < 0 || res.Cause == c.cause && res.ExitCode() == c.code, "%s, %d, %q", res.Cause, res.ExitCode(), text)
				if c.spec.Timeout > 0 {
					harness.Within(t, "the call", res.Duration, 0, 2*c.spec.Timeout+time.Second)
				}
			}
		})
	}
}

// A closed connection stays in TIME_WAIT for a minute. A room with one is replaced, so the next call neither sees
// the connection nor finds its port in use; a room without one is used again.
func TestConnections(t *testing.T) {
	p := warm(t, bare, pool.Sizes{Min: 1, Max: 1})
	const talk = `import socket
print(len(open("/proc/net/tcp").readlines()) + len(open("/proc/net/tcp6").readlines()))
family, address = %s
s = socket.socket(family); s.bind((address, 5555)); s.listen()
c = socket.create_connection((address, 5555)); a, _ = s.accept()
%s
`
	// A peer's address stays in tables that every process may read, and packets in the interface's counters.
	const datagram = `import socket
print(sum(int(n) for n in open("/proc/net/dev").readlines()[-1].split()[1:]) + 2)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.1.2.3", 0)); s.sendto(b"x", s.getsockname())
`
	of := func(script string) (room one) {
		r := take(t, p, "a")
		room = theRoom(t)
		_, text := in(t, r, supervise.Options{}, "python3", "-c", script)
		check.That(t, text == "2\n", "%q", text)
		return room
	}
	var last one
	for _, script := range []string{fmt.Sprintf(talk, "socket.AF_INET, '127.0.0.1'", "a.close()"), fmt.Sprintf(talk, "socket.AF_INET6, '::1'", ""), fmt.Sprintf(talk, "socket.AF_INET, '127.0.0.1'", "c.close()"), datagram, datagram} {
		room := of(script)
		check.That(t, room != last, "the room is used again")
		last = room
	}
	const quiet = "import asyncio, socket\nsocket.getaddrinfo('localhost', 80)\nasyncio.run(asyncio.sleep(0))\nsocket.socketpair()\nprint(2)"
	first := of(quiet)
	check.That(t, first != last, "the room is used again")
	// The kernel may take longer to free sockets than the room waits.
	harness.Until(t, bound, "a room that is used again", func() bool {
		last, first = first, of(quiet)
		return last == first
	})
}

// A call has its own terminals and its own /dev/pts, whose mode and times the next call does not see.
func TestTerminals(t *testing.T) {
	p := warm(t, bare, pool.Sizes{Min: 1, Max: 1})
	for range 2 {
		r := take(t, p, "a")
		_, text := in(t, r, supervise.Options{}, "python3", "-c", `import os
a, b = os.openpty()
print(os.ttyname(b), os.stat("/dev/pts").st_mode & 0o777)
os.chmod("/dev/pts/ptmx", 0)`)
		check.That(t, text == "/dev/pts/0 493\n", "%q", text)
	}
}

// A room is not used again after an unproven teardown, and its end also ends the survivors.
func TestUnproven(t *testing.T) {
	p := warm(t, bare, pool.Sizes{Min: 1, Max: 1})
	var room one
	harness.Until(t, bound, "an unproven teardown", func() bool { // all may be dead when the proof is looked for
		r := take(t, p, "a")
		defer r.Give()
		room = theRoom(t)
		run, err := r.Start(t.Context(), slot.Command{
			Args: []string{"sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do setsid sleep 1000 & done; wait"}, Options: supervise.Options{Timeout: 200 * time.Millisecond, ProofTimeout: 1},
		})
		check.Must(t, err)
		res, _ := run.Wait()
		check.Require(t, res != nil, "no result")
		return res.Verdict == result.Unproven
	})
	r := take(t, p, "a")
	check.That(t, theRoom(t) != room, "the room is used again")
	in(t, r, supervise.Options{}, "true")
}

// A hostile command affects neither a concurrent command in another room nor the next one in its own.
func TestHostile(t *testing.T) {
	outside := harness.SharedDir(t)
	stranger(t, outside+"/socket")
	its := policy(t)
	its.Mounts = append(its.Mounts, room.Mount{Source: outside, Dest: "/outside"})
	p := warm(t, its, pool.Sizes{Min: 2, Max: 2})
	for _, args := range [][]string{
		{"/fixtures/fork-chain"},
		{"env", "FIXTURE_COUNT=100", "/fixtures/many-stopped"},
		{"env", "FIXTURE_COUNT=200", "/fixtures/many-threads"},
		{"/fixtures/tree-nested"},
		{"sh", "-c", "ulimit -n 4000; exec /fixtures/user-exhaust descriptors"}, // others need some, too
		{"/fixtures/user-exhaust", "watches", "20000"},
		{"/fixtures/leave-descriptor", "/outside/socket", "wait"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			r := take(t, p, "a")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out, w := io.Pipe()
			run, err := r.Start(ctx, slot.Command{Args: args, Options: supervise.Options{Stdout: w, Stderr: w, Timeout: bound, ProofTimeout: harness.Scaled(5 * time.Second)}})
			check.Must(t, err)
			text := ""
			for lines := bufio.NewReader(out); !strings.HasPrefix(text, "ready ") && !strings.HasPrefix(text, "sent "); {
				text, err = lines.ReadString('\n')
				check.Must(t, err)
			}
			go func() { _, _ = io.Copy(io.Discard, out) }()
			_, text = in(t, take(t, p, "b"), supervise.Options{}, "sh", "-c", look)
			check.That(t, text == nothing, "meanwhile: %q", text)
			cancel()
			begun := time.Now()
			res, err := run.Wait()
			check.That(t, err == nil && res.Cause == result.Canceled && res.Verdict == result.Proven, "%+v, %v", res, err)
			harness.Within(t, "the end", time.Since(begun), 0, 5*time.Second)
			out.Close()
			r.Give()
			_, text = in(t, take(t, p, "a"), supervise.Options{}, "sh", "-c", look)
			check.That(t, text == nothing, "afterwards: %q", text)
		})
	}
}

// stranger receives descriptors on a socket and holds them until the end of the test.
func stranger(t *testing.T, address string) {
	t.Helper()
	l, err := net.Listen("unix", address)
	if err == nil {
		err = os.Chmod(address, 0o777)
	}
	check.Must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		b, control := make([]byte, 1), make([]byte, unix.CmsgSpace(2*4))
		_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(b, control)
		if err != nil {
			t.Error(err)
			return
		}
		messages, err := unix.ParseSocketControlMessage(control[:n])
		if err != nil || len(messages) != 1 {
			t.Error(len(messages), err)
			return
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		check.OK(t, err)
		_, _ = conn.Write(b)
		<-t.Context().Done()
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
}

// A payload in a warm room has the same system call filter as in any other sandbox.
func TestSeccomp(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	_, text := in(t, take(t, p, "a"), supervise.Options{}, "python3", "-c", harness.SystemCalls)
	harness.Filtered(t, "a warm room", text)
}

// The filter of a warm room allows mounts and namespaces for the maker; a payload has no capability and can make
// neither.
func TestPrivileges(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	_, text := in(t, take(t, p, "a"), supervise.Options{}, "python3", "-c", `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *args):
    ctypes.set_errno(0)
    if getattr(libc, name)(*args) == 0 or ctypes.get_errno() not in (1, 28): # EPERM; ENOSPC: user namespaces are switched off
        print(name, args, ctypes.get_errno())
refused("mount", b"x", b"/tmp", b"tmpfs", 0, None)
refused("umount2", b"/tmp", 0)
refused("umount2", b"/proc", 2)
for flag in (0x00020000, 0x20000000, 0x08000000, 0x40000000, 0x02000000, 0x04000000, 0x10000000):
    refused("unshare", flag)
fd = os.open("/proc/self/ns/mnt", 0)
refused("setns", fd, 0)
refused("sethostname", b"x", 1)
refused("chroot", b"/tmp")
refused("ptrace", 16, 1, 0, 0)
refused("prctl", 24, 0, 0, 0, 0)
for line in open("/proc/self/status"):
    if line.startswith(("Cap", "NoNewPrivs", "Seccomp:")): print(line.split()[1])
for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/fd", "/proc/1/root"):
    try:
        os.listdir(path) if path.endswith(("fd", "root")) else open(path, "rb").read(1)
        print(path)
    except PermissionError: pass
os.nice(1) # setpriority(2)
`)
	zero := strings.Repeat("0", 16)
	want := strings.Repeat(zero+"\n", 5) + "1\n2\n"
	check.That(t, text == want, "%q, want %q", text, want)
}

// A payload can neither take over PID 1 of its call nor reach beyond its namespaces.
func TestTakeover(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	for range 2 {
		res, text := in(t, take(t, p, "a"), supervise.Options{Timeout: harness.Deadline(2 * time.Second)}, "/fixtures/takeover")
		check.That(t, res.Cause != result.Lost, "%+v, %q", res, text)
	}
}

// If a room's process is killed from outside, only one call fails; the next gets another room.
func TestKilledProcessReplacesRoom(t *testing.T) {
	p := pool.New(slot.Policy{Policy: policy(t)}, pool.Sizes{Min: 1, Max: 2}, func(error) {})
	defer p.Close()
	for _, name := range []string{"sbxrun-maker", "sbxrun-init", "sbxrun-room", "sbxrun-keeper", "bwrap"} {
		for _, running := range []bool{false, true} {
			r := take(t, p, "a")
			if !running {
				kill(t, name)
			}
			run, err := r.Start(t.Context(), slot.Command{Args: []string{"sleep", "1"}})
			if err == nil {
				if running {
					kill(t, name)
				}
				res, err := run.Wait()
				check.That(t, res != nil && res.Verdict == result.Proven, "%s, %v: %+v, %v", name, running, res, err)
			}
			r.Give()
			// The killed process may belong to the next call, which then fails to start.
			r = take(t, p, "a")
			if _, err := r.Start(t.Context(), slot.Command{Args: []string{"true"}}); err != nil {
				r.Give()
				r = take(t, p, "a")
				_, err := r.Start(t.Context(), slot.Command{Args: []string{"true"}})
				check.That(t, err == nil, "%s, %v: %v", name, running, err)
			}
			r.Give()
		}
	}
}

// kill kills the first descendant with a name. It waits for one, because the next call's init is made in the
// background.
func kill(t *testing.T, name string) {
	t.Helper()
	harness.Until(t, bound, "a process "+name+" to be killed", func() bool {
		for _, st := range below(t) {
			if st.Comm == name && st.State != "Z" && unix.Kill(st.PID, unix.SIGKILL) == nil {
				return true
			}
		}
		return false
	})
}

// A warm room takes a large command.
func TestLargeCommand(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	var env []string
	for i := range 12 {
		env = append(env, "V"+strconv.Itoa(i)+"="+strings.Repeat("x", 100_000))
	}
	r := take(t, p, "a")
	defer r.Give()
	var out bytes.Buffer
	run, err := r.Start(t.Context(), slot.Command{Args: []string{"sh", "-c", "echo ${#V0} ${#V8} $PWD $X"}, Env: append(env, "X=1", "X=2"), Dir: "/usr", Options: supervise.Options{Stdout: &out}})
	check.Must(t, err)
	res, err := run.Wait()
	check.That(t, err == nil && out.String() == "100000 100000 /usr 2\n", "%+v, %v, %q", res, err, &out)
}

// Concurrent calls of several tenants end with the right results.
func TestConcurrentCalls(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 2, Max: 5, Calls: 10})
	var calls sync.WaitGroup
	for client := range 8 {
		calls.Go(func() {
			for i := range 25 {
				r := take(t, p, "tenant "+strconv.Itoa(client%3))
				want := strconv.Itoa(client) + " " + strconv.Itoa(i)
				script, spec := "echo "+want, supervise.Options{}
				if i%3 == 0 {
					script, spec.Timeout = script+"; setsid sleep 1000 & sleep 1000", harness.Deadline(50*time.Millisecond)
				}
				res, text := in(t, r, spec, "sh", "-c", script)
				check.That(t, text == want+"\n" || res.Cause == result.Timeout, "%s: %+v, %q", want, res, text)
			}
		})
	}
	calls.Wait()
}

// Each call has its own limits, and its report mentions only limits that it met itself.
func TestLimits(t *testing.T) {
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	hit := func(res *result.Result, name string) (told, hit bool) {
		for _, l := range res.Limits {
			if l.Name == name {
				return l.Enforced, l.Hit
			}
		}
		return false, false
	}
	if _, err := limits.For(limits.Request{Memory: 1 << 20, Pids: 10, CPUs: 1}, true, nil, limits.Request{}); err != nil {
		r := take(t, p, "a")
		defer r.Give()
		_, err := r.Start(t.Context(), slot.Command{Args: []string{"true"}, Options: supervise.Options{Limits: limits.Request{Pids: 10}}})
		check.That(t, result.CodeOf(err) == "limit", "%v", err)
		return
	}
	for range 2 {
		res, text := in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{Pids: 10}}, "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; exit 5")
		told, pids := hit(res, "pids")
		check.That(t, told && pids, "%+v, %q", res, text)
		res, text = in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{Pids: 10, FSize: 1000}}, "sh", "-c", "for i in 1 2 3 4; do sleep 1000 & done; ulimit -f; exit 5")
		told, pids = hit(res, "pids")
		check.That(t, told && !pids && res.ExitCode() == 5, "%+v, %q", res, text)
		res, text = in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{Memory: 64 << 20}}, "python3", "-c", "x = bytearray(500 << 20)")
		told, memory := hit(res, "memory")
		check.That(t, told && memory && res.Cause == result.OOM, "%+v, %q", res, text)
		res, text = in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{Memory: 128 << 20}}, "python3", "-c", "x = bytearray(30 << 20)")
		told, memory = hit(res, "memory")
		check.That(t, told && !memory && res.ExitCode() == 0, "%+v, %q", res, text)
		res, text = in(t, take(t, p, "a"), supervise.Options{}, "python3", "-c", "import os; x = bytearray(200 << 20); print(len(os.sched_getaffinity(0)))")
		check.That(t, res.ExitCode() == 0 && len(res.Limits) == 0 && res.MemoryPeak == 0 && text == strconv.Itoa(runtime.NumCPU())+"\n", "%+v, %q", res, text)
		// Not python, which takes up to half a minute to start with a fraction of a CPU.
		res, text = in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{CPUs: 0.03}}, "sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; nproc")
		told, cpus := hit(res, "cpus")
		check.That(t, told && cpus && text == "1\n", "%+v, %q", res, text)
		used := res.CPUUser + res.CPUSystem
		check.That(t, used >= 10*time.Millisecond && used <= res.Duration/2, "%v of CPU time in %v", used, res.Duration)
	}
	for range 2 {
		res, text := in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{CPUTime: 300 * time.Millisecond}}, "sh", "-c", "while :; do :; done")
		told, cpu := hit(res, "cpu-time")
		check.That(t, told && cpu && res.Cause == result.CPUTime, "%+v, %q", res, text)
		// The room's cgroup also counts the CPU time for making the next init.
		used := res.CPUUser + res.CPUSystem
		check.That(t, used >= 100*time.Millisecond, "ended after %v", used)
	}
	r := take(t, p, "a")
	defer r.Give()
	_, err := r.Start(t.Context(), slot.Command{Args: []string{"true"}, Options: supervise.Options{Limits: limits.Request{Memory: 1 << 20, MemorySwap: 2 << 20}}})
	check.That(t, errors.Is(err, limits.ErrRenew), "%v", err)
}

// The CPU quota of a command stays in place only for a next command with the same limit.
func TestQuotaStays(t *testing.T) {
	if _, err := limits.For(limits.Request{CPUs: 0.5}, true, nil, limits.Request{}); err != nil {
		return // TestLimits covers refused limits
	}
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	for i, cpus := range []float64{0.5, 0.5, 0, 0.5, 0.25, 0} {
		r := take(t, p, "a")
		run, err := r.Start(t.Context(), slot.Command{Args: []string{"sleep", "0.1"}, Options: supervise.Options{Limits: limits.Request{CPUs: cpus}, Timeout: bound}})
		check.Must(t, err)
		quota := ""
		for _, dir := range run.Group.Dirs() {
			for _, name := range []string{"cpu.max", "cpu.cfs_quota_us"} {
				text, _ := os.ReadFile(dir + "/" + name) // only one of the v1 and v2 files exists
				quota += strings.TrimSpace(string(text))
			}
		}
		want := strconv.Itoa(int(cpus * 100_000))
		check.That(t, (cpus <= 0 || strings.HasPrefix(quota, want)) && (cpus != 0 || len(quota) >= 2 && !strings.HasPrefix(quota, "50000") && !strings.HasPrefix(quota, "25000")),
			"call %d, of %v CPUs, has the quota %q", i, cpus, quota)
		_, err = run.Wait()
		check.OK(t, err)
		r.Give()
	}
}

// Concurrent commands with one CPU each are spread over the CPUs.
func TestCPUsSpread(t *testing.T) {
	if _, err := limits.For(limits.Request{CPUs: 1}, true, nil, limits.Request{}); err != nil || runtime.NumCPU() == 1 {
		return // TestLimits covers refused limits
	}
	p := warm(t, policy(t), pool.Sizes{Min: 1, Max: 1})
	seen := map[string]bool{}
	for range runtime.NumCPU() {
		_, text := in(t, take(t, p, "a"), supervise.Options{Limits: limits.Request{CPUs: 1}}, "sh", "-c", "grep Cpus_allowed_list /proc/self/status")
		seen[text] = true
	}
	check.That(t, len(seen) == runtime.NumCPU(), "%d CPUs for as many commands as there are of them, which is %d: %v", len(seen), runtime.NumCPU(), seen)
}
