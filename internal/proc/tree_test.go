package proc

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// rest contains fields 5 to 52 of a stat line: the session is 5, the times are 250 and 13, the start is 100.
const rest = " 6 5 34816 1 4194560 100 0 0 0 250 13 70 20 20 0 1 0 100 1 1 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n"

func TestParseStat(t *testing.T) {
	times, waited := Times{2500 * time.Millisecond, 130 * time.Millisecond}, Times{700 * time.Millisecond, 200 * time.Millisecond}
	tests := []struct {
		name, in string
		want     Stat
	}{
		{"plain", "42 (sh) S 7" + rest, Stat{42, 7, 5, "sh", "S", times, waited, 100, 1, 1}},
		{"no newline", "42 (sh) S 7" + strings.TrimSuffix(rest, "\n"), Stat{42, 7, 5, "sh", "S", times, waited, 100, 1, 1}},
		{"newline", "42 (a\nb) R 7" + rest, Stat{42, 7, 5, "a\nb", "R", times, waited, 100, 1, 1}},
		{"parentheses", "42 ()) ((() Z 7" + rest, Stat{42, 7, 5, ")) (((", "Z", times, waited, 100, 1, 1}},
		{"fakes another line", "42 (x) S 1 1 (y) T 7" + rest, Stat{42, 7, 5, "x) S 1 1 (y", "T", times, waited, 100, 1, 1}},
		{"not UTF-8", "42 (\xff\x01) S 7" + rest, Stat{42, 7, 5, "\xff\x01", "S", times, waited, 100, 1, 1}},
		{"no parent that we can see", "42 (init) S 0" + rest, Stat{42, 0, 5, "init", "S", times, waited, 100, 1, 1}},
		{"future fields", "42 (sh) S 7" + strings.TrimSuffix(rest, "\n") + " 1 x y\n", Stat{42, 7, 5, "sh", "S", times, waited, 100, 1, 1}},
		{"just enough fields", "42 (sh) S 7 3 5 5 6 7 8 9 10 11 1 2 16 17 18 19 20 21 22", Stat{42, 7, 5, "sh", "S", Times{10 * time.Millisecond, 20 * time.Millisecond}, Times{160 * time.Millisecond, 170 * time.Millisecond}, 22, 20, 0}},
		{"greatest start", "42 (sh) S 7 3 5 5 6 7 8 9 10 11 250 13 0 0 20 0 1 0 18446744073709551615", Stat{42, 7, 5, "sh", "S", times, Times{}, 1<<64 - 1, 1, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseStat([]byte(tt.in))
			check.Must(t, err)
			check.NoDiff(t, cmp.Diff(tt.want, got), "(-want +got)")
		})
	}
}

func TestParseStatErrors(t *testing.T) {
	fields := func(utime, stime string) string {
		return "42 (sh) S 7 3 4 5 6 7 8 9 10 11 " + utime + " " + stime + " 16 17 18 19 20 21 22 1"
	}
	start := func(start string) string {
		return "42 (sh) S 7 3 4 5 6 7 8 9 10 11 1 2 16 17 18 19 20 21 " + start
	}
	tests := []struct{ name, in string }{
		{"empty", ""},
		{"newline", "\n"},
		{"no name", "42 sh S 7" + rest},
		{"name not ended", "42 (sh S 7" + rest},
		{"name the wrong way", "42 )sh( S 7" + rest},
		{"no pid", "(sh) S 7" + rest},
		{"pid 0", "0 (sh) S 7" + rest},
		{"negative pid", "-42 (sh) S 7" + rest},
		{"pid not a number", "4x2 (sh) S 7" + rest},
		{"pid too great", "99999999999999999999 (sh) S 7" + rest},
		{"nothing after the name", "42 (sh)"},
		{"cut after the state", "42 (sh) S"},
		{"one field short", "42 (sh) S 7 3 4 5 6 7 8 9 10 11 1 2 16 17 18 19 20 21"},
		{"state of two letters", "42 (sh) SS 7" + rest},
		{"state that is a number", "42 (sh) 0 7" + rest},
		{"parent not a number", "42 (sh) S x" + rest},
		{"negative parent", "42 (sh) S -7" + rest},
		{"session not a number", "42 (sh) S 7 3 x 5 6 7 8 9 10 11 1 2 16 17 18 19 20 21 22"},
		{"negative time", fields("-1", "0")},
		{"time not a number", fields("0", "1.5")},
		{"time that would overflow a duration", fields("0", "922337203686")},
		{"time beyond 63 bits", fields("9223372036854775808", "0")},
		{"negative start", start("-1")},
		{"start not a number", start("2x2")},
		{"start beyond 64 bits", start("18446744073709551616")},
	}
	for _, tt := range tests {
		got, err := parseStat([]byte(tt.in))
		check.That(t, err != nil && got == (Stat{}), "%s: got %+v, %v; want an error and nothing else", tt.name, got, err)
	}
}

