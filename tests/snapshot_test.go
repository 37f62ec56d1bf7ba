package tests

import (
	stdjson "encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

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
	r := b.Exec(harness.Options{}, nil, "sh", "-ec", script).Exits(t, 0)
	return string(r.Stdout)
}

// A signal ends sbxrun while it unpacks a snapshot or imports an image.
func TestSnapshotUnpackSignal(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{Dir: original(t)}, layer(t, "--name", "one", "--cwd", "overlay")...)
	snapshot(t, s, "one", "--name", "s")
	// An sbxrund that never ends, next to a copy of sbxrun.
	dir := harness.Dir(t)
	begun := filepath.Join(dir, "begun")
	check.Must(t, os.WriteFile(filepath.Join(dir, "sbxrund"), []byte("#!/bin/sh\n>"+begun+"; exec sleep 300"), 0o755))
	there := harness.Options{Bare: true, Dir: s.Work, Attr: &syscall.SysProcAttr{Setpgid: true},
		Wrap: []string{"sh", "-c", `cp "$1" "$0"; shift; exec "$0/sbxrun" "$@"`, dir}}
	for sig, flags := range map[syscall.Signal][]string{unix.SIGTERM: {"--cwd", "none", "--image", "oci:" + dir}, unix.SIGINT: layer(t, "--from", "s")} {
		p := harness.Start(t, there, append(flags, "--data-dir", s.Dir+"-data", "true")...)
		harness.Until(t, harness.Bound, "an unpacking", func() bool { return os.Remove(begun) == nil })
		if sig == unix.SIGINT { // the process group, as Ctrl-C does
			check.Must(t, unix.Kill(-p.PID, sig))
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
	// The archive does not decide which directories are visible. On another machine they are elsewhere.
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
	check.Must(t, stdjson.Unmarshal(got.Stdout, &m))
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

// thawed kills a snapshot and its guard while the sandbox is frozen. cleanup then thaws it, and not earlier.
func thawed(t *testing.T, s *harness.State, b *harness.Sandbox) {
	t.Helper()
	execOut(t, b, "head -c 30000000 /dev/zero >large") // so that it takes a while
	dirs := harness.Cgroups(b.ID)
	for deadline := time.Now().Add(harness.Bound / 2); time.Now().Before(deadline); {
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
			check.Must(t, unix.Kill(pid, unix.SIGKILL)) // the guard
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
	snapshot(t, s, "box", "--name", "taken", "--max-size", "0")
	bad := filepath.Join(s.Work, "bad")
	check.Must(t, os.WriteFile(bad, []byte("no snapshot"), 0o600))
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
		{[]string{"snapshot", "create", "box", "--max-size", "100"}, "raise --max-size"},
		{[]string{"snapshot", "rm"}, "no name given"},
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
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	first := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--cwd", "overlay")...)
	execOut(t, first, "echo 11 >one; rm gone; mkdir sub; echo a >sub/a")
	snapshot(t, s, first.ID, "--name", "mine")
	second := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--from", "mine")...)
	execOut(t, second, "echo 22 >two; echo b >sub/b; rm sub/a")
	s.Run("diff", second.ID).Out(t, "D gone\nM one\nA sub/\nA sub/b\nM two\n")
	check.Must(t, os.WriteFile(filepath.Join(dir, "one"), []byte("mine\n"), 0o644))
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

// volumeUser runs commands with volumes in a directory of the test.
type volumeUser struct {
	*testing.T
	s   *harness.State
	dir string
	o   harness.Options
}

func newVolumeUser(t *testing.T) *volumeUser {
	dir := harness.SharedDir(t)
	check.Must(t, os.Mkdir(dir+"/volumes", 0o700))
	return &volumeUser{t, harness.NewState(t), dir, harness.Options{Env: []string{"SBXRUN_DATA_DIR=" + dir}}}
}

// run runs a shell command with a volume.
func (v *volumeUser) run(volume, command string) *harness.Result {
	v.Helper()
	return harness.Run(v, v.o, "--cwd", "none", "--volume", volume, "sh", "-c", command)
}

// sbxrun runs a command of sbxrun, which must exit with code.
func (v *volumeUser) sbxrun(code int, message string, args ...string) []byte {
	v.Helper()
	r := v.s.Start(v.o, args...).Wait()
	check.That(v, r.ExitCode == code && strings.Contains(string(r.Stderr), message), "%q: exit code %d, want %d: %s, want %q", args, r.ExitCode, code, r.Stderr, message)
	return r.Stdout
}

// Files in a volume outlive the sandbox and have the right owner inside and outside. Only one sandbox at a time may write.
func TestVolume(t *testing.T) {
	t.Parallel()
	v := newVolumeUser(t)
	v.run("one:/data", "umask 022; echo kept > /data/file; mkdir /data/closed; chmod 0 /data/closed").Expect(t, 0, "exited")
	v.run("one:/data:ro", "cat /data/file; test -O /data/file && ! touch /data/new 2>/dev/null").Out(t, "kept\n").Exits(t, 0)
	// A volume whose root is closed to its owner can still be used and removed.
	v.run("shut:/data", "chmod 0 /data").Expect(t, 0, "exited")
	v.run("shut:/data", "chmod 700 /data && touch /data/x && chmod 0 /data").Expect(t, 0, "exited")
	v.sbxrun(0, "", "volume", "rm", "shut")
	b := v.s.Sandbox(v.o, "--name", "writer", "--cwd", "none", "--volume", "one:/data")
	r := v.run("one:/data:ro", "true")
	check.That(t, r.ExitCode == 76 && r.Report.Error.Code == "volume-busy" && strings.Contains(string(r.Stderr), "in use by "), "%d %s", r.ExitCode, r.Stderr)
	v.sbxrun(76, "in use by the sandbox writer", "volume", "rm", "one")
	v.sbxrun(76, "in use", "volume", "export", "one")
	var list []struct{ Name, Status string }
	decode(t, v.s.Start(v.o, "volume", "ls", "--json").Wait(), &list)
	check.That(t, len(list) == 1 && list[0].Name == "one" && list[0].Status == "written", "%v", list)
	v.s.Run("kill", "--grace", "0", "writer")
	b.AwaitEnd()
	// Several may read.
	v.s.Sandbox(v.o, "--name", "reader", "--cwd", "none", "--volume", "one:/data:ro")
	v.run("one:/data:ro", "test -f /data/file").Expect(t, 0, "exited")
	v.run("one:/data", "true").Exits(t, 76)
	v.s.Run("kill", "--grace", "0", "reader")
	v.run("one:/data", "chmod 700 /data/closed; ln -s /etc /data/link; mkfifo /data/fifo").Expect(t, 0, "exited")
	v.sbxrun(0, "left out", "volume", "export", "one", v.dir+"/one.tar")
	out, err := harness.Command(t, exec.Command("tar", "tf", v.dir+"/one.tar"), harness.Bound)
	check.That(t, err == nil && strings.Contains(out, "file\n") && strings.Contains(out, "link\n") && !strings.Contains(out, "fifo"), "%s %v", out, err)
	v.sbxrun(0, "", "volume", "rm", "one")
	v.sbxrun(125, "no volume named", "volume", "rm", "one")
	v.sbxrun(125, "invalid volume name", "volume", "rm", "../volumes")
	for _, wrong := range []string{"../x:/data", ".x:/data", "a", "a:relative", "a:/data:rw", "a:/proc/x"} {
		v.run(wrong, "true").Exits(t, 125)
	}
	names, err := os.ReadDir(v.dir + "/volumes")
	check.That(t, err == nil && len(names) == 0, "left: %v %v", names, err)
}

// unsynced is a program that starts another, whose system call with the given number fails with
// EIO, also for all descendants (seccomp(2)).
const unsynced = `
import ctypes, os, struct, sys
code = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, int(sys.argv[1]), 6, 0, 0, 0x50005, 6, 0, 0, 0x7fff0000)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(text := ctypes.create_string_buffer(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[2], sys.argv[2:])`

// A volume that could not be synced to disk is an error.
func TestVolumeUnsynced(t *testing.T) {
	t.Parallel()
	v := newVolumeUser(t)
	v.o.Wrap = []string{"python3", "-c", unsynced, strconv.Itoa(unix.SYS_SYNCFS)}
	for script, code := range map[string]int{"true": 74, "exit 3": 3} {
		r := v.run("one:/data", script)
		if e := r.Report.Error; r.ExitCode != code || e == nil || e.Code != "volume" || !strings.Contains(string(r.Stderr), `cannot sync the volume "one": input/output error`) {
			t.Errorf("%s: %d, %+v, %s", script, r.ExitCode, e, r.Stderr)
		}
	}
	v.run("one:/data:ro", "true").Expect(t, 0, "exited")
	rec := v.s.Sandbox(v.o, "--cwd", "none", "--volume", "one:/data", "true").Ended()
	r := rec.Report
	check.That(t, r != nil && r.ExitCode == 74 && r.Error != nil && r.Error.Code == "volume", "%+v", r)
}

// volume rm removes whatever a command has left in a volume, and nothing outside.
func TestVolumeHostile(t *testing.T) {
	t.Parallel()
	v := newVolumeUser(t)
	check.Must(t, os.WriteFile(v.dir+"/victim", []byte("kept"), 0o644))
	v.run("bad:/tmp", hostileTree+` && cd /tmp && ln -s `+v.dir+` out && python3 -c '
import os
for i in range(600): os.mkdir("d"); os.chdir("d")
os.chdir("/tmp"); os.makedirs("many")
for i in range(1000): open("many/%d" % i, "w")
os.makedirs("c/c"); open("c/c/f", "w"); os.chmod("c/c", 0); os.chmod("c", 0)
'`).Expect(t, 0, "exited")
	// Terabytes of holes don't fill the disk with zeros.
	v.run("bad:/tmp", "truncate -s 4T /tmp/holes").Expect(t, 0, "exited")
	v.sbxrun(125, "consists mostly of holes", "volume", "export", "bad", v.dir+"/out.tar")
	names, _ := filepath.Glob(v.dir + "/*.tar")
	check.That(t, len(names) == 0, "left: %q", names)
	v.sbxrun(0, "", "volume", "rm", "bad")
	if names, err := os.ReadDir(v.dir + "/volumes"); err != nil || len(names) != 0 {
		t.Errorf("left: %v %v", names, err)
	}
	b, err := os.ReadFile(v.dir + "/victim")
	check.That(t, string(b) == "kept", "%q %v", b, err)
}

// When sbxrun is killed at a random moment, no other sandbox gets the volume, which may be new, as long as any process
// can write to it; afterwards it is free at once. The same for rm. SBXRUN_SOAK=500 makes 200 tries each.
func TestVolumeKilled(t *testing.T) {
	// Not in parallel, so that an orphan is not blamed on another test.
	v := newVolumeUser(t)
	for i := range max(3, 2*harness.Soak(t)/5) {
		name := fmt.Sprint("v", i/2)
		p := harness.Start(t, v.o, "--cwd", "none", "--volume", name+":/data", "sh", "-c", "echo begun; while echo x >> /data/log; do :; done")
		if rand.IntN(2) == 0 {
			p.WaitOutput("begun\n")
		}
		time.Sleep(rand.N(10 * time.Millisecond)) // vary the moment
		p.Kill()
		for deadline := time.Now().Add(harness.Bound); ; {
			r := v.run(name+":/data:ro", "cd /data; wc -c < log; sleep 0.02; wc -c < log")
			if r.ExitCode == 76 && time.Now().Before(deadline) {
				continue
			}
			if sizes := strings.Fields(string(r.Stdout)); len(sizes) == 2 && sizes[0] != sizes[1] {
				t.Errorf("somebody writes: %s", r.Stdout)
			} else if r.ExitCode != 0 && len(sizes) != 0 {
				t.Errorf("%d %s", r.ExitCode, r.Stderr)
			}
			break
		}
		p.Wait()
	}
	// A killed rm leaves the volume whole or removed, and cleanup removes the rest.
	for i := range max(3, 2*harness.Soak(t)/5) {
		v.run("r:/data", "cd /data; for i in 1 2 3 4 5 6 7 8 9; do mkdir -p $i/a/b/c; echo whole > $i/f; done; echo whole > f").Expect(t, 0, "exited")
		rm := v.s.Start(v.o, "volume", "rm", "r")
		time.Sleep(rand.N(6 * time.Millisecond)) // as above
		rm.Kill()
		rm.Wait()
		r := v.run("r:/data:ro", "ls /data | wc -l")
		check.Require(t, strings.TrimSpace(string(r.Stdout)) == "10" || strings.TrimSpace(string(r.Stdout)) == "0", "%d: a part is left: %s %s", i, r.Stdout, r.Stderr)
	}
	v.sbxrun(0, "", "cleanup")
	names := harness.ReadDir(t, v.dir+"/volumes")
	rm := []string{"volume", "rm"}
	for _, name := range names { // nothing half-made or half-removed, and no lock
		rm = append(rm, name.Name())
	}
	v.sbxrun(0, "", rm...)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	check.That(t, err == nil && !strings.Contains(string(mounts), v.dir), "a mount is left: %s %v", mounts, err)
}
