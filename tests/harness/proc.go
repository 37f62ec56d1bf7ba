package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Proc is a process as /proc shows it.
type Proc struct {
	PID    int
	Parent int
	State  string
	Comm   string // for messages only
	Start  string // in clock ticks since boot; with PID, an identity
	Why    string // how it was found
}

func (p Proc) String() string {
	return fmt.Sprintf("%d (%s) state %s parent %d: %s", p.PID, p.Comm, p.State, p.Parent, p.Why)
}

// List formats processes for a message, one per line.
func List(procs []Proc) string {
	var b strings.Builder
	for _, p := range procs {
		fmt.Fprintf(&b, "\t%v\n", p)
	}
	return b.String()
}

func procFile(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }

// read returns the beginning of a file, nil if it cannot be read. The harness reads all of
// /proc after every run, and package os needs twice the system calls.
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

// words are buffers for command lines and environments.
var words = sync.Pool{New: func() any { return new([256 << 10]byte) }}

// ReadProc reads /proc/PID/stat. It returns false if there is no such process.
func ReadProc(pid int) (Proc, bool) { return readStat(procFile(pid, "stat"), pid) }

func readStat(name string, pid int) (Proc, bool) {
	var buf [1 << 10]byte // a name of 16 bytes and 50 numbers
	data := read(name, buf[:])
	// The name may contain any byte, so the fields are counted from its end.
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

// Exited reports whether a process has exited: it is a zombie, or reaped.
func Exited(pid int) bool {
	p, ok := ReadProc(pid)
	return !ok || p.State == "Z" || p.State == "X"
}

// self is the test process. Every process of a run is younger.
var self, _ = ReadProc(os.Getpid())

// olderThan compares start times as decimal numbers.
func (p Proc) olderThan(q Proc) bool {
	return len(p.Start) < len(q.Start) || len(p.Start) == len(q.Start) && p.Start < q.Start
}

// kthreadd is the parent of kernel threads, which are never part of a run; 0 where it is not visible, as in a container.
var kthreadd = func() int {
	if p, ok := ReadProc(2); ok && p.Parent == 0 && p.Comm == "kthreadd" {
		return p.PID
	}
	return 0
}()

// Namespace returns the inode of a process's PID namespace. It returns 0 for a zombie, which
// has none, and for a process of another user.
func Namespace(pid int) uint64 {
	var st unix.Stat_t
	if unix.Stat(procFile(pid, "ns/pid"), &st) != nil {
		return 0
	}
	return st.Ino
}

// PIDs returns the PIDs of a process in each PID namespace, from the test's inwards; nil if it has been reaped.
func PIDs(pid int) []string { return status(pid, "NSpid:") }

// Namespaces are PID namespaces that a test has seen. Holding them open keeps the kernel from
// giving their inodes to new ones.
type Namespaces struct {
	mu   sync.Mutex
	held map[uint64]*os.File
}

// Remember adds the PID namespace of a process, and returns its inode; 0 if it is the test's
// own, or if the process has exited or belongs to another user.
func (n *Namespaces) Remember(pid int) uint64 {
	if pid <= 1 {
		return 0
	}
	switch inode := Namespace(pid); {
	case inode == 0 || inode == Namespace(os.Getpid()):
		return 0
	case n.Has(inode):
		return inode
	}
	held, err := os.Open(procFile(pid, "ns/pid"))
	if err != nil {
		return 0
	}
	var st unix.Stat_t // pid may have been reused since
	if unix.Fstat(int(held.Fd()), &st) != nil || st.Ino == Namespace(os.Getpid()) {
		held.Close()
		return 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.held == nil {
		n.held = map[uint64]*os.File{}
	}
	if n.held[st.Ino] != nil {
		held.Close()
	} else {
		n.held[st.Ino] = held
	}
	return st.Ino
}

// Has reports whether a namespace was added.
func (n *Namespaces) Has(inode uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.held[inode] != nil
}

// Close forgets all namespaces.
func (n *Namespaces) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for inode, held := range n.held {
		held.Close()
		delete(n.held, inode)
	}
}

// AllPIDs lists all processes.
func AllPIDs() (pids []int) {
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

// Find searches /proc for processes with a marker in their environment or command line, and for those in PID namespaces
// of the run. It cannot read the environment of another user's process; those are found by namespace, or as orphans.
func Find(marker string, ours func(inode uint64) bool) (found []Proc) {
	buf := words.Get().(*[256 << 10]byte)
	defer words.Put(buf)
	for _, pid := range AllPIDs() {
		before, ok := ReadProc(pid)
		if !ok || pid == os.Getpid() || before.Parent == kthreadd && kthreadd != 0 || before.olderThan(self) {
			continue
		}
		why := ""
		if ns := Namespace(pid); ns != 0 && ours(ns) {
			why = fmt.Sprintf("in the PID namespace %d of the run", ns)
		}
		for _, name := range []string{"environ", "cmdline"} {
			data := read(procFile(pid, name), buf[:])
			if len(data) == len(buf) {
				data, _ = os.ReadFile(procFile(pid, name)) // longer than the buffer
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

// Children lists the children of all threads of a process, zombies included. Those of a
// thread are in the order of their creation.
func Children(pid int) (pids []int) {
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

// FirstChild waits until a process has a child, and returns the first one.
func FirstChild(t T, pid int) (child int) {
	t.Helper()
	Until(t, Bound, "a child of "+strconv.Itoa(pid), func() bool {
		all := append(Children(pid), 0)
		child = all[0]
		return child != 0
	})
	return child
}

// childrenNow lists the children of a stopped process without missing any. [Children] may
// miss some: a thread that ends passes its children to another thread, which may have been
// read before; and the next child may be skipped while one exits (proc_pid_task(5)).
func childrenNow(pid int) (pids []int) {
	for _, child := range AllPIDs() {
		if parentOf(child) == pid {
			pids = append(pids, child)
		}
	}
	return pids
}

// Stopped reports whether all threads of a process are stopped or have ended.
func Stopped(pid int) bool {
	tasks, err := os.ReadDir(procFile(pid, "task"))
	if err != nil {
		return true // reaped
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

// Descendants lists the descendants of a process, parents first.
func Descendants(pid int) (pids []int) {
	for _, child := range Children(pid) {
		pids = append(append(pids, child), Descendants(child)...)
	}
	return pids
}

// Below is [Descendants] with the details of each process.
func Below(pid int) (found []Proc) {
	for _, pid := range Descendants(pid) {
		if p, ok := ReadProc(pid); ok {
			p.Why = "is a descendant"
			found = append(found, p)
		}
	}
	return found
}

// isBelow reports whether a process is, or just was, a descendant of another.
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

// ours are the children that the harness has started and not yet reaped. Its lock is held
// while a child is started, so every visible child is entered here.
var ours = struct {
	sync.Mutex
	// pids counts entries: after a child is reaped, and before its entry is removed, another
	// child may get the same PID.
	pids map[int]int
	// owners maps a process to the marker of the run that it was seen below.
	owners map[identity]string
}{pids: map[int]int{}, owners: map[identity]string{}}

// identity identifies a process even after its PID was reused.
type identity struct {
	pid   int
	start string
}

// own records that processes belong to a run.
func own(marker string, pids []int) {
	ours.Lock()
	defer ours.Unlock()
	for _, pid := range pids {
		if p, ok := ReadProc(pid); ok {
			ours.owners[identity{pid, p.Start}] = marker
		}
	}
}

// Register enters a child that the caller starts and reaps itself. start returns its PID. The
// caller calls done after reaping it.
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

// Registered reports whether a child was started through the harness and not yet reaped.
func Registered(pid int) bool {
	ours.Lock()
	defer ours.Unlock()
	return ours.pids[pid] > 0
}

// disown removes the entry of a reaped child. The caller holds the lock.
func disown(pid int) {
	if ours.pids[pid]--; ours.pids[pid] == 0 {
		delete(ours.pids, pid)
	}
}

// StartCommand starts a command that the caller waits for; see [Register].
func StartCommand(cmd *exec.Cmd) (done func(), err error) {
	return Register(func() (int, error) { return StartBare(cmd) })
}

// StartBare starts a command without ambient capabilities, which the parts of TestSoak have. Capabilities
// belong to a thread, and a child inherits them from the thread that forks.
func StartBare(cmd *exec.Cmd) (pid int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	return cmd.Process.Pid, nil
}

// orphans returns the children that the harness has not started: sbxrun abandoned them. With
// a marker it leaves out those known to belong to another run.
func orphans(marker string) (found []Proc) {
	ours.Lock()
	defer ours.Unlock()
	for _, pid := range Children(os.Getpid()) {
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

// Orphans returns the children of the test process that the harness has not started. It reads
// the list until two results agree: while the kernel writes it, a child that exits may hide
// another (proc_pid_children(5)), whose own children come to the test process later.
func Orphans() []Proc {
	for seen := orphans(""); ; {
		again := orphans("")
		if slices.Equal(seen, again) {
			return again
		}
		seen = again
	}
}

// orphansBy waits until there are no orphans, and returns those that stay. Tests run in
// parallel, so an orphan may be about to exit or to be adopted; a zombie never goes away.
// Those that stay are reaped, so that only one test reports them.
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

// end kills a process that a failed run has left, so that it does not disturb other tests. It opens the pidfd before
// comparing identities, so it never kills a process that got the same PID.
func end(p Proc) {
	target, err := Open(p.PID)
	if err != nil {
		return
	}
	defer target.Close()
	if now, ok := ReadProc(p.PID); ok && now.Start == p.Start {
		_ = target.Signal(unix.SIGKILL) // fails only if it has exited
	}
}

// Sweep kills and reaps what a failed test has left, until left returns nothing.
func Sweep(t T, left func() []Proc) {
	t.Helper()
	Until(t, settle, "the end of the processes that were left", func() bool {
		procs := left()
		for _, p := range procs {
			if !Registered(p.PID) {
				end(p)
				_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // ECHILD, or too early: left reports it again
			}
		}
		return len(procs) == 0
	})
}

// Target is a process that a test may signal, held by a pidfd.
type Target struct {
	PID int
	fd  int
}

// Open opens a pidfd for a process. The caller closes it.
func Open(pid int) (*Target, error) {
	if pid <= 1 || pid == os.Getpid() {
		return nil, fmt.Errorf("pid %d must not be signalled", pid)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	return &Target{PID: pid, fd: fd}, nil
}

// Strike sends a signal to a process if it is alive and a child of parent. It opens the pidfd
// before checking, so it never signals another process that got the same PID.
func Strike(pid, parent int, sig unix.Signal) (target *Target, hit bool) {
	target, err := Open(pid)
	if err != nil {
		return nil, false
	}
	p, ok := ReadProc(pid)
	if !ok || p.Parent != parent || p.State == "Z" || p.State == "X" || target.Signal(sig) != nil {
		target.Close()
		return nil, false
	}
	return target, true
}

// Signal sends a signal. A process that has exited is not an error.
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

// Close closes the pidfd; the process runs on.
func (t *Target) Close() { unix.Close(t.fd) }

// Members returns the processes in the PID namespace of a run or exec, ordered by their PIDs
// there: the order of their creation until PIDs wrap around.
func (p *Process) Members() []Proc {
	p.t.Helper()
	return Members(p.Namespace())
}

// Members returns the processes in a PID namespace.
func Members(ns uint64) (found []Proc) {
	inner := map[int]int{}
	for _, pid := range AllPIDs() {
		if Namespace(pid) != ns {
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

// innerPID returns a process's PID in its own PID namespace; 0 if it has been reaped.
func innerPID(pid int) int {
	numbers := PIDs(pid)
	if len(numbers) == 0 {
		return 0
	}
	inner, _ := strconv.Atoi(numbers[len(numbers)-1])
	return inner
}

// RSS returns the process's resident memory in bytes; 0 if it has exited.
func (t *Target) RSS() int64 { return memory(t.PID, "VmRSS:") }

// PeakRSS is as [Process.PeakRSS].
func (t *Target) PeakRSS() int64 { return memory(t.PID, "VmHWM:") }

// Identify returns a process's start time, in clock ticks since boot, and PID namespace.
func Identify(t T, pid int) (start, ns uint64) {
	t.Helper()
	p, ok := ReadProc(pid)
	start, err := strconv.ParseUint(p.Start, 10, 64)
	ns = Namespace(pid)
	check.Require(t, ok && err == nil && ns != 0, "process %d cannot be identified", pid)
	return start, ns
}

// Stuck describes, for each thread of a process, the kernel function that it waits in.
func Stuck(pid int) (text string) {
	tasks, _ := filepath.Glob(procFile(pid, "task/*"))
	for _, task := range tasks {
		stat, _ := os.ReadFile(task + "/stat")
		channel, _ := os.ReadFile(task + "/wchan")
		call, _ := os.ReadFile(task + "/syscall")
		text += fmt.Sprintf("\t%.60s: in %s, system call %s\n", stat, channel, strings.TrimSpace(string(call)))
	}
	return text
}
