package tests

import (
	stdjson "encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// snapshot takes a snapshot and returns its ID.
func snapshot(t *testing.T, s *harness.State, args ...string) string {
	t.Helper()
	r := s.Run(append([]string{"snapshot", "create"}, args...)...)
	check.Require(t, r.ExitCode == 0, "snapshot %q: %d, %s", args, r.ExitCode, r.Stderr)
	return strings.TrimSpace(string(r.Stdout))
}

func execOut(t *testing.T, b *harness.Sandbox, script string) string {
	t.Helper()
	r := b.Exec(harness.Options{}, nil, "sh", "-ec", script)
	check.That(t, r.ExitCode == 0, "%s: %d, %s", script, r.ExitCode, r.Stderr)
	return string(r.Stdout)
}

// A signal ends sbxrun while it unpacks a snapshot.
func TestSnapshotUnpackSignal(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{Dir: original(t)}, layer(t, "--name", "one", "--cwd", "overlay")...)
	snapshot(t, s, "one", "--name", "s")
	// An sbxrund that never ends, beside a copy of sbxrun.
	dir := harness.Dir(t)
	begun := filepath.Join(dir, "begun")
	harness.Must(t, os.WriteFile(filepath.Join(dir, "sbxrund"), []byte("#!/bin/sh\n>"+begun+"; exec sleep 300"), 0o755))
	there := harness.Options{Bare: true, Dir: s.Work, Attr: &syscall.SysProcAttr{Setpgid: true},
		Wrap: []string{"sh", "-c", `cp "$1" "$0"; shift; exec "$0/sbxrun" "$@"`, dir}}
	for sig, whole := range map[syscall.Signal]bool{unix.SIGTERM: false, unix.SIGINT: true} {
		p := harness.Start(t, there, layer(t, "--from", "s", "--data-dir", s.Dir+"-data", "true")...)
		harness.Until(t, harness.Bound, "an unpacking", func() bool { return os.Remove(begun) == nil })
		if whole { // the process group, as Ctrl-C does
			harness.Must(t, unix.Kill(-p.PID, sig))
		} else {
			p.Signal(sig)
		}
		r := p.Wait()
		check.That(t, r.Signal == sig && len(r.Stderr) == 0, "%v: exit code %d, %v: %s", sig, r.ExitCode, r.Signal, r.Stderr)
	}
}

// A sandbox starts with another sandbox's files, in one layer for each snapshot.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := original(t)
	one := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "one", "--cwd", "overlay")...)
	check.Equal(t, execOut(t, one, changes), changed)
	snapshot(t, s, "one", "--name", "first")
	two := s.Sandbox(harness.Options{}, layer(t, "--name", "two", "--from", "first")...)
	check.Equal(t, execOut(t, two, "cat file sub/other; ls; test ! -e sub/deep; readlink link"), changed+"file\n")
	execOut(t, two, "rm file; echo third >third; echo y >sub/other; rmdir made; touch made; chmod 700 .")
	snapshot(t, s, "two", "--name", "second", "--ttl", "1h")
	check.Equal(t, execOut(t, one, "cat file sub/other; ls"), changed, "the first has changed")
	for _, name := range []string{"first", "second"} {
		r := s.Run("snapshot", "export", name, filepath.Join(s.Work, name))
		check.Require(t, r.ExitCode == 0, "export: %s", r.Stderr)
		s.Run("snapshot", "rm", name).Exits(t, 0)
	}
	s.Run("start", "--from", "second").Exits(t, 125).ErrHas(t, `no snapshot named "second"`)
	r := s.Run("snapshot", "import", filepath.Join(s.Work, "second"))
	check.Require(t, r.ExitCode == 0, "import: %s", r.Stderr)
	// The archive does not decide which directories are visible. On another machine they are
	// elsewhere.
	s.Run("start", "--from", "second").Exits(t, 125).ErrHas(t, "--overlay "+dir+":"+dir)
	other := original(t)
	three := s.Sandbox(harness.Options{Dir: s.Work}, layer(t, "--name", "three", "--from", "second", "--overlay", other+":"+dir, "--workdir", dir)...)
	got, want := execOut(t, three, "cat third sub/other; ls; stat -c %a ."), "third\ny\nlink\nmade\nsub\nthird\n700\n"
	check.That(t, got == want, "%q, want %q", got, want)
	var list []struct {
		Name  string
		Trees []struct {
			Dest   string
			Layers []struct{ Entries int }
		}
		ExpiresAt string `json:"expires_at"`
	}
	r = s.Run("snapshot", "ls", "--json")
	if err := stdjson.Unmarshal(r.Stdout, &list); err != nil || len(list) != 1 || list[0].Name != "second" || len(list[0].Trees) != 1 || len(list[0].Trees[0].Layers) != 2 || list[0].ExpiresAt != "" {
		t.Errorf("%s, %v", r.Stdout, err)
	}
	wantOriginal(t, dir)
	wantOriginal(t, other)
}