// Accepted values can be written out and parsed again.
func FuzzParseStat(f *testing.F) {
	f.Add([]byte("42 (sh) S 7" + rest))
	f.Add([]byte("42 (x) S 1 1 (y) T 7" + rest))
	f.Add([]byte("1 () ) Z 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0 18446744073709551615"))
	f.Add([]byte("42 )("))
	f.Add([]byte("42 (sh) 0 7 6 5 34816 1 4" + strings.Repeat(" 0", 13)))
	f.Fuzz(func(t *testing.T, data []byte) {
		st, err := parseStat(data)
		if err != nil {
			return
		}
		check.That(t, st.PID >= 1 && st.Parent >= 0 && len(st.State) == 1 && st.CPU.User >= 0 && st.CPU.System >= 0, "accepted %+v", st)
		ticks := func(d time.Duration) string { return strconv.FormatInt(int64(d/clockTick), 10) }
		line := strconv.Itoa(st.PID) + " (" + st.Comm + ") " + st.State + " " + strconv.Itoa(st.Parent) +
			" 0 " + strconv.Itoa(st.Session) + strings.Repeat(" 0", 7) + " " + ticks(st.CPU.User) + " " + ticks(st.CPU.System) +
			" " + ticks(st.Waited.User) + " " + ticks(st.Waited.System) + strings.Repeat(" 0", 2) + " " + strconv.Itoa(st.Threads) + " 0 " + strconv.FormatUint(st.Start, 10) + " 0 " + strconv.FormatInt(st.Pages, 10)
		again, err := parseStat([]byte(line))
		check.Require(t, err == nil, "%q: %v", line, err)
		check.NoDiff(t, cmp.Diff(st, again), "read back from %q (-first +again)", line)
	})
}

func TestParseNSPIDs(t *testing.T) {
	const name = "Name:\tsh\nUmask:\t0022\nNgid:\t0\n"
	tests := []struct {
		in   string
		want []int // nil is an error
	}{
		{name + "NSpid:\t42\nNSpgid:\t1\n", []int{42}},
		{name + "NSpid:\t4711\t5\t1\nNSpgid:\t4711\t5\t1\n", []int{4711, 5, 1}},
		{name + "NSpid:\t4711\t2", []int{4711, 2}},
		{"Name:\tNSpid:\\n NSpid:\t7\nNSpid:\t3\n", []int{3}}, // the name is not at the beginning of a line
		{"", nil},
		{"NSpid:\t42\n", nil}, // never the first line
		{name, nil},
		{name + "NSpid:", nil},
		{name + "NSpid:\n42\n", nil},
		{name + "NSpid:\t0\n", nil},
		{name + "NSpid:\t-1\n", nil},
		{name + "NSpid:\tx\t1\n", nil},
		{name + "NSpid:\t4711\tx\n", nil},
		{name + "NSpid:\t99999999999999999999\n", nil},
		{name + "NSpgid:\t42\n", nil},
	}
	for _, tt := range tests {
		got, err := parseNSPIDs([]byte(tt.in))
		diff := cmp.Diff(tt.want, got)
		check.That(t, diff == "" && (err == nil) == (tt.want != nil), "parseNSPIDs(%q): %v (-want +got):\n%s", tt.in, err, diff)
	}
}

