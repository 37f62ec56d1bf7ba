package faults

import (
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// When a command that creates, imports, unpacks or exports a snapshot is killed at a random
// moment, the snapshot is complete or absent and the sandbox keeps running. After a cleanup no file,
// lock or frozen process is left. SBXRUN_SOAK=2000 kills each 200 times.
func TestSnapshotKilled(t *testing.T) {
	e := newEnv(t)
	dir := filepath.Join(e.out, "original")
	harness.Must(t, os.Mkdir(dir, 0o755))
	flags := []string{"--name", "box", "--timeout", "20m", "--cwd", "none", "--overlay", dir + ":/data"}
	if s := e.do("run", "--pids", "50", "true"); s.code == 0 {
		flags = append(flags, "--pids", "50") // snapshot freezes it then
	}
	e.start(flags)
	e.ok("exec", "box", "sh", "-c", "head -c 3000000 /dev/urandom >/data/big; mkdir /data/d; for i in 1 2 3 4 5 6 7 8 9; do echo $i >/data/d/$i; done")
	sum := e.ok("exec", "box", "sh", "-c", "cat /data/big /data/d/* | sha256sum").stdout
	archive := filepath.Join(e.top, "archive")
	taken := e.ok("snapshot", "create", "box", "--name", "good").took
	e.ok("snapshot", "export", "good", archive)
	exports := filepath.Join(e.top, "exports")
	harness.Must(t, os.Mkdir(exports, 0o755))
	whole, err := os.Stat(archive)
	harness.Must(t, err)
	names := []string{"good"}
	verbs := []func(name string) []string{
		func(name string) []string { return []string{"snapshot", "create", "box", "--name", name} },
		func(name string) []string { return []string{"snapshot", "import", archive, "--name", name} },
		func(name string) []string {
			e.ok("cleanup") // so that it is unpacked again
			return e.startFlags("--from", "good")
		},
		func(name string) []string {
			return []string{"snapshot", "export", "good", filepath.Join(exports, name)}
		},
	}
	n := max(len(verbs), scaled(t, 40))
	for i := range n {
		name := fmt.Sprintf("s%d", i)
		// Change the layer each time, so that there is something to store.
		noise := make([]byte, 8)
		_, _ = rand.Read(noise)
		e.ok("exec", "box", "sh", "-c", fmt.Sprintf("echo %x >/data/noise", noise))
		args := verbs[i%len(verbs)](name)
		c, err := e.begin(args...)
		harness.Must(t, err)
		at := time.Duration(mathrand.Int64N(int64(taken * 3 / 2)))
		for time.Since(c.begin) < at && !c.over() {
		}
		e.strikeWithin(c)
		s := e.wait(c)
		if there := e.listed(name); there {
			names = append(names, name)
		} else if s.code == 0 && args[0] == "snapshot" && args[1] != "export" {
			t.Errorf("it says that %s is there: %v", name, s)
		}
	}
	e.verify(names, dir, sum)
	files, err := os.ReadDir(exports)
	harness.Must(t, err)
	for _, f := range files {
		if info, err := f.Info(); err != nil || info.Size() != whole.Size() {
			t.Errorf("%s is not all of it: %v, %v", f.Name(), info, err)
		}
	}
	e.ok("snapshot", "create", "box", "--name", "last") // works only if no lock is held
	e.do("kill", "--all", "--grace", "0")
	e.ok("cleanup")
	for _, left := range []string{"tmp", "trees"} {
		files, err := os.ReadDir(filepath.Join(e.top, "data/snapshots", left))
		check.That(t, err == nil && len(files) == 0, "left in %s: %v, %v", left, files, err)
	}
	e.cleared()
	s := e.ok("cleanup")
	check.That(t, !strings.Contains(s.stdout, "layer") && !strings.Contains(s.stdout, "draft") && !strings.Contains(s.stdout, "tree"), "left: %s", s.stdout)
}

// strikeWithin kills a command or one of its descendants.
func (e *env) strikeWithin(c *call) {
	pids := []int{c.pid}
	for _, p := range harness.Below(c.pid) {
		pids = append(pids, p.PID)
	}
	pid := pids[mathrand.IntN(len(pids))]
	target, err := harness.Open(pid)
	if err != nil {
		return // it has just exited
	}
	defer target.Close()
	if pid == c.pid || slices.ContainsFunc(harness.Below(c.pid), func(p harness.Proc) bool { return p.PID == pid }) {
		_ = target.Signal(unix.SIGKILL) // fails only if it has just exited
	}
}

// listed reports whether a snapshot exists.
func (e *env) listed(name string) bool {
	e.t.Helper()
	for line := range strings.Lines(e.ok("snapshot", "ls").stdout) {
		if first, _, _ := strings.Cut(line, " "); first == name {
			return true
		}
	}
	return false
}

// verify reads each snapshot completely, and starts a sandbox from the last one.
func (e *env) verify(names []string, dir, sum string) {
	e.t.Helper()
	for _, name := range names {
		archive := filepath.Join(e.top, "verify-"+name)
		e.ok("snapshot", "export", name, archive)
		e.ok("snapshot", "import", archive, "--name", "copy-of-"+name, "--data-dir", filepath.Join(e.top, "other"))
		harness.Must(e.t, os.Remove(archive))
	}
	last := names[len(names)-1]
	e.start([]string{"--name", "restored", "--from", last, "--overlay", dir + ":/data"}) // it may have been imported
	check.Equal(e.t, e.ok("exec", "restored", "sh", "-c", "cat /data/big /data/d/* | sha256sum").stdout, sum, "%s has", last)
}
