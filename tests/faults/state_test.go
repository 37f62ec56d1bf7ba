package faults

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
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

// stays is a payload that creates a file and keeps running. floods prints without end as soon as /out/full exists.
var (
	stays  = []string{"sh", "-c", ": >/out/ran; exec sleep 600"}
	floods = []string{"sh", "-c", ": >/out/ran; setsid sleep 600 & while [ ! -e /out/full ]; do sleep 0.01; done; exec yes"}
)

// startOrError starts a sandbox with too few resources. Either it runs and is listed, or sbxrun
// fails with one line, leaves nothing, and the command has not run.
func (m *small) startOrError(what string) (started bool) {
	e := m.e
	e.t.Helper()
	_ = os.Remove(filepath.Join(e.out, "ran"))
	s := e.do(e.startArgs([]string{"--name", "box"}, stays...)...)
	if s.ExitCode == 0 {
		e.ok("ps").OutHas(e.t, "box")
		e.ok("exec", "--timeout", lifetime, "box", "true")
		e.ok("kill", "--grace", "0", "box")
	} else {
		e.refused(s, 125)
		check.That(e.t, !strings.Contains(string(s.Stderr), "exited before reporting"), "%s: that says nothing: %v", what, s)
		check.That(e.t, !e.wrote("ran"), "%s: refused, and the command has run: %v", what, s)
		left := m.listing()
		check.That(e.t, len(left) == 0, "%s: refused, and left %q: %v", what, left, s)
	}
	e.gone(settle)
	reapZombies()
	e.ok("cleanup")
	left := m.listing()
	check.That(e.t, len(left) == 0, "%s: cleanup has left %q", what, left)
	return s.ExitCode == 0
}

// On a full state directory, start works or fails with one line.
func TestStateFull(t *testing.T) {
	e := newEnv(t)
	m := e.mounted("size=256k,mode=700")
	worked := false
	for free := 0; free <= 8; free++ {
		m.fill(free)
		worked = m.startOrError(fmt.Sprintf("%d free pages", free))
		m.empty()
	}
	check.That(t, worked, "32 KiB are not enough for a sandbox")
}

// The same without inodes.
func TestStateInodes(t *testing.T) {
	worked := false
	for n := 2; n <= 14 && !t.Failed(); n++ { // the first is the directory itself
		e := newEnv(t)
		m := e.mounted(fmt.Sprintf("size=1m,nr_inodes=%d,mode=700", n))
		worked = m.startOrError(fmt.Sprintf("%d inodes", n))
	}
	check.That(t, worked, "14 inodes are not enough for a sandbox")
}

// When the state directory fills up while a busy sandbox runs, its deadline holds, and kill and exec work.
func TestStateFillsUp(t *testing.T) {
	for _, end := range []struct {
		name  string
		flags []string
		act   func(b *sandbox)
	}{
		{"deadline", []string{"--timeout", "0.7"}, nil},
		{"grace", []string{"--timeout", "0.7", "--grace", "0.1"}, nil},
		{"idle", []string{"--timeout", lifetime, "--idle-timeout", "0.7"}, nil},
		{"kill", nil, func(b *sandbox) {
			b.alive()
			b.e.ok("kill", "--grace", "0", b.ID)
		}},
		{"signal", nil, func(b *sandbox) { b.strikeSupervisor(unix.SIGTERM) }},
	} {
		t.Run(end.name, func(t *testing.T) {
			e := newEnv(t)
			m := e.mounted("size=256k,mode=700")
			begin := time.Now()
			b := e.started(e.do(e.startArgs(end.flags, floods...)...))
			e.family(b.PID)
			m.fill(0)
			check.Must(t, os.WriteFile(filepath.Join(e.out, "full"), nil, 0o644))
			if end.act != nil {
				end.act(b)
			}
			b.ended(3 * time.Second)
			if end.act == nil {
				harness.Within(t, "the sandbox", time.Since(begin), 650*time.Millisecond, 900*time.Millisecond)
			}
			e.gone(settle)
			// Commands report what they can, and cleanup removes everything.
			e.ok("ps", "--all").OutHas(t, b.ID)
			s := e.do("wait", b.ID)
			check.That(t, s.ExitCode == 137 || s.ExitCode == 124 || s.ExitCode == 143, "%v", s)
			e.ok("cleanup")
			left := m.listing()
			check.That(t, len(left) == 0, "cleanup has left %q", left)
		})
	}
}

