package tests

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// volumeUser runs commands with volumes in a directory of the test.
type volumeUser struct {
	*testing.T
	s   *harness.State
	dir string
	o   harness.Options
}

func newVolumeUser(t *testing.T) *volumeUser {
	dir := harness.SharedDir(t)
	harness.Must(t, os.Mkdir(dir+"/volumes", 0o700))
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
	out, err := exec.Command("tar", "tf", v.dir+"/one.tar").CombinedOutput()
	check.That(t, err == nil && bytes.Contains(out, []byte("file\n")) && bytes.Contains(out, []byte("link\n")) && !bytes.Contains(out, []byte("fifo")), "%s %v", out, err)
	v.sbxrun(0, "", "volume", "rm", "one")
	v.sbxrun(125, "no volume named", "volume", "rm", "one")
	v.sbxrun(125, "invalid volume name", "volume", "rm", "../volumes")
	for _, wrong := range []string{"../x:/data", ".x:/data", "a", "a:relative", "a:/data:rw", "a:/proc/x"} {
		v.run(wrong, "true").Exits(t, 125)
	}
	names, err := os.ReadDir(v.dir + "/volumes")
	check.That(t, err == nil && len(names) == 0, "left: %v %v", names, err)
}

// volume ls reads the records of sandboxes once, if a volume is in use.
func TestVolumeList(t *testing.T) {
	t.Parallel()
	v := newVolumeUser(t)
	b := v.s.Sandbox(v.o, "--name", "writer", "--cwd", "none", "--volume", "one:/one", "--volume", "two:/two")
	damaged := filepath.Join(v.s.Dir, "0123456789abcdef")
	harness.Must(t, os.Mkdir(damaged, 0o700))
	harness.Must(t, os.WriteFile(filepath.Join(damaged, "record.json"), []byte("{"), 0o600))
	r := v.s.Start(v.o, "volume", "ls").Wait()
	warned, named := strings.Count(string(r.Stderr), "warning"), strings.Count(string(r.Stdout), "written by the sandbox writer")
	check.That(t, warned == 1 && named == 2, "in use: %s%s", r.Stdout, r.Stderr)
	v.s.Run("kill", "--grace", "0", "writer")
	b.AwaitEnd()
	r = v.s.Start(v.o, "volume", "ls").Wait()
	check.That(t, len(r.Stderr) == 0 && strings.Count(string(r.Stdout), "free") == 2, "free: %s%s", r.Stdout, r.Stderr)
	harness.Must(t, os.RemoveAll(damaged))
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
	harness.Must(t, os.WriteFile(v.dir+"/victim", []byte("kept"), 0o644))
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

// When sbxrun is killed at a random moment, no other sandbox gets the volume, which may be new, as
// long as any process can write to it; afterwards it is free at once. The same for rm.
// SBXRUN_SOAK=500 makes 200 tries each.
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
	names, err := os.ReadDir(v.dir + "/volumes")
	harness.Must(t, err)
	rm := []string{"volume", "rm"}
	for _, name := range names { // nothing half-made or half-removed, and no lock
		rm = append(rm, name.Name())
	}
	v.sbxrun(0, "", rm...)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	check.That(t, err == nil && !strings.Contains(string(mounts), v.dir), "a mount is left: %s %v", mounts, err)
}
