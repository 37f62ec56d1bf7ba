package admission

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// roleVar makes a child process take a slot and wait to be killed, for TestKilledHolder.
const roleVar = "SBXRUN_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(roleVar) == "slot" {
		d, err := state.Open(state.Caller{StateDir: os.Args[1], UID: os.Geteuid()})
		if err == nil {
			_, err = takeSlot(d.Folder(), 1)
		}
		fmt.Println(err)
		_ = unix.Pause()
	}
	os.Exit(m.Run())
}

// opened returns a new state directory.
func opened(t *testing.T) *state.Dir {
	t.Helper()
	d, err := state.Open(state.Caller{StateDir: filepath.Join(t.TempDir(), "state"), UID: os.Geteuid()})
	check.Must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// take takes a slot, which must be free.
func take(t *testing.T, d *state.Dir, n int) (release func()) {
	t.Helper()
	release, err := takeSlot(d.Folder(), n)
	check.Require(t, err == nil, "one of %d slots: %v", n, err)
	return release
}

func TestTakeSlot(t *testing.T) {
	d := opened(t)
	first := take(t, d, 2)
	second := take(t, d, 2)
	_, err := takeSlot(d.Folder(), 2)
	check.That(t, err == errFull, "a third of two: %v", err)
	third := take(t, d, 3)
	first()
	again := take(t, d, 2)
	for _, release := range []func(){again, second, third} {
		release()
	}
	take(t, d, 1)()
}

// takeSlot fails if another process waits in the queue, but not if one only looks at it.
func TestTakeSlotBehindQueue(t *testing.T) {
	d := opened(t)
	release := take(t, d, 1)
	queue, err := d.Folder().Open(queueName, unix.O_RDWR|unix.O_CREAT)
	check.Must(t, err)
	defer unix.Close(queue)
	check.Must(t, unix.Flock(queue, unix.LOCK_EX))
	begin := time.Now()
	_, err = takeSlot(d.Folder(), 1)
	check.That(t, err == errFull, "with all slots taken:  %v", err)
	took := time.Since(begin)
	check.That(t, took <= queueMoment/2, "that took %v", took)
	release()
	taken := make(chan error)
	go func() {
		release, err := takeSlot(d.Folder(), 1)
		if err == nil {
			release()
		}
		taken <- err
	}()
	select {
	case err := <-taken:
		t.Errorf("overtook the head of the queue:  %v", err)
	case <-time.After(50 * time.Millisecond): // time for an attempt
	}
	check.Must(t, unix.Flock(queue, unix.LOCK_UN))
	check.OK(t, <-taken, "with a free slot and no waiters")
}

// A stopped head of the queue does not keep others from a free slot.
func TestSlotBehindStopped(t *testing.T) {
	t.Parallel()
	d := opened(t)
	queue, err := d.Folder().Open(queueName, unix.O_RDWR|unix.O_CREAT)
	check.Must(t, err)
	defer unix.Close(queue)
	check.Must(t, unix.Flock(queue, unix.LOCK_EX))
	taken := make(chan error, 2)
	go func() {
		_, err := takeSlot(d.Folder(), 2)
		taken <- err
	}()
	go func() {
		_, err := waitSlot(t.Context(), d.Folder(), 2)
		taken <- err
	}()
	for range 2 {
		select {
		case err := <-taken:
			check.OK(t, err)
		case <-time.After(20 * queueMoment):
			t.Fatal("a waiter got no slot")
		}
	}
}

// Waiters get slots in their order of arrival. Each is known to wait before the next comes.
func TestWaitSlotOrder(t *testing.T) {
	d := opened(t)
	release := take(t, d, 1)
	const waiters = 8
	order := make(chan int, waiters)
	for i := range waiters {
		go func() {
			release, err := waitSlot(t.Context(), d.Folder(), 1)
			check.That(t, err == nil, "waiter %d: %v", i, err)
			order <- i
			if err == nil {
				release()
			}
		}()
		blocked(t, d, i+1)
	}
	release()
	for want := range waiters {
		select {
		case got := <-order:
			check.That(t, got == want, "%d came instead of %d", got, want)
		case <-time.After(10 * time.Second):
			t.Fatalf("waiter %d was not let in", want)
		}
	}
}

// blocked waits until the queue has n processes: the head holds it, and the others are
// in /proc/locks with an arrow before them.
func blocked(t *testing.T, d *state.Dir, n int) {
	t.Helper()
	var st unix.Stat_t
	err := unix.Fstatat(d.Folder().FD, queueName, &st, 0)
	check.Require(t, err == nil || err == unix.ENOENT, "%v", err)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if err := unix.Fstatat(d.Folder().FD, queueName, &st, 0); err == nil && inQueue(t, st.Ino) == n {
			return
		}
		check.Require(t, !time.Now().After(end), "%d are in the queue, want %d", inQueue(t, st.Ino), n)
	}
}