// With a read-only state directory, start fails, and commands that only read work.
func TestStateReadOnly(t *testing.T) {
	e := newEnv(t)
	e.mounted("ro,size=64k,mode=700")
	s := e.do(e.startArgs(nil, stays...)...)
	e.refused(s.ErrHas(t, "read-only").ErrHas(t, e.state), 125)
	check.That(t, !e.wrote("ran"), "refused, and the command has run: %v", s)
	for _, args := range [][]string{{"ps", "--all"}, {"ps", "--json"}, {"kill", "--all"}, {"cleanup", "--dry-run"}} {
		e.ok(args...).Err(t, "")
	}
	for _, args := range [][]string{{"inspect", "x"}, {"logs", "x"}, {"exec", "x", "true"}, {"wait", "x"}, {"kill", "x"}} {
		e.refused(e.do(args...), 125)
	}
	e.gone(settle)
}

// Commands refuse a state directory that others can access or that the caller cannot enter. For directories of other
// owners, see TestAnotherUser.
func TestStateDenied(t *testing.T) {
	e := newEnv(t)
	b := e.start(nil, stays...)
	refuse := func(what string) {
		t.Helper()
		for _, args := range [][]string{append(e.startFlags(), "true"), {"ps"}, {"inspect", b.ID}, {"logs", b.ID}, {"exec", b.ID, "true"},
			{"wait", b.ID}, {"kill", b.ID}, {"kill", "--all"}, {"cleanup"}} {
			e.refused(e.do(args...).ErrHas(t, e.state), 125)
		}
		check.That(t, !harness.Exited(b.PID), "%s: the sandbox has ended", what)
	}
	for _, mode := range []os.FileMode{0o755, 0o770, 0o701, 0o777} {
		check.Must(t, os.Chmod(e.state, mode))
		refuse(mode.String())
	}
	if !harness.Root() {
		check.Must(t, os.Chmod(e.state, 0))
		refuse("no permission")
		check.Must(t, os.Chmod(e.state, 0o700))
		// With a read-only directory of the sandbox, everything that does not write works.
		check.Must(t, os.Chmod(b.path(""), 0o500))
		b.alive()
		e.ok("kill", "--grace", "0", b.ID)
		b.ended(3 * time.Second)
		check.Must(t, os.Chmod(b.path(""), 0o700))
	}
	check.Must(t, os.Chmod(e.state, 0o700))
	e.clean()
}

// trap is a directory outside the state directory that planted links point to. Nothing in it may change.
type trap struct {
	t      testing.TB
	dir    string
	before []string
}

func newTrap(t testing.TB) *trap {
	t.Helper()
	p := &trap{t: t, dir: harness.Dir(t)}
	for _, name := range []string{"file", "record.json", "lock", "activity", "kill.json", "env", "stdout.log", "stderr.log", "name"} {
		check.Must(t, os.WriteFile(filepath.Join(p.dir, name), []byte("do not touch\n"), 0o644))
	}
	p.before = entries(t, p.dir)
	return p
}

func (p *trap) path(name string) string { return filepath.Join(p.dir, name) }

func (p *trap) untouched(s *harness.Result) {
	p.t.Helper()
	after := entries(p.t, p.dir)
	check.That(p.t, !strings.Contains(string(s.Stdout)+string(s.Stderr), "do not touch"), "a link was read: %v", s)
	check.That(p.t, slices.Equal(p.before, after), "a link was followed by %v:\n%q\n%q", s, p.before, after)
}

// plants replace a file with something else.
var plants = []struct {
	name  string
	plant func(path string, p *trap) error
}{
	{"link to a file", func(path string, p *trap) error { return os.Symlink(p.path("file"), path) }},
	{"link to a directory", func(path string, p *trap) error { return os.Symlink(p.dir, path) }},
	{"link to a device", func(path string, _ *trap) error { return os.Symlink("/dev/zero", path) }},
	{"dangling link", func(path string, p *trap) error { return os.Symlink(p.path("new"), path) }},
	{"pipe", func(path string, _ *trap) error { return unix.Mkfifo(path, 0o600) }},
	{"socket", func(path string, _ *trap) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) }},
	{"directory", func(path string, _ *trap) error { return os.Mkdir(path, 0o700) }},
	{"nothing", func(string, *trap) error { return nil }},
}