// A sandbox with a cgroup is frozen during its snapshot, and then continues.
func TestSnapshotFrozen(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := original(t)
	limited := true
	b, r := s.TrySandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay", "--pids", "50")...)
	if b == nil {
		check.Require(t, strings.Contains(string(r.Stderr), "limit pids cannot be enforced here"), "%s", r.Stderr)
		limited, b = false, s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay")...)
	}
	execOut(t, b, "echo new >file")
	got := s.Run("snapshot", "create", "box", "--json")
	check.Require(t, got.ExitCode == 0, "%s", got.Stderr)
	var m struct{ Frozen bool }
	harness.Must(t, stdjson.Unmarshal(got.Stdout, &m))
	check.That(t, m.Frozen == limited && len(got.Stderr) == 0, "frozen %v, limits %v, %s", m.Frozen, limited, got.Stderr)
	if m.Frozen {
		thawed(t, s, b)
	}
	check.Equal(t, execOut(t, b, "cat file"), "new\n")
}

// The layer of a sandbox that has ended can be taken unless another sandbox uses it.
func TestSnapshotUpper(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := original(t)
	upper := filepath.Join(filepath.Dir(dir), "upper")
	for i, want := range []bool{true, false} {
		b := s.Sandbox(harness.Options{Dir: dir}, "--name", fmt.Sprint("box", i), "--cwd", "overlay", "--upper", upper)
		if i == 0 {
			execOut(t, b, "echo new >file")
			r := s.Run("kill", "--grace", "0", b.ID)
			check.Require(t, r.ExitCode == 0, "%s", r.Stderr)
			b.AwaitEnd()
		}
		r := s.Run("snapshot", "create", "box0", "--json")
		var m struct{ Frozen bool }
		err := stdjson.Unmarshal(r.Stdout, &m)
		check.That(t, err == nil && m.Frozen == want, "%d: %v, want %v; %v, %s", i, m.Frozen, want, err, r.Stderr)
	}
}

// thawed kills a snapshot and its guard while the sandbox is frozen. cleanup then thaws it, and
// not earlier.
func thawed(t *testing.T, s *harness.State, b *harness.Sandbox) {
	t.Helper()
	execOut(t, b, "head -c 30000000 /dev/zero >large") // so that it takes a while
	dirs := harness.Cgroups(b.ID)
	for range 20 {
		p := s.Start(harness.Options{}, "snapshot", "create", "box")
		harness.Until(t, harness.Bound, "a frozen sandbox", func() bool {
			select {
			case <-p.Exited():
				return true
			default:
				return limits.Frozen(dirs)
			}
		})
		p.Signal(unix.SIGSTOP)
		r := s.Run("cleanup")
		check.That(t, !strings.Contains(string(r.Stdout), "frozen"), "while a snapshot is taken: %s", r.Stdout)
		if !limits.Frozen(dirs) { // already thawed
			p.Signal(unix.SIGCONT)
			p.Wait()
			continue
		}
		for _, pid := range harness.Descendants(p.PID) {
			harness.Must(t, unix.Kill(pid, unix.SIGKILL)) // the guard
		}
		p.Kill()
		p.Wait()
		r = s.Run("cleanup")
		want := "thawed   frozen " + b.ID + " box: "
		check.That(t, r.ExitCode == 0 && strings.HasPrefix(string(r.Stdout), want) && !limits.Frozen(dirs), "%d, %q, %s, want %q", r.ExitCode, r.Stdout, r.Stderr, want)
		return
	}
	t.Error("no snapshot was met while the sandbox stood still")
}