func inQueue(t *testing.T, inode uint64) (n int) {
	t.Helper()
	for line := range strings.Lines(string(harness.ReadFile(t, "/proc/locks"))) {
		if strings.Contains(line, " FLOCK ") && strings.Contains(line, fmt.Sprintf(":%d ", inode)) {
			n++
		}
	}
	return n
}

// A cancelled waiter leaves the queue, whether it is the head or not.
func TestWaitSlotCanceled(t *testing.T) {
	d := opened(t)
	release := take(t, d, 1)
	gaveUp := errors.New("gave up")
	headCtx, giveUpHead := context.WithCancelCause(t.Context())
	lastCtx, giveUpLast := context.WithCancelCause(t.Context())
	ended := make(chan error, 2)
	for i, ctx := range []context.Context{headCtx, lastCtx} {
		go func() {
			_, err := waitSlot(ctx, d.Folder(), 1)
			ended <- err
		}()
		blocked(t, d, i+1)
	}
	for _, giveUp := range []context.CancelCauseFunc{giveUpLast, giveUpHead} {
		giveUp(gaveUp)
		select {
		case err := <-ended:
			check.That(t, err == gaveUp, "who gave up got %v", err)
		case <-time.After(10 * time.Second):
			t.Fatal("it does not end")
		}
	}
	release()
	take(t, d, 1)()
}

// SIGKILL frees the slot of a process.
func TestKilledHolder(t *testing.T) {
	d := opened(t)
	cmd := exec.Command("/proc/self/exe", d.Path())
	cmd.Env = append(os.Environ(), roleVar+"=slot")
	out, err := cmd.StdoutPipe()
	check.Must(t, err)
	check.Must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	check.Require(t, err == nil && line == "<nil>\n", "the holder says %q, %v", line, err)
	_, err = takeSlot(d.Folder(), 1)
	check.Require(t, err == errFull, "with a holder: %v", err)
	check.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	take(t, d, 1)()
}

func TestAdmission(t *testing.T) {
	d := opened(t)
	release, ok, err := try(d.Folder(), admissionName)
	check.Require(t, ok && err == nil, "%v, %v", ok, err)
	_, ok, err = try(d.Folder(), admissionName)
	check.That(t, !ok && err == nil, "twice: %v, %v", ok, err)
	release()
	release, ok, err = try(d.Folder(), admissionName)
	check.Require(t, ok && err == nil, "after the release: %v, %v", ok, err)
	release()
}

// Executed programs do not inherit the locks.
func TestLocksCloseOnExec(t *testing.T) {
	d := opened(t)
	defer take(t, d, 1)()
	release, _, err := try(d.Folder(), admissionName)
	check.Must(t, err)
	defer release()
	found := 0
	entries := harness.ReadDir(t, "/proc/self/fd")
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || target != d.Path()+"/slot-0" && target != d.Path()+"/admission" && target != d.Path()+"/queue" {
			continue
		}
		found++
		fd, err := strconv.Atoi(e.Name())
		check.Must(t, err)
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		check.Must(t, err)
		check.That(t, flags&unix.FD_CLOEXEC != 0, "%s stays open over an exec", target)
	}
	check.That(t, found == 2, "%d locks are open, want the slot and the admission", found)
}

func TestSlotFilesAreDocumented(t *testing.T) {
	doc := harness.ReadFile(t, "../../docs/reference/state.md")
	for _, name := range []string{queueName, slotPrefix + "N", admissionName} {
		check.That(t, strings.Contains(string(doc), "`"+name+"`"), "docs/reference/state.md does not have %s", name)
	}
}
