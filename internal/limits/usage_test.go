package limits

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// opens returns how often a file was opened since the last call.
func opens(t *testing.T, watch int) (n int) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for {
		got, err := unix.Read(watch, buf)
		if err == unix.EAGAIN {
			return n
		}
		check.Must(t, err)
		n += got / unix.SizeofInotifyEvent // for a file: events without names
	}
}

// Under memory pressure v2 often notifies about memory.events without a kill. Each time the file is read once
// or twice, and not again until a kill may have been counted, as for v1.
func TestWatchOOMUnifiedDoesNotPoll(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "memory.events")
	write := func(text string) {
		t.Helper()
		check.Must(t, os.WriteFile(file, []byte(text), 0o600))
	}
	write("max 0\noom_kill 0\n")
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	check.Must(t, err)
	defer unix.Close(watch)
	g := &Group{v2: dir, read: map[string]string{"memory": dir}}
	ctx, cancel := context.WithCancel(t.Context())
	events, over := make(chan Event, 1), make(chan struct{})
	go func() {
		defer close(over)
		g.watchOOM(ctx, events)
	}()
	defer func() {
		cancel()
		<-over
	}()
	_, err = unix.InotifyAddWatch(watch, file, unix.IN_OPEN)
	check.Must(t, err)
	// Each of our own writes opens the file once and truncates it, which may notify twice.
	const rounds, most = 10, 5
	begin, n := time.Now(), 0
	for range rounds {
		write("max 1\noom_kill 0\n")
		// Several times, because equal unread events are merged.
		for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); time.Sleep(200 * time.Microsecond) {
			n += opens(t, watch)
		}
	}
	check.That(t, n <= rounds*most, "memory.events was read %d times in %v, for %d changes", n, time.Since(begin), rounds)
	write("max 1\noom_kill 1\n")
	select {
	case <-events:
	case <-time.After(20 * time.Second):
		t.Fatal("the kill was not seen")
	}
}

// The CPU time watcher uses the number of CPUs that a program can reach, not the caller's affinity (taskset(1)).
func TestMostCPUs(t *testing.T) {
	if os.Getenv("LIMITS_TEST_PINNED") != "" {
		fmt.Println("most:", mostCPUs())
		return
	}
	runtime.LockOSThread() // not unlocked: the thread ends with the test
	var one unix.CPUSet
	one.Set(ownCPUs()[0])
	check.Must(t, unix.SchedSetaffinity(0, &one))
	c := exec.Command(os.Args[0], "-test.run=^TestMostCPUs$")
	c.Env = append(os.Environ(), "LIMITS_TEST_PINNED=1")
	out, err := c.CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(out), fmt.Sprintf("most: %d\n", mostCPUs())), "pinned to one: %s, %v", out, err)
}
