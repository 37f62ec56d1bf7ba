package supervise

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A command whose execve(2) takes longer than confirmBound is neither killed nor reported as never started.
func TestSlowExecve(t *testing.T) {
	real := confirmBound
	confirmBound = 100 * time.Millisecond
	t.Cleanup(func() { confirmBound = real })
	for _, test := range []struct {
		name, text string
		want       result.Cause
		started    bool
	}{
		{"executed late", "#!/bin/sh\nexit 7\n", result.Exited, true},
		{"refused late", "#!/nosuch\n", result.StartFailed, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := harness.Dir(t)
			check.Must(t, os.Chmod(dir, 0o755))
			program := filepath.Join(dir, "program")
			check.Must(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))
			plan, err := room.Prepare(room.Policy{Command: []string{"/work/program"}, Workdir: "/tmp", Mounts: []room.Mount{{Kind: room.ReadOnly, Source: dir, Dest: "/work"}}},
				room.Caller{Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
			check.Must(t, err)
			defer plan.Close()
			check.Must(t, os.WriteFile(program, []byte(test.text), 0o755))
			c := &Command{Place: Place{Plan: plan}, Confirm: true, Options: Options{Timeout: time.Hour, ProofTimeout: 20 * time.Second, Attended: true}}
			// An open(2) of the program waits for the release of the lease, at most 45 s (fcntl(2)).
			lease, err := os.Open(program) // while it is open for writing, it cannot be executed
			check.Must(t, err)
			_, err = unix.FcntlInt(lease.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
			check.Must(t, err)
			check.OK(t, c.Start(t.Context()), "not released")
			select {
			case <-c.exec.Running():
				t.Error("it is confirmed although it waits for the lease")
			default:
			}
			check.Must(t, lease.Close())
			r, _ := c.Wait()
			check.That(t, c.Left == nil, "%v", c.Left)
			check.That(t, r.Cause == test.want && r.Started == test.started && r.Verdict == result.Proven && (!test.started || r.ExitCode() == 7), "%+v", r)
		})
	}
}
