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

// Stat holds values of /proc/PID/stat.
type Stat struct {
	PID    int
	Parent int
	// Session is the ID of its session: the PID of the process that made it.
	Session int
	Comm    string // set by the process itself: untrusted, at most 15 bytes
	State   string // one letter: R, S, D, T, t, Z, X …
	CPU     Times  // its own
	Waited  Times  // of reaped children, and of theirs
	Start   uint64 // clock ticks from the machine's boot to its start
	Threads int
	Pages   int64 // in memory, including shared pages; slightly outdated (proc_pid_stat(5))
}

// Ended reports whether all threads of the process have ended. The process is shown as a zombie when its first thread has
// ended, even if others still run.
func (s Stat) Ended() bool { return s.State == "X" || s.State == "Z" && s.Threads <= 1 }

// Times is CPU time.
type Times struct{ User, System time.Duration }

// clockTick is the unit of times in /proc. USER_HZ is 100 on every architecture that Go supports (time(7)).
const clockTick = 10 * time.Millisecond

// ReadFile reads a file in /proc or /sys. os.ReadFile would first try to register it with the poller, which takes three times
// as long.
func ReadFile(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	data := make([]byte, 0, 512) // most files are smaller, and each touched page costs a fault
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

// ReadStat reads /proc/PID/stat. It returns [ErrGone] only if there is no such process.
func ReadStat(pid int) (Stat, error) {
	data, err := ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	// The process may end before the open or before the read.
	if isGone(err) {
		return Stat{}, ErrGone
	}
	if err != nil {
		return Stat{}, err
	}
	return parseStat(data)
}

// parseStat parses the text of /proc/PID/stat (proc_pid_stat(5)). The name is
// in parentheses and may itself contain blanks, newlines and parentheses, so
// the fields are counted from the last closing parenthesis.
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
		st.Pages, _ = strconv.ParseInt(f[21], 10, 64) // 0 if it is not a number
		st.Pages = max(0, st.Pages)
	}
	if st.Start, err = strconv.ParseUint(f[19], 10, 64); err != nil {
		return Stat{}, fmt.Errorf("parse stat: bad start time %q", f[19])
	}
	return st, nil
}

func isLetter(c byte) bool { return 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' }

// NSPID returns the PID of the process in its own PID namespace: the last number of the NSpid line of /proc/PID/status (Linux
// 4.1).
func NSPID(pid int) (int, error) {
	numbers, err := NSPIDs(pid)
	if err != nil {
		return 0, err
	}
	return numbers[len(numbers)-1], nil
}

// NSPIDs returns the PIDs of the process in this process's PID namespace and in each namespace below, down to its own.
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

// Nested reports whether a process is in a PID namespace below the one that /proc shows. After an error, for example because
// the process has ended, it returns false.
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

// field returns the value of the line "key:" in a file such as /proc/PID/status, or "" if the line is missing. It ignores
// the first line, which in status is the name. The kernel escapes newlines there, so a process cannot fake a line by its name
// (proc_pid_status(5)).
func field(data []byte, key string) string {
	_, rest, _ := bytes.Cut(data, []byte("\n"+key+":"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return strings.TrimSpace(string(line))
}

// PeakRSS returns the peak memory of the process in bytes (VmHWM of /proc/PID/status), or 0 if it has ended.
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

// maxThreads is the maximum number of threads whose children are read at a time. Each takes three system calls, and a command
// must not delay its own end with many threads or processes. It is a variable for tests.
var maxThreads = 1000

// Children lists the children of all threads of a process, including zombies. A process that has ended has none. After an
// error some may be missing.
func Children(pid int) (pids []int, err error) {
	pids, _, err = children(pid, maxThreads)
	return pids, err
}

// children reads the children of up to most threads, and returns the number of threads read. It always reads the children
// of the first thread, the only one of most processes.
func children(pid, most int) (pids []int, asked int, err error) {
	tasks := "/proc/" + strconv.Itoa(pid) + "/task"
	threads := []string{strconv.Itoa(pid)}
	if most > 1 {
		if threads, err = threadsOf(tasks, most); isGone(err) {
			return nil, 0, nil
		}
	}
	if len(threads) >= most {
		err = errors.New("too many threads")
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

// threadsOf lists up to most threads.
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

// isGone reports whether an open or read in /proc failed because the process has ended.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

func parseChildren(data []byte) (pids []int) {
	for _, f := range strings.Fields(string(data)) {
		if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Descendants lists at most limit descendants of a running process, including zombies, breadth first. It may miss children
// forked during the call and children of threads beyond the first thousand, so ending a sandbox never depends on it.
func Descendants(root, limit int) []Stat {
	found, _ := descendants(root, limit)
	return found
}

// descendants also returns the number of threads read: at most one for each process plus maxThreads.
func descendants(root, limit int) (found []Stat, asked int) {
	queue := []int{root}
	for len(queue) > 0 {
		pid := queue[0]
		queue = queue[1:]
		pids, n, _ := children(pid, maxThreads-asked) // an incomplete list is enough
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

// All lists the processes in /proc. After an error some may be missing.
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

// Members lists at most limit processes of some PID namespaces, without those in nested namespaces. It reads all of /proc,
// which is exact but slow, to find the survivors of an unproven teardown.
func Members(limit int, namespaces ...uint64) (found []Stat) {
	pids, _ := All() // an incomplete list is enough
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
