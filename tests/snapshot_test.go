package tests

import (
	stdjson "encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
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
		r.Exits(t, code).ErrHas(t, `cannot sync the volume "one": input/output error`)
		check.Equal(t, r.Report.Value("error.code"), "volume", "%s", script)
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
	left := harness.ReadDir(t, v.dir+"/volumes")
	check.That(t, len(left) == 0, "left: %v", left)
	holds(t, v.dir+"/victim", "kept")
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
