package proc

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func identify(t *testing.T, pid int) Identity {
	t.Helper()
	id, err := Identify(pid)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// countDescriptors counts the open descriptors of this process.
func countDescriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestIdentity(t *testing.T) {
	c, end := held(t, "cat")
	id := identify(t, c.Process.Pid)
	if again := identify(t, c.Process.Pid); again != id {
		t.Errorf("%+v, and then %+v", id, again)
	}
	ns, err := Namespace(os.Getpid(), "pid")
	if err != nil {
		t.Fatal(err)
	}
	if id.PID != c.Process.Pid || id.PIDNS != ns || id.Start == 0 || len(id.BootID) != 36 {
		t.Errorf("%+v of process %d in namespace %d", id, c.Process.Pid, ns)
	}
	data, err := json.Marshal(id)
	if err != nil {
		t.Fatal(err)
	}
	var read Identity
	if err := json.Unmarshal(data, &read); err != nil || read != id {
		t.Errorf("%s read back: %+v, %v", data, read, err)
	}
	p, err := id.Open()
	if err != nil {
		t.Fatal(err)
	}
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
		if p, err := other.Open(); err != ErrGone || p != nil {
			t.Errorf("%s: %v, %v; want %v", name, p, err, ErrGone)
		}
	}
	if after := countDescriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}

	// A zombie has ended, and so has a reaped process.
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a zombie", func() bool {
		st, err := ReadStat(id.PID)
		return err == nil && st.State == "Z"
	})
	for range 2 {
		if p, err := id.Open(); err != ErrGone || p != nil {
			t.Errorf("after its end: %v, %v", p, err)
		}
		end()
	}
	if got, err := Identify(id.PID); err != ErrGone || got != (Identity{}) {
		t.Errorf("identified after its end: %+v, %v", got, err)
	}
	if after := countDescriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// Open never opens process 1, even if all other values are correct.
func TestIdentityOfPID1(t *testing.T) {
	id := Identity{PID: 1, BootID: identify(t, os.Getpid()).BootID}
	st, err := ReadStat(1)
	if err != nil {
		t.Fatal(err)
	}
	id.Start = st.Start
	id.PIDNS = identify(t, os.Getpid()).PIDNS
	if p, err := id.Open(); err != ErrGone || p != nil {
		t.Errorf("%v, %v", p, err)
	}
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
	if _, err := Open(id.PID); err == nil || err == ErrGone {
		t.Fatalf("pidfd_open of thread %d: %v; want another error", id.PID, err)
	}
	if p, err := id.Open(); err != ErrGone || p != nil {
		t.Errorf("%v, %v", p, err)
	}
}

// Without a free descriptor the state of a process is unknown, which is not reported as its end.
func TestIdentityNoDescriptors(t *testing.T) {
	c, end := held(t, "cat")
	defer end()
	id := identify(t, c.Process.Pid)
	lowest, err := unix.Dup(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(lowest)
	restore := limitDescriptors(t, lowest)
	_, err = NSPID(c.Process.Pid)
	restore()
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("NSPID: %v", err)
	}
	for more := range 2 { // for the pidfd, and for the files read after it
		restore := limitDescriptors(t, lowest+more)
		p, err := id.Open()
		restore()
		if !errors.Is(err, unix.EMFILE) || p != nil {
			t.Errorf("with %d descriptors free: %v, %v", more, p, err)
		}
	}
}

// limitDescriptors allows no new descriptors from n on until restore is called.
func limitDescriptors(t *testing.T, n int) (restore func()) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: uint64(n), Max: limit.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	}
}

// Open returns ErrGone if another process has the same PID in the same namespace.
func TestIdentityPIDReuse(t *testing.T) {
	const inside = "SBXRUN_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		c := exec.Command("unshare", "--user", "--map-root-user", "--fork", "--pid", "--mount-proc", os.Args[0], "-test.run=^TestIdentityPIDReuse$")
		c.Env = append(os.Environ(), inside+"=1")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("in a PID namespace of its own: %v\n%s", err, out)
		}
		return
	}
	c, end := held(t, "cat")
	first := identify(t, c.Process.Pid)
	end()
	for range 1000 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(first.PID-1)), 0); err != nil {
			t.Fatal(err)
		}
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
		if p, err := first.Open(); err != ErrGone || p != nil {
			t.Errorf("the first process: %v, %v", p, err)
		}
		p, err := second.Open()
		if err != nil {
			t.Fatalf("the second process: %v", err)
		}
		p.Close()
		end()
		return
	}
	t.Error("the number was never reused")
}
