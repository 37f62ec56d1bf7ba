package tests

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// exec --detach of a program whose execve(2) takes 11 s, because its file has a lease, returns
// when the command runs.
func TestSlowExecve(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	harness.Must(t, os.Chmod(dir, 0o755))
	program := filepath.Join(dir, "program")
	harness.Must(t, os.WriteFile(program, []byte("#!/bin/sh\nexec sleep 600\n"), 0o755))
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--ro-bind", dir+":/work")
	lease, err := os.OpenFile(program, os.O_RDWR, 0)
	harness.Must(t, err)
	// The kernel breaks the lease after 45 s (fcntl(2), lease-break-time).
	if _, err := unix.FcntlInt(lease.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(11*time.Second, func() { lease.Close() })
	d := b.Detach(nil, "/work/program")
	s.Run("kill", d.Handle)
	if r := d.Ended(); r.Cause != "killed" || !r.Started {
		t.Errorf("%s", r.Raw())
	}
}