func FuzzParseNSPIDs(f *testing.F) {
	for _, seed := range []string{"", "\nNSpid:", "\nNSpid:\t4711\t1\n", "Name:\tx\nNSpid:\t-1\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		numbers, err := parseNSPIDs(data)
		check.That(t, (err == nil) == (len(numbers) > 0), "%v, %v", numbers, err)
		for _, n := range numbers {
			check.That(t, n >= 1, "%v", numbers)
		}
	})
}

func TestParseChildren(t *testing.T) {
	tests := []struct {
		in   string
		want []int
	}{
		{"", nil},
		{" \n", nil},
		{"42 ", []int{42}},
		{"42 43 4194304 ", []int{42, 43, 4194304}},
		{"2", []int{2}},
		{"0 1 -1 -42 2", []int{2}}, // kill(2) interprets these numbers differently
		{"x 4x 42 0x10 99999999999999999999", []int{42}},
	}
	for _, tt := range tests {
		check.NoDiff(t, cmp.Diff(tt.want, parseChildren([]byte(tt.in))), "parseChildren(%q) (-want +got)", tt.in)
	}
}

func FuzzParseChildren(f *testing.F) {
	f.Add([]byte("42 1 -1 0 43 "))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, pid := range parseChildren(data) {
			check.That(t, pid > 1, "pid %d", pid)
		}
	})
}

// eventually waits until a condition is true.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	harness.Until(t, harness.Bound, what, condition)
}

// held starts a command that runs until its stdin ends. end closes its stdin and waits for it.
func held(t *testing.T, args ...string) (c *exec.Cmd, end func()) {
	t.Helper()
	c = exec.Command(args[0], args[1:]...)
	in, err := c.StdinPipe()
	check.Must(t, err)
	check.Must(t, c.Start())
	ended := false
	end = func() {
		if !ended {
			ended = true
			in.Close()
			_ = c.Wait() // the tests check the exit status where it matters
		}
	}
	t.Cleanup(end)
	return c, end
}

// comms returns the names of processes.
func comms(list []Stat) (names []string) {
	for _, st := range list {
		names = append(names, st.Comm)
	}
	return names
}

var anyOrder = cmpopts.SortSlices(func(a, b string) bool { return a < b })

func TestReadStat(t *testing.T) {
	session, err := unix.Getsid(0)
	check.Must(t, err)
	got, err := ReadStat(os.Getpid())
	check.Must(t, err)
	check.That(t, got.PID == os.Getpid() && got.Parent == os.Getppid() && got.Session == session, "of ourselves: %+v", got)
	_, err = ReadStat(1 << 30)
	check.That(t, err == ErrGone, "of a pid that cannot be: %v", err)
	// Hostile names, as the kernel prints them.
	for _, name := range []string{"a b", "x) S 1 (y", ")", "(", "\n", "\xff"} {
		c, end := held(t, "sh", "-c", `printf %s "$1" >/proc/self/comm; read x`, "sh", name)
		// The shell itself opens the file for the redirection, so it renames itself.
		eventually(t, "named "+strconv.Quote(name), func() bool {
			st, err := ReadStat(c.Process.Pid)
			return err == nil && st.Comm == name && st.Parent == os.Getpid()
		})
		end()
	}
}