// When a file of a running sandbox is replaced, every command works or fails with one line,
// follows no link and does not hang, and the supervisor still ends the sandbox.
func TestStatePlanted(t *testing.T) {
	files := []string{"lock", "activity", "record.json", "kill.json", "env", "stdout.log", "stderr.log"}
	for i, file := range files {
		t.Run(file, func(t *testing.T) {
			for j, plant := range plants {
				if (i+j)%2 == 0 && soak(t) < 1000 {
					continue // each plant with some of the files
				}
				e := newEnv(t)
				p := newTrap(t)
				b := e.start([]string{"--name", "box"}, stays...)
				err := os.Remove(b.path(file))
				check.Require(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
				check.Must(t, plant.plant(b.path(file), p))
				what := file + ": " + plant.name
				for _, args := range [][]string{{"ps", "--all"}, {"inspect", b.ID}, {"logs", "box"}, {"exec", "--timeout", lifetime, b.ID, "true"},
					{"wait", "--timeout", "0.02", b.ID}, {"cleanup", "--dry-run"}} {
					s := e.do(args...)
					p.untouched(s)
					// Without its lock a sandbox counts as lost, and its own supervisor ends it 300 ms after the start.
					check.Require(t, !harness.Exited(b.PID) || file == "lock", "%s: the sandbox was ended by %v", what, s)
					if s.ExitCode != 0 && !(file == "lock" && s.ExitCode == 137) { // 137 is its own code then
						e.refused(s, 124, 125, 137)
					}
				}
				s := e.do("kill", "--grace", "0", b.ID)
				p.untouched(s)
				check.That(t, s.ExitCode == 0 || file == "record.json" || file == "lock", "%s: want 0: %v", what, s)
				if !harness.Exited(b.PID) {
					b.strikeSupervisor(unix.SIGTERM)
					b.ended(3 * time.Second)
				}
				e.gone(settle)
				reapZombies()
				s = e.do("cleanup")
				p.untouched(s)
				if plant.name == "directory" && s.ExitCode != 0 {
					// cleanup leaves an unexpected directory and says so.
					_ = os.Remove(b.path(file))
					_ = os.Remove(filepath.Join(e.state, "."+b.ID, file))
					s = e.do("cleanup")
				}
				check.That(t, s.ExitCode == 0, "%s: %v", what, s)
				e.cleared()
				check.Require(t, !t.Failed(), "that was %s", what)
			}
		})
	}
}

// The same for files that belong to no single sandbox.
func TestStatePlantedAbove(t *testing.T) {
	commands := func(e *env) [][]string {
		return [][]string{append(e.startFlags("--name", "box"), "--", "true"), {"ps", "--all"}, {"inspect", forgedID}, {"inspect", "name"}, {"logs", forgedID},
			{"exec", "--timeout", "5", forgedID, "true"}, {"wait", "--timeout", "0.02", forgedID}, {"kill", "--grace", "0", forgedID},
			{"kill", "--grace", "0", "name"}, {"kill", "--all"}, {"cleanup", "--dry-run"}, {"cleanup"}}
	}
	for _, place := range []string{"", "lock", "names", "names/name", "names/box", forgedID, "." + forgedID} {
		t.Run("place "+place, func(t *testing.T) {
			for _, plant := range plants {
				if plant.name == "directory" && (place == "" || place == "names") || plant.name == "nothing" {
					continue
				}
				e := newEnv(t)
				p := newTrap(t)
				path := filepath.Join(e.state, place)
				if strings.HasPrefix(place, "names/") {
					check.Must(t, os.Mkdir(filepath.Dir(path), 0o700))
				}
				if place == "" {
					check.Must(t, os.Remove(path))
				}
				check.Must(t, plant.plant(path, p))
				for _, args := range commands(e) {
					s := e.do(args...)
					p.untouched(s)
					if s.ExitCode == 0 {
						continue
					}
					if args[0] != "cleanup" {
						e.refused(s, 125)
					} else if s.ExitCode != 125 || string(s.Stdout) == "" && string(s.Stderr) == "" {
						t.Errorf("want 125 and a reason: %v", s)
					}
				}
				e.gone(settle)
				reapZombies()
				check.Require(t, !t.Failed(), "that was %s: %s", place, plant.name)
			}
		})
	}
}

// garbage returns contents that no file of a sandbox should have.
func garbage() map[string]string {
	return map[string]string{
		"empty": "", "NUL": "\x00", "space": " \n\n", "object": "{}", "null": "null", "list": "[]", "text": "\"x\"", "number": "1e999",
		"binary": "\xff\xfe\x00\x01\x80{\"version\":1}", "deep": strings.Repeat("[", 100000), "deeper": strings.Repeat(`{"a":`, 100000),
		"long": strings.Repeat("x", 5<<20), "two": `{"version":1}{"version":1}`, "terminal": "\x1b]0;x\x07\x1b[2J\r\n", "members": `{"version":"1","id":[],"pid":{},"signal":9,"grace_ms":"x"}`,
	}
}

// badRecords returns well-formed records that lead to the wrong processes.
func badRecords(id harness.Identity) map[string]map[string]any {
	record := func(change func(r map[string]any)) map[string]any {
		r := map[string]any{"version": 1, "id": forgedID, "name": "forged", "argv": []string{"x"}, "created_at": "2026-11-20T00:00:00.000Z", "phase": "running",
			"supervisor": id, "init": id, "workdir": "/"}
		change(r)
		return r
	}
	pid := func(n any) map[string]any {
		return map[string]any{"pid": n, "start_time": id.Start, "boot_id": id.BootID, "pid_namespace": id.Namespace}
	}
	bad := map[string]map[string]any{
		"version":     record(func(r map[string]any) { r["version"] = 2 }),
		"other id":    record(func(r map[string]any) { r["id"] = "ffffffffffffffff" }),
		"path as id":  record(func(r map[string]any) { r["id"] = "../../../../etc" }),
		"report":      record(func(r map[string]any) { r["report"] = map[string]any{} }),
		"start below": record(func(r map[string]any) { r["init"] = map[string]any{"pid": id.PID, "start_time": -1} }),
	}
	for _, n := range []any{0, 1, -1, -id.PID, 4194305, 1 << 31, 1 << 32, 1<<32 + id.PID, 1e300, "12", nil, true} {
		bad[fmt.Sprint("pid of init ", n)] = record(func(r map[string]any) { r["init"] = pid(n) })
		bad[fmt.Sprint("pid of the supervisor ", n)] = record(func(r map[string]any) { r["supervisor"] = pid(n) })
	}
	return bad
}

// A damaged record never makes a command panic or signal a process. The test process is in the
// process group that 0 and -1 would reach.
func TestStateGarbageRecord(t *testing.T) {
	e := newEnv(t)
	stranger := newBystander(t)
	texts := garbage()
	for name, r := range badRecords(stranger.id) {
		texts[name] = string(harness.JSON(t, r))
	}
	all := everyCommand(forgedID)
	i := 0
	for what, text := range texts {
		i++
		for j, args := range all {
			// Commands that signal or enter, always; of the others a sample.
			if j < 4 && j != i%4 && soak(t) < 1000 && args[0] != "exec" {
				continue
			}
			release := e.forge(forgedID, "forged", "running", stranger.id, stranger.id, j%2 == 0)
			check.Must(t, os.WriteFile(filepath.Join(e.state, forgedID, "record.json"), []byte(text), 0o600))
			s := e.do(args...)
			release()
			check.Require(t, stranger.unharmed(), "%s: by %v", what, s)
			if s.ExitCode != 0 {
				e.refused(s, 125, 137)
			}
			check.That(t, !strings.ContainsAny(string(s.Stdout)+string(s.Stderr), "\x1b\x07\r"), "%s: a terminal would obey that: %v", what, s)
			check.Require(t, !t.Failed(), "that was %s", what)
		}
	}
	e.ok("cleanup")
	e.cleared()
}

// Damaged files of a running sandbox: commands work or fail with one line, and the supervisor ends it.
func TestStateGarbageFiles(t *testing.T) {
	for what, text := range garbage() {
		e := newEnv(t)
		b := e.start([]string{"--name", "box"}, stays...)
		for _, file := range []string{"activity", "kill.json", "access.json", "lock"} {
			check.Must(t, os.WriteFile(b.path(file), []byte(text), 0o600))
		}
		for _, args := range [][]string{{"ps"}, {"inspect", "box"}, {"logs", "box"}, {"exec", "--timeout", lifetime, "box", "/bin/true"}, {"cleanup"}} {
			want := 0
			if args[0] == "exec" {
				want = 125 // the PID namespace to enter is unknown
			}
			e.do(args...).Exits(t, want)
		}
		check.That(t, !harness.Exited(b.PID), "%s: the sandbox has ended", what)
		// As a user does who cannot reach the sandbox otherwise.
		b.strikeSupervisor(unix.SIGTERM)
		b.ended(3 * time.Second)
		want := 143
		if what == "null" || what == "object" {
			want = 137 // an empty request is valid
		}
		r := b.record()
		check.That(t, r.Report != nil && r.Report.ExitCode == want && r.Report.Teardown.Verdict == "proven", "%s: want %d and proven: %+v", what, want, r.Report)
		e.clean()
		check.Require(t, !t.Failed(), "that was %s", what)
	}
}

// A running sandbox keeps its deadline when its state directory is removed.
func TestStateRemoved(t *testing.T) {
	for _, what := range []string{"all", "its own"} {
		t.Run(what, func(t *testing.T) {
			e := newEnv(t)
			b := e.start([]string{"--timeout", "0.6", "--name", "box"}, floods...)
			dir := e.state
			if what != "all" {
				dir = b.path("")
			}
			harness.Until(e.t, settle, "the removal", func() bool { return os.RemoveAll(dir) == nil }) // the supervisor may write to it
			for _, args := range [][]string{{"inspect", "box"}, {"exec", b.ID, "true"}, {"kill", b.ID}, {"wait", b.ID}, {"logs", b.ID}} {
				e.refused(e.do(args...), 125)
			}
			for _, args := range [][]string{{"ps"}, {"cleanup"}, {"kill", "--all"}} {
				e.ok(args...)
			}
			b.ended(3 * time.Second)
			e.gone(settle)
			_ = os.Mkdir(e.state, 0o700) // for the commands below; it may exist
			e.clean()
		})
	}
}

// When a command that creates, imports, unpacks or exports a snapshot is killed at a random
// moment, the snapshot is complete or absent and the sandbox keeps running. After a cleanup no file,
// lock or frozen process is left. SBXRUN_SOAK=2000 kills each 200 times.
func TestSnapshotKilled(t *testing.T) {
	e := newEnv(t)
	dir := filepath.Join(e.out, "original")
	check.Must(t, os.Mkdir(dir, 0o755))
	flags := []string{"--name", "box", "--timeout", "20m", "--cwd", "none", "--overlay", dir + ":/data"}
	if s := e.do("run", "--pids", "50", "true"); s.ExitCode == 0 {
		flags = append(flags, "--pids", "50") // snapshot freezes it then
	}
	e.start(flags)
	e.ok("exec", "box", "sh", "-c", "head -c 3000000 /dev/urandom >/data/big; mkdir /data/d; for i in 1 2 3 4 5 6 7 8 9; do echo $i >/data/d/$i; done")
	sum := string(e.ok("exec", "box", "sh", "-c", "cat /data/big /data/d/* | sha256sum").Stdout)
	archive := filepath.Join(e.top, "archive")
	taken := e.ok("snapshot", "create", "box", "--name", "good").Elapsed
	e.ok("snapshot", "export", "good", archive)
	exports := filepath.Join(e.top, "exports")
	check.Must(t, os.Mkdir(exports, 0o755))
	whole, err := os.Stat(archive)
	check.Must(t, err)
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
		check.Must(t, err)
		at := time.Duration(mathrand.Int64N(int64(taken * 3 / 2)))
		for time.Since(c.Begin) < at && !c.Over() {
		}
		e.strikeWithin(c)
		s := e.wait(c)
		if there := e.listed(name); there {
			names = append(names, name)
		} else if s.ExitCode == 0 && args[0] == "snapshot" && args[1] != "export" {
			t.Errorf("it says that %s is there: %v", name, s)
		}
	}
	e.verify(names, dir, sum)
	files := harness.ReadDir(t, exports)
	for _, f := range files {
		info, err := f.Info()
		check.That(t, err == nil && info.Size() == whole.Size(), "%s is not all of it: %v, %v", f.Name(), info, err)
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
	check.That(t, !strings.Contains(string(s.Stdout), "layer") && !strings.Contains(string(s.Stdout), "draft") && !strings.Contains(string(s.Stdout), "tree"), "left: %v", s)
}

// strikeWithin kills a command or one of its descendants.
func (e *env) strikeWithin(c *harness.Process) {
	pids := []int{c.PID}
	for _, p := range harness.Below(c.PID) {
		pids = append(pids, p.PID)
	}
	pid := pids[mathrand.IntN(len(pids))]
	target, err := harness.Open(pid)
	if err != nil {
		return // it has just exited
	}
	defer target.Close()
	if pid == c.PID || slices.ContainsFunc(harness.Below(c.PID), func(p harness.Proc) bool { return p.PID == pid }) {
		_ = target.Signal(unix.SIGKILL) // fails only if it has just exited
	}
}

// listed reports whether a snapshot exists.
func (e *env) listed(name string) bool {
	e.t.Helper()
	for line := range strings.Lines(string(e.ok("snapshot", "ls").Stdout)) {
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
		check.Must(e.t, os.Remove(archive))
	}
	last := names[len(names)-1]
	e.start([]string{"--name", "restored", "--from", last, "--overlay", dir + ":/data"}) // it may have been imported
	check.Equal(e.t, string(e.ok("exec", "restored", "sh", "-c", "cat /data/big /data/d/* | sha256sum").Stdout), sum, "%s has", last)
}