// Invalid snapshots fail with one line and leave nothing.
func TestSnapshotRefused(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := original(t)
	s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay")...)
	s.Sandbox(harness.Options{}, "--name", "plain", "--cwd", "none")
	snapshot(t, s, "box", "--name", "taken")
	bad := filepath.Join(s.Work, "bad")
	harness.Must(t, os.WriteFile(bad, []byte("no snapshot"), 0o600))
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"snapshot"}, "no snapshot command given: want create, ls, rm, export or import"},
		{[]string{"snapshot", "box"}, "sbxrun snapshot create box"},
		{[]string{"snapshot", "create", "none"}, "none"},
		{[]string{"snapshot", "create", "box", "box"}, "unexpected argument box"},
		{[]string{"snapshot", "create", "plain"}, "has no overlay"},
		{[]string{"snapshot", "create", "box", "--name", "taken"}, "already"},
		{[]string{"snapshot", "create", "box", "--name", "a/b"}, "invalid snapshot name"},
		{[]string{"snapshot", "create", "box", "--max-size", "100"}, "exceed"},
		{[]string{"snapshot", "rm"}, "no snapshot given"},
		{[]string{"snapshot", "rm", "none"}, `no snapshot named "none"`},
		{[]string{"snapshot", "export", "none", "-"}, `no snapshot named "none"`},
		{[]string{"snapshot", "export", "taken", bad}, "already exists"},
		{[]string{"snapshot", "import", bad}, "invalid layer"},
		{[]string{"start", "--from", "none"}, `no snapshot named "none"`},
		{[]string{"run", "--from", "none", "true"}, `no snapshot named "none"`},
	} {
		r := s.Run(tt.args...)
		check.That(t, r.ExitCode == 125 && strings.Contains(string(r.Stderr), tt.want) && strings.Count(string(r.Stderr), "\n") == 1 && strings.HasPrefix(string(r.Stderr), "sbxrun: error: "),
			"%q: %d, %q, want %q", tt.args, r.ExitCode, r.Stderr, tt.want)
	}
	r := s.Run("snapshot", "ls", "-q")
	check.That(t, strings.Count(string(r.Stdout), "\n") == 1, "%s", r.Stdout)
	left, err := os.ReadDir(s.Dir + "-data/snapshots/tmp")
	check.That(t, err == nil && len(left) == 0, "left: %v, %v", left, err)
}

// run and start --cwd overlay take a snapshot's directory as the current one.
func TestSnapshotHere(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := original(t)
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay")...)
	execOut(t, b, changes)
	snapshot(t, s, "box", "--name", "s")
	two := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "two", "--from", "s", "--cwd", "overlay")...)
	check.Equal(t, execOut(t, two, "pwd; cat file sub/other; ls"), dir+"\n"+changed)
	// Elsewhere the current directory is one more.
	other := original(t)
	three := s.Sandbox(harness.Options{Dir: other}, layer(t, "--name", "three", "--from", "s", "--cwd", "overlay")...)
	check.Equal(t, execOut(t, three, "pwd; cat file; cat "+dir+"/file; echo x >file"), other+"\nold\nnew\n")
	harness.Run(t, harness.Options{Dir: s.Work}, layer(t, "--from", "s", "--data-dir", s.Dir+"-data", "sh", "-ec", "pwd; cat file sub/other; ls; echo y >file")...).Expect(t, 0, "exited").Out(t, dir+"\n"+changed)
	wantOriginal(t, dir)
	wantOriginal(t, other)
}

// A snapshot contains files that their modes close to their owner, and holes stay holes.
func TestSnapshotClosed(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{Dir: original(t)}, "--name", "box", "--cwd", "overlay", "--upper", filepath.Join(s.Work, "upper"))
	execOut(t, b, "echo closed >f; mkdir d; echo in >d/f; chmod 0 f d; truncate -s 100M sparse; echo end >>sparse")
	snapshot(t, s, "box", "--name", "s")
	two := s.Sandbox(harness.Options{}, "--name", "two", "--from", "s", "--upper", filepath.Join(s.Work, "second"))
	got, want := execOut(t, two, "stat -c %a f d; tail -c 4 sparse; [ $(du -k sparse | cut -f1) -lt 1000 ]; chmod 700 f d; cat f d/f"), "0\n0\nend\nclosed\nin\n"
	check.That(t, got == want, "%q, want %q", got, want)
	execOut(t, b, "chmod 700 d") // so that the test can remove it
}

// diff and apply include the snapshot's changes and later ones. Files that have changed on the host since the start of
// the snapshot's first sandbox are conflicts.
func TestSnapshotApplied(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.Dir(t)
	for name, text := range map[string]string{"one": "1\n", "two": "2\n", "gone": "x\n"} {
		harness.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	first := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--cwd", "overlay")...)
	execOut(t, first, "echo 11 >one; rm gone; mkdir sub; echo a >sub/a")
	snapshot(t, s, first.ID, "--name", "mine")
	second := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--from", "mine")...)
	execOut(t, second, "echo 22 >two; echo b >sub/b; rm sub/a")
	s.Run("diff", second.ID).Out(t, "D gone\nM one\nA sub/\nA sub/b\nM two\n")
	harness.Must(t, os.WriteFile(filepath.Join(dir, "one"), []byte("mine\n"), 0o644))
	third := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--from", "mine")...)
	for _, b := range []*harness.Sandbox{second, third} {
		s.Run("apply", "--delete", b.ID).Exits(t, 1).ErrHas(t, `"one" has changed on the host`)
	}
	s.Run("apply", "--delete", "--force", second.ID).Exits(t, 0)
	for name, want := range map[string]string{"one": "11\n", "two": "22\n", "sub/b": "b\n", "gone": "", "sub/a": ""} {
		b, _ := os.ReadFile(filepath.Join(dir, name))
		check.That(t, string(b) == want, "%s: %q", name, b)
	}
}