func TestNamespaces(t *testing.T) {
	unshare := []string{"unshare", "--fork", "--pid"}
	if os.Geteuid() != 0 {
		unshare = append(unshare, "--user", "--map-root-user")
	}
	// init of the new namespace, which has a child and a grandchild.
	c, end := held(t, append(unshare, "sh", "-c", `sleep 1000 & sh -c 'read x <&3' 3<&0 & read x; kill -9 -1; exit`)...)
	var below []Stat
	eventually(t, "a tree of four", func() bool {
		below = Descendants(c.Process.Pid, 100)
		names := comms(below)
		return cmp.Equal(names, []string{"sh", "sleep", "sh"}, anyOrder)
	})
	init := below[0]
	check.That(t, init.Parent == c.Process.Pid, "breadth first, but the first one is %+v", init)
	n, err := NSPID(init.PID)
	check.That(t, n == 1 && err == nil, "NSPID of init: %d, %v", n, err)
	n, err = NSPID(below[1].PID)
	check.That(t, n >= 2 && err == nil, "NSPID of its child: %d, %v", n, err)
	n, err = NSPID(os.Getpid())
	check.That(t, n == os.Getpid() && err == nil, "NSPID of ourselves: %d, %v, want %d", n, err, os.Getpid())
	ns, err := Namespace(init.PID, "pid")
	check.Must(t, err)
	ours, err := Namespace(os.Getpid(), "pid")
	check.Must(t, err)
	check.That(t, ns != ours && ns != 0, "namespaces %d and %d", ns, ours)
	check.NoDiff(t, cmp.Diff([]string{"sh", "sleep", "sh"}, comms(Members(100, ns)), anyOrder), "members (-want +got)")
	for _, limit := range []int{1, 2, 3} {
		check.Equal(t, len(Descendants(c.Process.Pid, limit)), limit)
		check.Equal(t, len(Members(limit, ns)), limit)
	}
	end()
	got := Members(100, ns)
	check.That(t, got == nil, "members of a namespace that has ended: %+v", got)
	got = Descendants(c.Process.Pid, 100)
	check.That(t, got == nil, "descendants of a process that has ended: %+v", got)
	_, err = Namespace(init.PID, "pid")
	check.That(t, errors.Is(err, unix.ENOENT), "namespace of a process that has ended: %v", err)
	_, err = NSPID(init.PID)
	check.That(t, err == ErrGone, "NSPID of a process that has ended: %v", err)
}

// Descendants includes zombies.
func TestDescendantsZombie(t *testing.T) {
	c, end := held(t, "sh", "-c", "exec 3<&0; (exit 0) & exec cat <&3")
	eventually(t, "a zombie", func() bool {
		below := Descendants(c.Process.Pid, 10)
		return len(below) == 1 && below[0].State == "Z" && below[0].Parent == c.Process.Pid
	})
	end()
	check.That(t, c.ProcessState.Sys().(syscall.WaitStatus).ExitStatus() == 0, "cat ended with %v", c.ProcessState)
}

// Children limits the number of threads that it reads, and returns an error because children may be missing.
func TestChildrenManyThreads(t *testing.T) {
	defer func(most int) { maxThreads = most }(maxThreads)
	maxThreads = 1
	c, _ := held(t, "sh", "-c", "sleep 60 & read line; kill $!")
	var children []int
	var err error
	eventually(t, "a child", func() bool {
		children, err = Children(c.Process.Pid)
		return len(children) == 1
	})
	want := "too many threads"
	check.That(t, err != nil && err.Error() == want, "%v, want %s", err, want)
}

// orphans reads all threads of this process, which may have any number of them and inherits the children of a killed keeper.
func TestOrphansManyThreads(t *testing.T) {
	defer func(most int) { maxThreads = most }(maxThreads)
	maxThreads = 1
	_, err := (&Kept{Keeper: &Keeper{}}).orphans()
	check.That(t, err == nil, "%v", err)
}

// Descendants reads a limited number of threads of all processes together, and still finds every process.
func TestDescendantsManyThreads(t *testing.T) {
	const threads, processes = 20, 5
	if os.Getenv("SBXRUN_TEST_THREADS") != "" {
		for range threads {
			go func() {
				runtime.LockOSThread()
				_, _ = io.Copy(io.Discard, os.Stdin) // blocks the thread
			}()
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	defer func(most int) { maxThreads = most }(maxThreads)
	maxThreads = threads
	t.Setenv("SBXRUN_TEST_THREADS", "1")
	c, _ := held(t, "sh", "-c", "exec 3<&0; for i in 1 2 3 4 5; do \"$0\" -test.run='^TestDescendantsManyThreads$' <&3 >/dev/null & done; wait", os.Args[0])
	eventually(t, "many threads of each process", func() bool {
		below := Descendants(c.Process.Pid, 100)
		return len(below) == processes && !slices.ContainsFunc(below, func(st Stat) bool { return st.Threads < threads })
	})
	found, asked := descendants(c.Process.Pid, 100)
	most := maxThreads + processes + 1
	check.That(t, len(found) == processes && asked <= most, "%d processes; %d threads were asked, want at most %d", len(found), asked, most)
}
