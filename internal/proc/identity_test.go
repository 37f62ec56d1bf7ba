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
)

func identify(t *testing.T, pid int) Identity {
	t.Helper()
	id, err := Identify(pid)
	check.Must(t, err)
	return id
}

// countDescriptors counts the open descriptors of this process.
func countDescriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	check.Must(t, err)
	return len(list)
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
	if err := json.Unmarshal(data, &read); err != nil || read != id {
		t.Errorf("%s read back: %+v, %v", data, read, err)
	}
	p, err := id.Open()
	check.Must(t, err)
	if p.PID != id.PID || p.Exited() {
		t.Errorf("opened process %d, exited: %v", p.PID, p.Exited())
	}
	p.Close()

	// If any value differs, it is another process, and no descriptor stays open.
	before := countDescriptors(t)
	for name, change := range map[string]func(*Identity){
		"start":        func(id *Identity) { id.Start++ },
		"start before": func(id *Identity) { id.Start-- },
		"no start":     func(id *Identity) { id.Start = 0 },
		"boot":         func(id *Identity) { id.BootID = strings.Repeat("0", 36) },
		"no boot":      func(id *Identity) { id.BootID = "" },
		"namespace":    func(id *Identity) { id.PIDNS++ },
		"no namespace": func(id *Identity) { id.PIDNS = 0 },
		"no such pid":  func(id *Identity) { id.PID = 1 << 22 },
		"pid 1":        func(id *Identity) { *id = identify(t, os.Getpid()); id.PID = 1 },
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
	after := countDescriptors(t)
	check.That(t, after <= before, "%d descriptors before, %d after", before, after)

	// A zombie has ended, and so has a reaped process.
	err = c.Process.Kill()
	check.Must(t, err)
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
	after = countDescriptors(t)
	check.That(t, after <= before, "%d descriptors before, %d after", before, after)
}

// Open never opens process 1, even if all other values are correct.
func TestIdentityOfPID1(t *testing.T) {
	id := Identity{PID: 1, BootID: identify(t, os.Getpid()).BootID}
	st, err := ReadStat(1)
	check.Must(t, err)
	id.Start = st.Start
	id.PIDNS = identify(t, os.Getpid()).PIDNS
	p, err := id.Open()
	check.That(t, err == ErrGone && p == nil, "%v, %v", p, err)
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
	restore := limitDescriptors(t, lowest)
	_, err := NSPID(c.Process.Pid)
	restore()
	check.That(t, errors.Is(err, unix.EMFILE), "NSPID: %v", err)
	for more := range 2 { // for the pidfd, and for the files read after it
		restore := limitDescriptors(t, lowest+more)
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

// limitDescriptors allows no new descriptors from n on until restore is called.
func limitDescriptors(t *testing.T, n int) (restore func()) {
	t.Helper()
	var limit unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := unix.Rlimit{Cur: uint64(n), Max: limit.Max}
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	return func() {
		check.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	}
}

// Open returns ErrGone if another process has the same PID in the same namespace.
func TestIdentityPIDReuse(t *testing.T) {
	const inside = "SBXRUN_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		c := exec.Command("unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", os.Args[0], "-test.run=^TestIdentityPIDReuse$")
		c.Env = append(os.Environ(), inside+"=1")
		out, err := c.CombinedOutput()
		check.That(t, err == nil, "in a PID namespace of its own: %v\n%s", err, out)
		return
	}
	c, end := held(t, "cat")
	first := identify(t, c.Process.Pid)
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
		p, err := first.Open()
		check.That(t, err == ErrGone && p == nil, "the first process: %v, %v", p, err)
		p, err = second.Open()
		check.Require(t, err == nil, "the second process: %v", err)
		p.Close()
		end()
		return
	}
	t.Error("the number was never reused")
}
