package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Stat is what /proc/PID/stat says of one process.
type Stat struct {
	PID    int
	Parent int
	// Session is the id of its session: the pid of the process that made it.
	Session int
	Comm    string // as the process named itself: hostile, at most 15 bytes
	State   string // one letter: R, S, D, T, t, Z, X …
	CPU     Times  // its own
	Waited  Times  // of children that it has waited for, and of theirs
	Start   uint64 // clock ticks from the machine's boot to its start
	Threads int
	Pages   int64 // in memory, shared ones included; a little behind (proc_pid_stat(5))
}

// Ended reports whether nothing of the process runs any more. Its first thread may have ended, which shows
// as a zombie, before others that go on.
func (s Stat) Ended() bool { return s.State == "X" || s.State == "Z" && s.Threads <= 1 }

// Times is CPU time.
type Times struct{ User, System time.Duration }

// clockTick is the unit of times in /proc: USER_HZ, which is 100 on every
// architecture Go runs on (time(7)).
const clockTick = 10 * time.Millisecond

// ReadFile reads a file of the kernel's, in /proc or below. os.ReadFile would first
// try to have it polled, and take three times as long, on the way of every run.
func ReadFile(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	data := make([]byte, 0, 512) // most are smaller, and each page that is touched costs a fault
	for {
		n, err := unix.Read(fd, data[len(data):cap(data)])
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return data, err
		}
		if data = data[:len(data)+n]; len(data) == cap(data) {
			data = slices.Grow(data, len(data))
		}
	}
}

// ReadStat reads /proc/PID/stat. [ErrGone] if there is no such process; any
// other error does not say that.
func ReadStat(pid int) (Stat, error) {
	data, err := ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	// It may end before the file is opened, or before it is read.
	if isGone(err) {
		return Stat{}, ErrGone
	}
	if err != nil {
		return Stat{}, err
	}
	return parseStat(data)
}

// parseStat parses the text of /proc/PID/stat (proc_pid_stat(5)). The name
// stands in parentheses and may itself hold blanks, newlines and parentheses,
// so the fields are counted from the last one.
func parseStat(data []byte) (Stat, error) {
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 1 || end < open {
		return Stat{}, fmt.Errorf("parse stat: no name in %.80q", data)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data[:open])))
	if err != nil || pid < 1 {
		return Stat{}, fmt.Errorf("parse stat: no pid in %.80q", data)
	}
	// Fields 3 (state), 4 (ppid), 5 (pgrp), 6 (session), … 14 (utime),
	// 15 (stime), 16 (cutime), 17 (cstime), …
	// 20 (num_threads), … 22 (starttime), … 24 (rss).
	f := strings.Fields(string(data[end+1:]))
	if len(f) < 20 {
		return Stat{}, fmt.Errorf("parse stat: %d fields after the name in %.80q", len(f), data)
	}
	if len(f[0]) != 1 || !isLetter(f[0][0]) {
		return Stat{}, fmt.Errorf("parse stat: bad state %q", f[0])
	}
	st := Stat{PID: pid, Comm: string(data[open+1 : end]), State: f[0]}
	if st.Parent, err = strconv.Atoi(f[1]); err != nil || st.Parent < 0 {
		return Stat{}, fmt.Errorf("parse stat: bad parent %q", f[1])
	}
	if st.Session, err = strconv.Atoi(f[3]); err != nil {
		return Stat{}, fmt.Errorf("parse stat: bad session %q", f[3])
	}
	for i, t := range []*time.Duration{&st.CPU.User, &st.CPU.System, &st.Waited.User, &st.Waited.System} {
		ticks, err := strconv.ParseUint(f[11+i], 10, 63)
		if err != nil || ticks > uint64(1<<62/clockTick) {
			return Stat{}, fmt.Errorf("parse stat: bad time %q", f[11+i])
		}
		*t = time.Duration(ticks) * clockTick
	}
	if st.Threads, err = strconv.Atoi(f[17]); err != nil || st.Threads < 0 {
		return Stat{}, fmt.Errorf("parse stat: bad number of threads %q", f[17])
	}
	if len(f) > 21 {
		st.Pages, _ = strconv.ParseInt(f[21], 10, 64) // 0 if it is none
		st.Pages = max(0, st.Pages)
	}
	if st.Start, err = strconv.ParseUint(f[19], 10, 64); err != nil {
		return Stat{}, fmt.Errorf("parse stat: bad start time %q", f[19])
	}
	return st, nil
}

