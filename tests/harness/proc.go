package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Proc is one process as /proc shows it. Comm is for people.
type Proc struct {
	PID    int
	Parent int
	State  string
	Comm   string
	Start  string // in clock ticks since boot: with PID, an identity
	Why    string // how it was found
}

func (p Proc) String() string {
	return fmt.Sprintf("%d (%s) state %s parent %d: %s", p.PID, p.Comm, p.State, p.Parent, p.Why)
}

func list(procs []Proc) string {
	var b strings.Builder
	for _, p := range procs {
		fmt.Fprintf(&b, "\t%v\n", p)
	}
	return b.String()
}

func procFile(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }

// read is what a file begins with; nothing if it cannot be read. All of /proc is looked at after each
// run, and package os takes twice the system calls.
func read(name string, buf []byte) []byte {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	for all := 0; ; {
		n, err := unix.Read(fd, buf[all:])
		if all += max(n, 0); n <= 0 && err != unix.EINTR {
			return buf[:all]
		}
	}
}

// words are buffers for what a process was started with.
var words = sync.Pool{New: func() any { return new([256 << 10]byte) }}

// ReadProc reads /proc/PID/stat; false if there is no such process.
func ReadProc(pid int) (Proc, bool) { return readStat(procFile(pid, "stat"), pid) }

func readStat(name string, pid int) (Proc, bool) {
	var buf [1 << 10]byte // a name of 16 bytes and 50 numbers
	data := read(name, buf[:])
	// The name may hold anything; the fields are counted from its end.
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 0 || end < open {
		return Proc{}, false
	}
	f := strings.Fields(string(data[end+1:]))
	if len(f) < 20 {
		return Proc{}, false
	}
	parent, _ := strconv.Atoi(f[1])
	return Proc{PID: pid, Parent: parent, State: f[0], Comm: string(data[open+1 : end]), Start: f[19]}, true
}

// Kernel says whether it is a thread of the kernel's own, in which nothing of a run can be. A
// machine has more of them than of all others.
func (p Proc) Kernel() bool { return p.Parent == kthreadd && kthreadd != 0 }

// self is the tests' own process. Nothing of a run is older.
var self, _ = ReadProc(os.Getpid())

// olderThan compares the ticks by their number.
func (p Proc) olderThan(q Proc) bool {
	return len(p.Start) < len(q.Start) || len(p.Start) == len(q.Start) && p.Start < q.Start
}

// kthreadd is the parent of these; 0 where it cannot be seen, as in a container.
var kthreadd = func() int {
	if p, ok := ReadProc(2); ok && p.Parent == 0 && p.Comm == "kthreadd" {
		return p.PID
	}
	return 0
}()

// pidNamespace is the inode of a process's PID namespace; 0 for a zombie, which
// has none any more, and for what belongs to others.
func pidNamespace(pid int) uint64 {
	var st unix.Stat_t
	if unix.Stat(procFile(pid, "ns/pid"), &st) != nil {
		return 0
	}
	return st.Ino
}

