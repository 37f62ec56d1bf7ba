package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// SIGQUIT ends every command with 131 and without a goroutine trace.
func TestQuit(t *testing.T) {
	t.Parallel()
	quit := func(p *harness.Process) {
		t.Helper()
		p.Signal(syscall.SIGQUIT)
		if r := p.Wait(); r.ExitCode != 131 || len(r.Stderr) != 0 {
			t.Errorf("exit code %d, signal %d, stderr %.300q", r.ExitCode, r.Signal, r.Stderr)
		}
	}
	// A run that waits for a slot does not handle signals yet.
	s := harness.NewState(t)
	o := harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + s.Dir}, Bare: true}
	holder := harness.Start(t, o, "--max-parallel", "1", "sh", "-c", "echo up; exec sleep 60")
	holder.WaitOutput("up\n")
	p := harness.Start(t, o, "--max-parallel", "1", "--on-pressure", "wait", "true")
	harness.Until(t, harness.Bound, "the run in the queue", func() bool { return queued(t, s.Dir) == 1 })
	quit(p)
	quit(holder)

	// Commands that wait for a sandbox.
	b := s.Sandbox(harness.Options{}, "--name", "long")
	waits := func(p *harness.Process, object string) {
		t.Helper()
		harness.Until(t, harness.Bound, object, func() bool {
			links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.PID))
			harness.Must(t, err)
			for _, link := range links {
				if target, err := os.Readlink(link); err == nil && strings.Contains(target, object) {
					return true
				}
			}
			return false
		})
	}
	p = s.Start(harness.Options{}, "wait", "long")
	waits(p, "pidfd")
	quit(p)
	p = s.Start(harness.Options{}, "logs", "--follow", "long")
	waits(p, "inotify")
	quit(p)
	b.Alive()

	// The supervisor treats SIGQUIT as a request to end the sandbox.
	harness.Must(t, syscall.Kill(b.Supervisor.PID, syscall.SIGQUIT))
	b.Ended()
}
