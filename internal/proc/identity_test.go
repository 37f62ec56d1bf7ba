package proc

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func identify(t *testing.T, pid int) Identity {
	t.Helper()
	id, err := Identify(pid)
	check.Must(t, err)
	return id
}

func TestIdentity(t *testing.T) {
	c, end := held(t, "cat")
	id := identify(t, c.Process.Pid)
	check.Equal(t, identify(t, c.Process.Pid), id)
	ns, err := Namespace(os.Getpid(), "pid")
	check.Must(t, err)
	check.That(t, id.PID == c.Process.Pid && id.PIDNS == ns && id.Start != 0 && len(id.BootID) == 36, "%+v of process %d in namespace %d", id, c.Process.Pid, ns)
	data, err := json.Marshal(id)
	check.Must(t, err)
	var read Identity
	err = json.Unmarshal(data, &read)
	check.That(t, err == nil && read == id, "%s read back: %+v, %v", data, read, err)
	p, err := id.Open()
	check.Must(t, err)
	check.That(t, p.PID == id.PID && !p.Exited(), "opened process %d, exited: %v", p.PID, p.Exited())
	p.Close()

	// If any value differs, it is another process, and no descriptor stays open.
	first, err := ReadStat(1)
	check.Must(t, err)
	before := harness.Descriptors(t)
	for name, change := range map[string]func(*Identity){
		"start":        func(id *Identity) { id.Start++ },
		"start before": func(id *Identity) { id.Start-- },
		"no start":     func(id *Identity) { id.Start = 0 },
		"boot":         func(id *Identity) { id.BootID = strings.Repeat("0", 36) },
		"no boot":      func(id *Identity) { id.BootID = "" },
		"namespace":    func(id *Identity) { id.PIDNS++ },
		"no namespace": func(id *Identity) { id.PIDNS = 0 },
		"no such pid":  func(id *Identity) { id.PID = 1 << 22 },
		"pid 1":        func(id *Identity) { id.PID, id.Start, id.PIDNS = 1, first.Start, ns }, // correct, but PID 1
		"pid 0":        func(id *Identity) { id.PID = 0 },
		"pid -1":       func(id *Identity) { id.PID = -1 },
		"a group":      func(id *Identity) { id.PID = -id.PID },
		"nothing":      func(id *Identity) { *id = Identity{} },
	} {
		other := id
		change(&other)
		p, err := other.Open()
		check.That(t, err == ErrGone && p == nil, "%s: %v, %v; want %v", name, p, err, ErrGone)
	}
	after := harness.Descriptors(t)
	check.That(t, after <= before, "%d descriptors before, %d after", before, after)

	// A zombie has ended, and so has a reaped process.
	check.Must(t, c.Process.Kill())
	eventually(t, "a zombie", func() bool {
		st, err := ReadStat(id.PID)
		return err == nil && st.State == "Z"
	})
	for range 2 {
		p, err := id.Open()
		check.That(t, err == ErrGone && p == nil, "after its end: %v, %v", p, err)
		end()
	}
	got, err := Identify(id.PID)
	check.That(t, err == ErrGone && got == (Identity{}), "identified after its end: %+v, %v", got, err)
	after = harness.Descriptors(t)
	check.That(t, after <= before, "%d descriptors before, %d after", before, after)
}

// Open returns ErrGone if the PID has become a thread's ID, for which pidfd_open(2) fails.
func TestIdentityThread(t *testing.T) {
	tid, done := make(chan int, 2), make(chan struct{})
	defer close(done)
	for range 2 { // at most one of them is on the first thread
		go func() {
			runtime.LockOSThread()
			tid <- unix.Gettid()
			<-done
		}()
	}
	id := identify(t, os.Getpid())
	if id.PID = <-tid; id.PID == os.Getpid() {
		id.PID = <-tid
	}
	id.Start-- // an earlier process with this number
	_, err := Open(id.PID)
	check.Require(t, err != nil && err != ErrGone, "pidfd_open of thread %d: %v; want another error", id.PID, err)
	p, err := id.Open()
	check.That(t, err == ErrGone && p == nil, "%v, %v", p, err)
}

// Without a free descriptor the state of a process is unknown, which is not reported as its end.
func TestIdentityNoDescriptors(t *testing.T) {
	c, end := held(t, "cat")
	defer end()
	id := identify(t, c.Process.Pid)
	lowest := lowestDescriptor(t)
	restore := harness.LimitDescriptors(t, lowest)
	_, err := NSPID(c.Process.Pid)
	restore()
	check.That(t, errors.Is(err, unix.EMFILE), "NSPID: %v", err)
	for more := range 2 { // for the pidfd, and for the files read after it
		restore := harness.LimitDescriptors(t, lowest+more)
		p, err := id.Open()
		restore()
		check.That(t, errors.Is(err, unix.EMFILE) && p == nil, "with %d descriptors free: %v, %v", more, p, err)
	}
}

// lowestDescriptor returns the lowest free descriptor. Until the test ends, no garbage collection closes others.
func lowestDescriptor(t *testing.T) int {
	t.Helper()
	percent := debug.SetGCPercent(-1)
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	lowest, err := unix.Dup(0)
	check.Must(t, err)
	unix.Close(lowest)
	return lowest
}

// Neither an identity nor a handle of a process reaches another one with the same PID in the same namespace. In its
// own PID namespace, the test can choose the next PID.
func TestPIDReuse(t *testing.T) {
	const inside = "SBXRUN_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		c := exec.Command("unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", os.Args[0], "-test.run=^TestPIDReuse$")
		c.Env = append(os.Environ(), inside+"=1")
		out, err := c.CombinedOutput()
		check.That(t, err == nil, "in a PID namespace of its own: %v\n%s", err, out)
		return
	}
	c, end := held(t, "cat")
	first, p := identify(t, c.Process.Pid), open(t, c.Process.Pid)
	end()
	for range 1000 {
		check.Must(t, os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(first.PID-1)), 0))
		d, end := held(t, "cat")
		if d.Process.Pid != first.PID {
			end() // a thread of this process has taken the PID
			continue
		}
		second := identify(t, first.PID)
		if second.Start == first.Start {
			end() // both started in the same clock tick
			continue
		}
		again, err := first.Open()
		check.That(t, err == ErrGone && again == nil, "the first process: %v, %v", again, err)
		check.Equal(t, p.Signal(unix.SIGKILL), ErrGone, "signal to the first process")
		fd, err := p.OpenRoot()
		check.That(t, err == ErrGone, "its root: %d, %v, want %v", fd, err, ErrGone)
		check.That(t, p.Exited(), "the first process is taken for the second")
		q, err := second.Open()
		check.Require(t, err == nil, "the second process: %v", err)
		defer q.Close()
		check.That(t, !q.Exited(), "the second process is gone")
		fd, err = q.OpenRoot()
		check.That(t, err == nil, "its root: %v", err)
		unix.Close(fd)
		end()
		return
	}
	t.Error("the number was never reused")
}