func allPIDs() (pids []int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// find looks through all of /proc for what belongs to a run. Processes of
// others, whose environment cannot be read, cannot be a run's either: they are
// recognised by the namespace or as orphans.
func find(marker string, ns uint64) (found []Proc) {
	buf := words.Get().(*[256 << 10]byte)
	defer words.Put(buf)
	for _, pid := range allPIDs() {
		before, ok := ReadProc(pid)
		if !ok || before.Kernel() || before.olderThan(self) {
			continue
		}
		why := ""
		if ns != 0 && pidNamespace(pid) == ns {
			why = fmt.Sprintf("in the PID namespace %d of the run", ns)
		}
		for _, name := range []string{"environ", "cmdline"} {
			data := read(procFile(pid, name), buf[:])
			if len(data) == len(buf) {
				data, _ = os.ReadFile(procFile(pid, name)) // of a process with more words than usual
			}
			if bytes.Contains(data, []byte(marker)) {
				why = "has the run's marker in its " + name
			}
		}
		if why == "" {
			continue
		}
		if p, ok := ReadProc(pid); ok && p.Start == before.Start {
			p.Why = why
			found = append(found, p)
		}
	}
	return found
}

// children lists the children of all threads of a process, zombies included: of each
// thread's the oldest first, which is the kernel's order.
func children(pid int) (pids []int) {
	tasks, err := os.ReadDir(procFile(pid, "task"))
	if err != nil {
		return nil
	}
	buf := words.Get().(*[256 << 10]byte)
	defer words.Put(buf)
	for _, task := range tasks {
		for _, f := range strings.Fields(string(read(procFile(pid, "task/"+task.Name()+"/children"), buf[:]))) {
			if child, err := strconv.Atoi(f); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// childrenNow lists the children of a process that is stopped, and misses none. [children] may: the
// children of a thread that ends go to another thread, which may have been read before; and while a
// child ends, the next one may be skipped (proc_pid_task(5)).
func childrenNow(pid int) (pids []int) {
	for _, child := range allPIDs() {
		if parentOf(child) == pid {
			pids = append(pids, child)
		}
	}
	return pids
}

// Stopped says whether all threads of a process are stopped or have ended.
func Stopped(pid int) bool {
	tasks, err := os.ReadDir(procFile(pid, "task"))
	if err != nil {
		return true // it has ended
	}
	for _, task := range tasks {
		if p, ok := readStat(procFile(pid, "task/"+task.Name()+"/stat"), pid); ok && !strings.Contains("TtZX", p.State) {
			return false
		}
	}
	return true
}

// TasksOf counts a user's threads, as RLIMIT_NPROC does.
func TasksOf(uid int) (n int) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/task/*")
	for _, dir := range dirs {
		var st unix.Stat_t
		if unix.Stat(dir, &st) == nil && int(st.Uid) == uid {
			n++
		}
	}
	return n
}

// Descendants lists the processes below one, parents first.
func Descendants(pid int) (pids []int) {
	for _, child := range children(pid) {
		pids = append(append(pids, child), Descendants(child)...)
	}
	return pids
}

// below is [Descendants] with what is known of each.
func below(pid int) (found []Proc) {
	for _, pid := range Descendants(pid) {
		if p, ok := ReadProc(pid); ok {
			found = append(found, p)
		}
	}
	return found
}

// isBelow says whether a process is, or was just now, a descendant of another.
func isBelow(pid, ancestor int) bool {
	for pid > 1 {
		p, ok := ReadProc(pid)
		if !ok {
			return false
		}
		if pid = p.Parent; pid == ancestor {
			return true
		}
	}
	return false
}

// ours are the children that the harness has started and not yet waited for.
// Whoever holds the lock sees no child between its birth and its entry here.
var ours = struct {
	sync.Mutex
	// pids counts: between the reaping of one child and its entry's end here another may
	// have been given the same pid.
	pids map[int]int
	// owners names the run below which a process was seen.
	owners map[identity]string
}{pids: map[int]int{}, owners: map[identity]string{}}

// identity is a pid and when its process was started, so that it means one
// process for ever.
type identity struct {
	pid   int
	start string
}

// own notes the processes below a run.
func own(marker string, pids []int) {
	ours.Lock()
	defer ours.Unlock()
	for _, pid := range pids {
		if p, ok := ReadProc(pid); ok {
			ours.owners[identity{pid, p.Start}] = marker
		}
	}
}

// Register tells the harness of a child that the caller starts and waits for
// by itself: start returns its pid. done is called after the child was reaped.
func Register(start func() (pid int, err error)) (done func(), err error) {
	ours.Lock()
	defer ours.Unlock()
	pid, err := start()
	if err != nil {
		return func() {}, err
	}
	ours.pids[pid]++
	return func() {
		ours.Lock()
		defer ours.Unlock()
		disown(pid)
	}, nil
}

// disown takes a reaped child off the list, which is locked.
func disown(pid int) {
	if ours.pids[pid]--; ours.pids[pid] == 0 {
		delete(ours.pids, pid)
	}
}

// StartCommand starts a command that the caller waits for, see [Register].
func StartCommand(cmd *exec.Cmd) (done func(), err error) {
	return Register(func() (int, error) {
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		return cmd.Process.Pid, nil
	})
}

// orphans are our children that we have not started: abandoned by an sbxrun,
// namely that of the marker's run, as far as is known; "" is any.
func orphans(marker string) (found []Proc) {
	ours.Lock()
	defer ours.Unlock()
	for _, pid := range children(os.Getpid()) {
		if ours.pids[pid] > 0 {
			continue
		}
		p, ok := ReadProc(pid)
		if !ok || p.Parent != os.Getpid() {
			continue
		}
		if owner := ours.owners[identity{pid, p.Start}]; owner != "" && marker != "" && owner != marker {
			continue
		}
		p.Why = "was abandoned to the parent of sbxrun"
		found = append(found, p)
	}
	return found
}

// orphansBy waits until there are no orphans. The tests run at the same time, so
// what is seen may be about to end, or to be adopted; a zombie is not. Those that
// were there all the time are reaped in the end, so that one failure is not
// reported by every later test.
func orphansBy(marker string, deadline time.Time) (found []Proc) {
	window := time.Until(deadline)
	seen := map[identity]time.Time{}
	holdsBy(time.Now().Add(3*window), func() bool {
		now, there := time.Now(), orphans(marker)
		for _, p := range there {
			id := identity{p.PID, p.Start}
			if first, ok := seen[id]; !ok {
				seen[id] = now
			} else if now.Sub(first) >= window {
				found = append(found, p)
			}
		}
		return len(there) == 0 || len(found) > 0
	})
	for _, p := range found {
		end(p)
		_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // not a zombie yet: reported again
	}
	return found
}

// end kills what a failed run has left, so that no other test suffers from it.
// The pidfd is opened first and the identity compared then: no stranger that
// got the same pid meanwhile is ever hit.
func end(p Proc) {
	if p.PID <= 1 || p.PID == os.Getpid() {
		return
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if now, ok := ReadProc(p.PID); ok && now.Start == p.Start {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // gone meanwhile is fine
	}
}

// Target is a process of a run that a test may signal, held by a pidfd.
type Target struct {
	PID int
	fd  int
}

// Open takes hold of a process that is below a run; close it after use.
func Open(pid int) (*Target, error) {
	if pid <= 1 || pid == os.Getpid() {
		return nil, fmt.Errorf("pid %d is not to be signalled", pid)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	return &Target{PID: pid, fd: fd}, nil
}

// Signal sends a signal; a process that has ended is no error.
func (t *Target) Signal(sig unix.Signal) error {
	if err := unix.PidfdSendSignal(t.fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

func (t *Target) Ended() bool {
	fds := []unix.PollFd{{Fd: int32(t.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// Close gives up the pidfd, not the process.
func (t *Target) Close() { unix.Close(t.fd) }

// Members are the processes in the PID namespace of a run or exec, in the order of
// their pids there: that of their births, as long as these do not begin again.
func (p *Process) Members() []Proc {
	p.t.Helper()
	return Members(p.Namespace())
}

// Members are the processes in a PID namespace, by its inode.
func Members(ns uint64) (found []Proc) {
	inner := map[int]int{}
	for _, pid := range allPIDs() {
		if pidNamespace(pid) != ns {
			continue
		}
		if p, ok := ReadProc(pid); ok {
			found = append(found, p)
			inner[pid] = innerPID(pid)
		}
	}
	slices.SortFunc(found, func(a, b Proc) int { return inner[a.PID] - inner[b.PID] })
	return found
}

// innerPID is a process's pid in its own PID namespace; 0 if it has ended.
func innerPID(pid int) int {
	numbers := status(pid, "NSpid:")
	if len(numbers) == 0 {
		return 0
	}
	inner, _ := strconv.Atoi(numbers[len(numbers)-1])
	return inner
}

// RSS is how much memory the process has resident, in bytes; 0 if it has ended.
func (t *Target) RSS() int64 { return memory(t.PID, "VmRSS:") }

// PeakRSS is the most that it has had, as [Process.PeakRSS].
func (t *Target) PeakRSS() int64 { return memory(t.PID, "VmHWM:") }

// Identify is when a process was started, in clock ticks since boot, and its PID
// namespace.
func Identify(t T, pid int) (start, ns uint64) {
	t.Helper()
	p, ok := ReadProc(pid)
	start, err := strconv.ParseUint(p.Start, 10, 64)
	if ns = pidNamespace(pid); !ok || err != nil || ns == 0 {
		t.Fatalf("process %d cannot be identified", pid)
	}
	return start, ns
}
