package supervise_test

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func soon() time.Time { return time.Now().Add(20 * time.Second) }

// held returns a held sandbox for a shell script, and the script's stdout.
func held(t *testing.T, script string) (sb *room.Room, stdout *os.File) {
	t.Helper()
	plan, err := room.Prepare(room.Policy{Command: []string{"sh", "-c", script}, Workdir: "/tmp"},
		room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	defer plan.Close()
	null := harness.Null(t)
	stdout, w := harness.Pipe(t)
	sb, err = plan.Start(t.Context(), [3]*os.File{null, w, os.Stderr}, nil, false)
	w.Close()
	check.Must(t, err)
	t.Cleanup(sb.Close)
	return sb, stdout
}

// up releases the sandbox and waits for n lines.
func up(t *testing.T, sb *room.Room, stdout *os.File, n int) {
	t.Helper()
	sb.Exec.Release()
	err := stdout.SetReadDeadline(soon())
	check.Must(t, err)
	for n > 0 {
		var b [1]byte
		_, err := stdout.Read(b[:])
		check.Must(t, err)
		if b[0] == '\n' {
			n--
		}
	}
}

// gone checks that a proven outcome is true.
func gone(t *testing.T, sb *room.Room, stdout *os.File, out supervise.Outcome) {
	t.Helper()
	check.That(t, out.Verdict == result.Proven && out.Err == nil && out.Survivors == nil, "outcome %+v", out)
	check.OK(t, sb.Kept.Collect(soon()))
	left := proc.Members(100, sb.RoomNS, sb.InitNS)
	check.That(t, left == nil, "in the namespace: %+v", left)
	for _, st := range proc.Descendants(os.Getpid(), 100) {
		check.That(t, st.PID != sb.Keeper.PID && st.Parent != sb.Keeper.PID && st.PID != sb.Init.PID, "left behind: %+v", st)
	}
	err := stdout.SetReadDeadline(soon())
	check.Must(t, err)
	_, err = io.Copy(io.Discard, stdout)
	check.That(t, err == nil, "stdout has no end: %v", err)
}

func TestTeardownTree(t *testing.T) {
	sb, stdout := held(t, `
		trap "" TERM INT HUP QUIT
		setsid sh -c 'echo session; sleep 100' &
		(setsid sh -c 'echo orphan; sleep 100' & exit) &
		sh -c 'echo stopped; kill -STOP $$' &
		for i in 1 2 3 4 5 6 7 8 9 10; do sleep 100 & done
		echo payload
		sleep 100`)
	up(t, sb, stdout, 4)
	out := supervise.Teardown(&sb.Kept, soon())
	gone(t, sb, stdout, out)
}

// A payload that is never released never runs, not even when its sandbox ends.
func TestTeardownHeld(t *testing.T) {
	sb, stdout := held(t, "echo ran")
	out := supervise.Teardown(&sb.Kept, soon())
	check.Must(t, stdout.SetReadDeadline(soon()))
	text, err := io.ReadAll(stdout)
	check.That(t, err == nil && len(text) == 0, "the payload wrote %q, %v", text, err)
	gone(t, sb, stdout, out)
}

func TestTeardownEnded(t *testing.T) {
	for _, script := range []string{"echo up; exit 3", "echo up; kill -9 $$", "sleep 100 & echo up; kill -9 -1", "sleep 100 & echo up; exit 0"} {
		sb, stdout := held(t, script)
		up(t, sb, stdout, 1)
		select {
		case <-sb.Exec.Exited():
		case <-time.After(20 * time.Second):
			t.Errorf("%s: has not exited", script)
		}
		gone(t, sb, stdout, supervise.Teardown(&sb.Kept, soon()))
	}
}

// The teardown is proven if another process has killed init or the monitor.
func TestTeardownKilledBefore(t *testing.T) {
	kills := map[string]func(sb *room.Room) error{
		"init": func(sb *room.Room) error { return sb.Init.Signal(unix.SIGKILL) },
		"room": func(sb *room.Room) error { return sb.Room.Signal(unix.SIGKILL) },
		"monitor": func(sb *room.Room) error {
			st, err := proc.ReadStat(sb.Room.PID)
			if err != nil {
				return err
			}
			p, err := proc.Open(st.Parent)
			if err != nil {
				return err
			}
			defer p.Close()
			return errors.Join(p.Signal(unix.SIGKILL), p.Wait(soon()))
		},
	}
	for name, kill := range kills {
		t.Run(name, func(t *testing.T) {
			sb, stdout := held(t, "setsid sleep 100 & echo up; sleep 100")
			up(t, sb, stdout, 1)
			check.Must(t, kill(sb))
			gone(t, sb, stdout, supervise.Teardown(&sb.Kept, soon()))
		})
	}
}

// Without time for a proof the teardown is unproven, and a later one is proven. If this process is preempted between
// the kill and the check, the first may be proven; then the test tries again.
func TestTeardownDeadline(t *testing.T) {
	const tries = 20
	for range tries {
		sb, stdout := held(t, "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 100 & done; echo up; sleep 100")
		up(t, sb, stdout, 1)
		out := supervise.Teardown(&sb.Kept, time.Unix(1, 0))
		late := out.Verdict == result.Unproven && errors.Is(out.Err, os.ErrDeadlineExceeded)
		check.That(t, late || out.Verdict == result.Proven, "deadline long past: %+v", out)
		gone(t, sb, stdout, supervise.Teardown(&sb.Kept, soon()))
		if late {
			return
		}
	}
	t.Errorf("proven %d times although the deadline was long past", tries)
}

// A stopped keeper does not prevent the proof.
func TestTeardownKeeperStopped(t *testing.T) {
	sb, stdout := held(t, "setsid sleep 100 & echo up; sleep 100")
	up(t, sb, stdout, 1)
	check.Must(t, sb.Keeper.Signal(unix.SIGSTOP))
	gone(t, sb, stdout, supervise.Teardown(&sb.Kept, time.Now().Add(8*time.Second))) // waits until the deadline
}

// A keeper that still has children at the deadline ends later and does not stay as a zombie of this process.
func TestCollectLate(t *testing.T) {
	sb, stdout := held(t, "echo up; sleep 100")
	up(t, sb, stdout, 1)
	keeper := sb.Keeper.PID
	err := sb.Kept.Collect(time.Unix(1, 0))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
	harness.Until(t, 20*time.Second, "the end of the keeper", func() bool {
		_, err := proc.ReadStat(keeper)
		return err == proc.ErrGone
	})
}
