package enter_test

import (
	"bufio"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func soon() time.Time { return time.Now().Add(harness.Bound) }

// sandbox runs a shell script until the test ends. lines reads the script's stdout.
func sandbox(t *testing.T, script string) (sb *room.Room, lines *bufio.Scanner) {
	t.Helper()
	plan, err := room.Prepare(room.Policy{Command: []string{"sh", "-c", script}, Workdir: "/tmp"},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	defer plan.Close()
	null := harness.Null(t)
	r, w := harness.Pipe(t)
	sb, err = plan.Start(t.Context(), [3]*os.File{null, w, os.Stderr}, nil, false)
	check.Must(t, err)
	w.Close()
	t.Cleanup(func() { end(t, sb) })
	sb.Exec.Release()
	check.Must(t, r.SetReadDeadline(soon()))
	return sb, bufio.NewScanner(r)
}

func end(t *testing.T, sb *room.Room) {
	t.Helper()
	out := supervise.Teardown(&sb.Kept, soon())
	check.That(t, out.Verdict == result.Proven, "teardown: %+v", out)
	check.OK(t, sb.Kept.Collect(soon()))
	sb.Close()
}

// read returns the next n lines.
func read(t *testing.T, lines *bufio.Scanner, n int) (got []string) {
	t.Helper()
	for range n {
		check.Require(t, lines.Scan(), "%q, and then no more: %v", got, lines.Err())
		got = append(got, lines.Text())
	}
	return got
}

var anyOrder = cmpopts.SortSlices(func(a, b string) bool { return a < b })

// children returns this process's children except the keeper.
func children(t *testing.T, keeper int) (list []proc.Stat) {
	t.Helper()
	for _, st := range proc.Descendants(os.Getpid(), 1000) {
		if st.Parent == os.Getpid() && st.PID != keeper {
			list = append(list, st)
		}
	}
	return list
}

// loop defines a shell function that prints its name at each SIGTERM.
const loop = `loop() { trap "echo $1" TERM; echo up; while :; do sleep 0.01 & wait; done; }; `

func TestSignalReachesAll(t *testing.T) {
	script := loop + `
		(loop child) &
		setsid sh -c '` + loop + `loop session' &
		(setsid sh -c '` + loop + `loop orphan' & exit) &
		loop payload`
	sb, lines := sandbox(t, script)
	diff := cmp.Diff([]string{"up", "up", "up", "up"}, read(t, lines, 4))
	check.Require(t, diff == "", "(-want +got):\n%s", diff)
	check.Must(t, enter.Signal(sb.Room, sb.Cred, sb.HostNet, unix.SIGTERM))
	check.NoDiff(t, cmp.Diff([]string{"child", "session", "orphan", "payload"}, read(t, lines, 4), anyOrder), "reached (-want +got)")
	check.That(t, !sb.Init.Exited(), "init has ended")
	got := children(t, sb.Keeper.PID)
	check.That(t, got == nil, "left behind: %+v", got)
}

func TestSignalStops(t *testing.T) {
	sb, _ := sandbox(t, "setsid sleep 100 & exec sleep 100")
	// A process that waits for its vfork(2) child to exec cannot stop, so wait until both have executed sleep.
	until(t, sb, "two sleeps", func(st proc.Stat) bool { return st.Comm == "sleep" })
	check.Must(t, enter.Signal(sb.Room, sb.Cred, sb.HostNet, unix.SIGSTOP))
	until(t, sb, "two stopped", func(st proc.Stat) bool { return st.State == "T" })
}

// until waits until there are two processes below init and is holds for both.
func until(t *testing.T, sb *room.Room, what string, is func(proc.Stat) bool) {
	t.Helper()
	harness.Until(t, harness.Bound, what, func() bool {
		list := proc.Descendants(sb.Init.PID, 100)
		return len(list) == 2 && is(list[0]) && is(list[1])
	})
}

// Signal succeeds even if no process is there to receive it, and if many signals are sent at once.
func TestSignalConcurrently(t *testing.T) {
	sb, lines := sandbox(t, "echo up; while :; do (:) & wait; done")
	read(t, lines, 1)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 10 {
				check.OK(t, enter.Signal(sb.Room, sb.Cred, sb.HostNet, unix.SIGCONT))
			}
		})
	}
	all.Wait()
	got := children(t, sb.Keeper.PID)
	check.That(t, got == nil, "left behind: %+v", got)
}

func TestSignalErrors(t *testing.T) {
	sb, lines := sandbox(t, "echo up; sleep 100")
	read(t, lines, 1)
	err := enter.Signal(sb.Room, sb.Cred, sb.HostNet, 65)
	check.That(t, err != nil, "signal 65: no error")
	check.Must(t, sb.Room.Signal(unix.SIGKILL))
	check.Must(t, sb.Room.Wait(soon()))
	err = enter.Signal(sb.Room, sb.Cred, sb.HostNet, unix.SIGTERM)
	check.That(t, err != nil && strings.HasPrefix(err.Error(), "enter the room of process "), "to a room that has ended: %v", err)
}

// command returns an entry for true(1) in a room, and its descriptors 0, 1 and 2.
func command(t *testing.T, sb *room.Room) (*enter.Entry, [3]*os.File) {
	t.Helper()
	null := harness.Null(t)
	return &enter.Entry{Cred: sb.Cred, HostNet: sb.HostNet, Command: []string{"true"}, Path: os.Getenv("PATH"), Workdir: "/"}, [3]*os.File{null, null, null}
}

// Signal and Start do not wait for the room's end when they fail for lack of descriptors: that says nothing about the
// room, and waiting would delay the SIGKILL that follows a signal.
func TestNothingCanBeSent(t *testing.T) {
	sb, lines := sandbox(t, "echo up; sleep 100")
	read(t, lines, 1)
	entry, stdio := command(t, sb)

	t.Cleanup(harness.LimitDescriptors(t, 3))
	begin := time.Now()
	err := enter.Signal(sb.Room, sb.Cred, sb.HostNet, unix.SIGCONT)
	check.That(t, errors.Is(err, unix.EMFILE), "a signal without a descriptor: %v", err)
	took := time.Since(begin)
	check.That(t, took < enter.Dying, "a signal that was not sent took %v", took)
	begin = time.Now()
	_, err = entry.Start(t.Context(), sb.Room, stdio, nil)
	check.That(t, errors.Is(err, unix.EMFILE), "a command without a descriptor: %v", err)
	took = time.Since(begin)
	check.That(t, took < enter.Dying, "a command that was not started took %v", took)
}

// Identify fails without waiting when init exists but there is no free descriptor for its pidfd.
func TestNothingCanBeHeld(t *testing.T) {
	sb, lines := sandbox(t, "echo up; sleep 100")
	read(t, lines, 1)
	entry, stdio := command(t, sb)
	x, way, err := entry.Prepare(stdio, nil)
	if err == nil {
		err = x.Enter(sb.Room)
	}
	if err == nil {
		x.Keeper, err = proc.Keep(proc.Command{Way: way, Cred: sb.Cred})
		x.Entered()
	}
	check.Must(t, err)
	defer x.Close()

	t.Cleanup(harness.LimitDescriptors(t, 3))
	begin := time.Now()
	err = x.Identify(t.Context(), soon())
	check.That(t, errors.Is(err, unix.EMFILE), "without a descriptor: %v", err)
	took := time.Since(begin)
	check.That(t, took < enter.Dying, "that took %v", took)
	_, err = x.Abandon(soon())
	check.That(t, err == nil, "%v", err)
}