func isLetter(c byte) bool { return 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' }

// NSPID is the pid of the process in its own, innermost PID namespace: the last
// number of the NSpid line of /proc/PID/status (Linux 4.1).
func NSPID(pid int) (int, error) {
	numbers, err := NSPIDs(pid)
	if err != nil {
		return 0, err
	}
	return numbers[len(numbers)-1], nil
}

// NSPIDs are the pids of the process in our PID namespace and in each one on the way
// from there to its own: at least one, and one more for each namespace between.
func NSPIDs(pid int) ([]int, error) {
	data, err := ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if isGone(err) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	return parseNSPIDs(data)
}

// Nested reports whether a process is in a PID namespace below that of /proc. An error,
// such as that it has ended, counts as no.
func Nested(pid int) bool {
	numbers, err := NSPIDs(pid)
	return err == nil && len(numbers) > 1
}

func parseNSPIDs(status []byte) (numbers []int, err error) {
	line := field(status, "NSpid")
	for f := range strings.FieldsSeq(line) {
		n, err := strconv.Atoi(f)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("parse status: bad NSpid %q", line)
		}
		numbers = append(numbers, n)
	}
	if len(numbers) == 0 {
		return nil, errors.New("parse status: no NSpid")
	}
	return numbers, nil
}

// field is what stands in a line behind "key:", in a file such as /proc/PID/status; "" if there is
// none. It is never the first line. In status that is the name, which comes with its newlines
// escaped, so a process cannot fake a line by its name (proc_pid_status(5)).
func field(data []byte, key string) string {
	_, rest, _ := bytes.Cut(data, []byte("\n"+key+":"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return strings.TrimSpace(string(line))
}

// PeakRSS is the most memory the process has had, in bytes: VmHWM of
// /proc/PID/status. 0 for a zombie and for one that is gone.
func PeakRSS(pid int) int64 {
	data, err := ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	return parsePeakRSS(data)
}

func parsePeakRSS(status []byte) int64 {
	kib, err := strconv.ParseInt(strings.TrimSuffix(field(status, "VmHWM"), " kB"), 10, 43)
	if err != nil || kib < 0 {
		return 0
	}
	return kib << 10
}

// maxThreads is how many threads one look asks for their children: each takes three system calls,
// and who has more must not make its own end late, by many processes neither. A test has fewer.
var maxThreads = 1000

// Children lists the children of a process, zombies included: those of all its threads.
// A process that has ended has none; an error says that some may be missing.
func Children(pid int) (pids []int, err error) {
	pids, _, err = children(pid, maxThreads)
	return pids, err
}

// children asks at most so many threads, and says how many it has asked: at least the first one,
// which is all that most processes have.
func children(pid, most int) (pids []int, asked int, err error) {
	tasks := "/proc/" + strconv.Itoa(pid) + "/task"
	threads := []string{strconv.Itoa(pid)}
	if most > 1 {
		if threads, err = threadsOf(tasks, most); isGone(err) {
			return nil, 0, nil
		}
	}
	if len(threads) >= most {
		err = errors.New("it has more threads than are looked at")
	}
	for _, tid := range threads {
		data, readErr := ReadFile(tasks + "/" + tid + "/children")
		pids = append(pids, parseChildren(data)...)
		if readErr != nil && !isGone(readErr) {
			err = readErr
		}
	}
	return pids, len(threads), err
}

// threadsOf lists at most so many threads.
func threadsOf(tasks string, most int) ([]string, error) {
	dir, err := os.Open(tasks)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	threads, err := dir.Readdirnames(most)
	if isGone(err) || err == io.EOF { // it has ended
		err = nil
	}
	return threads, err
}

// isGone says whether what could not be opened, or read, in /proc is no more.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

func parseChildren(data []byte) (pids []int) {
	for _, f := range strings.Fields(string(data)) {
		if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Descendants lists what is below a process that is known to run, zombies included,
// breadth first and at most limit of them. It is a look, not a lock: a process that
// forks meanwhile may be missed, and so may children of threads beyond the first thousand,
// which is why ending a sandbox never depends on it.
func Descendants(root, limit int) []Stat {
	found, _ := descendants(root, limit)
	return found
}

// descendants also says how many threads it has asked: at most one of each process, and maxThreads.
func descendants(root, limit int) (found []Stat, asked int) {
	queue := []int{root}
	for len(queue) > 0 {
		pid := queue[0]
		queue = queue[1:]
		pids, n, _ := children(pid, maxThreads-asked) // what could be read is all there is to see
		asked += n
		for _, child := range pids {
			st, err := ReadStat(child)
			if err != nil {
				continue
			}
			found = append(found, st)
			if len(found) == limit {
				return found, asked
			}
			queue = append(queue, child)
		}
	}
	return found, asked
}

// All lists the processes that /proc shows. An error says that some may be missing.
func All() (pids []int, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, notNumber := strconv.Atoi(name); notNumber == nil {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// Members lists every process of some PID namespaces, those nested in them apart, by
// looking through all of /proc; at most limit. For the survivors of a teardown
// that could not be proven: exact, and too slow for anything else.
func Members(limit int, namespaces ...uint64) (found []Stat) {
	pids, _ := All() // what could be read is all there is to see
	for _, pid := range pids {
		if in, err := Namespace(pid, "pid"); err != nil || !slices.Contains(namespaces, in) {
			continue
		}
		if st, err := ReadStat(pid); err == nil && len(found) < limit {
			found = append(found, st)
		}
	}
	return found
}
