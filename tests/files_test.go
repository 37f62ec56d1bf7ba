package tests

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// carrier returns a directory for --put and --get.
func carrier(t *testing.T) (dir string, o harness.Options) {
	dir = harness.SharedDir(t)
	return dir, harness.Options{Dir: dir}
}

func holds(t *testing.T, name, want string) {
	t.Helper()
	b, err := os.ReadFile(name)
	check.That(t, string(b) == want && err == nil, "%s: %q, %v; want %q", name, b, err, want)
}

// A signal ends what sbxrun does after the command's end, which takes as long as the command has
// left files: complete results stay, and the rest is reported as missing.
func TestSignalAfterEnd(t *testing.T) {
	t.Parallel()
	many := 20_000
	signalled := func(flags []string) bool {
		dir, o := carrier(t)
		p := harness.Start(t, o, append(flags, "--tmp-size", "4G", "sh", "-c", fmt.Sprintf("mkdir d && cd d && seq %d | xargs touch", many))...)
		made := func() int {
			names, err := os.ReadDir(dir + "/d")
			check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
			return len(names)
		}
		harness.Until(t, harness.Bound, "the first file is there", func() bool { return made() > 0 })
		p.Signal(syscall.SIGINT)
		r := p.Wait()
		n := made()
		if n == many && many < 200_000 { // the signal came too late
			return false
		}
		check.That(t, r.ExitCode == 74 && n != 0 && n < many && strings.Contains(string(r.Stderr), "interrupted by SIGINT"), "%q: exit code %d, %d files, %s", flags, r.ExitCode, n, r.Stderr)
		check.That(t, r.Report.Cause == "exited" && r.Report.Error != nil, "%q: %s", flags, r.Report.Raw())
		left, _ := filepath.Glob(dir + "/.sbxrun-*")
		check.That(t, len(left) == 0, "%q: left: %q", flags, left)
		return true
	}
	for _, flags := range [][]string{{"--cwd", "none", "--get-max-entries", "0", "--get", "d"}, layer(t, "--cwd", "overlay", "--apply")} {
		for !signalled(flags) {
			many *= 2
		}
	}
}

// --get writes nothing outside and reads nothing from there, whatever a command leaves.
func TestGetHostile(t *testing.T) {
	t.Parallel()
	dir, o := carrier(t)
	check.Must(t, os.WriteFile(dir+"/victim", []byte("kept"), 0o644))
	r := harness.Run(t, o, "--cwd", "none", "--get", "/tmp/t:out", "--get", "/tmp/t/abs/hostname:way", "--get", "/tmp/t/*/passwd:way", "--get", "/tmp/t/root/etc/passwd:way", "sh", "-c", hostileTree)
	check.That(t, r.ExitCode == 74 && r.Report.Error.Code == "get" && strings.Contains(string(r.Stderr), "cannot be read"), "%d %s", r.ExitCode, r.Stderr)
	holds(t, dir+"/out/t/one", "x\n")
	holds(t, dir+"/out/t/new\nline", "n")
	holds(t, dir+"/victim", "kept")
	names, err := os.ReadDir(dir + "/way")
	check.That(t, err == nil && len(names) == 0, "by a link: %v %v", names, err)
	// It does not follow a link that an earlier command has left, also to another mount.
	check.Must(t, os.Mkdir(dir+"/links", 0o755))
	check.Must(t, os.Symlink("/etc", dir+"/links/etc"))
	check.Must(t, os.Symlink("/tmp", dir+"/links/tmp"))
	harness.Run(t, harness.Options{Dir: dir + "/links"}, "--get", "etc/passw*:"+dir+"/way", "--get", "tmp/*:"+dir+"/way", "sh", "-c", "echo x >/tmp/f")
	names, err = os.ReadDir(dir + "/way")
	check.That(t, err == nil && len(names) == 0, "by an earlier link: %v %v", names, err)
	// The command has put links into the target directory.
	check.Must(t, os.Mkdir(dir+"/work", 0o777))
	check.Must(t, os.Chmod(dir+"/work", 0o777))
	harness.Run(t, harness.Options{Dir: dir + "/work"}, "-w", "--get", "/tmp/*", "sh", "-c", "echo x > /tmp/f; mkdir /tmp/d; echo y > /tmp/d/g; ln -s "+dir+"/victim f; ln -s "+dir+" d").Exits(t, 74)
	holds(t, dir+"/victim", "kept")
	for _, name := range []string{"f", "g"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		check.That(t, err != nil, "%s was written outside", name)
	}
}

// A run that is ended while its files are copied is reported as canceled, not as a failed start.
func TestPutCanceled(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	for i := range 2000 {
		check.Must(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600))
	}
	p := harness.Start(t, harness.Options{}, "--cwd", "none", "--put", dir, "sleep", "1000")
	p.Role(harness.RoleInit) // held until all files are copied
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
}

// swaps exchanges a directory with a link that leads out, and a file with another, in each of its
// arguments for as long as it lives (renameat2(2), RENAME_EXCHANGE).
const swaps = `
import ctypes, os, sys
libc = ctypes.CDLL(None)
print("begun", flush=True)
while True:
    for top in sys.argv[1:]:
        for a, b in ("d", "evil"), ("f", "link"):
            libc.renameat2(-100, f"{top}/{a}".encode(), -100, f"{top}/{b}".encode(), 2)
`

// While two processes exchange directories and files with links that lead out, in the sandbox and on the host, no
// command that moves files reads or changes anything outside. Commands may fail then, but not before.
func TestRaces(t *testing.T) {
	t.Parallel()
	s, top := harness.NewState(t), harness.SharedDir(t)
	outside, original, put, out := top+"/outside", top+"/original", top+"/put", top+"/out"
	for _, dir := range []string{outside, original + "/d", put + "/d", out + "/d"} {
		check.Must(t, os.MkdirAll(dir, 0o755))
		text := "old"
		if dir == outside {
			text = "secret"
		}
		for i := range 20 {
			check.Must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), []byte(text), 0o644))
		}
	}
	for _, dir := range []string{original, put, out} {
		check.Must(t, os.Symlink(outside, dir+"/evil"))
		check.Must(t, os.Symlink(outside+"/1", dir+"/link"))
		check.Must(t, os.WriteFile(dir+"/f", []byte("old"), 0o644))
	}
	before := treeText(t, outside)

	b := s.Sandbox(harness.Options{Dir: original}, "--name", "box", "--cwd", "overlay", "--upper", top+"/upper", "--wait-ready", "--ready-log", "made", "sh", "-ec", `
for i in 1 3 5 7; do echo mine >d/$i; done; rm d/2 d/4; rm -r f; echo mine >f
mkdir own own/d; for i in $(seq 20); do echo mine >own/d/$i; done; echo mine >own/f
ln -s "$1" own/evil; ln -s "$1/1" own/link
mkfifo /tmp/go; echo made; read x </tmp/go
exec python3 -c "$2" own`, "sh", outside, swaps)
	b.Busy = true

	done, failed := 0, map[string]int{}
	do := func(code int, args ...string) {
		r := s.Start(harness.Options{Dir: top}, args...).Wait()
		if done++; r.ExitCode != code {
			failed[args[0]]++
		}
		check.That(t, !bytes.Contains(append(r.Stdout, r.Stderr...), []byte("secret")), "%q: what is outside was read: %s%s", args, r.Stdout, r.Stderr)
	}
	round := func(n int, apply ...string) {
		do(0, "diff", "box", "-p")
		do(0, "diff", "box", "--tar")
		do(0, append([]string{"apply", "box", "--force", "--delete"}, apply...)...)
		do(0, "cp", "-r", "box:own", fmt.Sprintf("%s/cp%d", out, n))
		do(0, "cp", "-r", "box:own/.", out)
		do(0, "cp", "box:own", "-")
		do(0, "cp", "-r", put, fmt.Sprintf("box:/tmp/in%d", n))
		do(0, "cp", "-r", put+"/.", "box:own")
		do(0, "snapshot", "create", "box", "--name", fmt.Sprint("s", n))
		do(0, "run", "--cwd", "none", "--put", put+":/tmp", "--get", "/tmp/put/*:"+out, "true")
		do(1, append([]string{"run"}, layer(t, "--from", fmt.Sprint("s", n), "grep", "-rs", "secret", ".")...)...) // 1: no match
	}
	round(0, "d/1", "d/2")
	check.That(t, len(failed) == 0, "with nobody in its way: %v", failed)

	racer := exec.Command("python3", "-c", swaps, original, original+"/own", put, out)
	said, err := racer.StdoutPipe()
	check.Must(t, err)
	stop, err := harness.StartCommand(racer)
	check.Must(t, err)
	halt := func() {
		if racer.ProcessState == nil {
			_ = racer.Process.Kill() // fails only if it has exited
			_ = racer.Wait()
			stop()
		}
	}
	t.Cleanup(halt)
	_, err = said.Read(make([]byte, 6))
	check.Must(t, err)
	do(0, "exec", "box", "sh", "-c", "echo >/tmp/go")
	do(0, "wait", "--log", "begun", "box")
	done = 0
	total := 0
	for n := 0; n < max(1, harness.Soak(t)/50) || total > done*3/4 && n < 20; n++ {
		round(n + 1)
		total = 0
		for _, n := range failed {
			total += n
		}
	}
	t.Logf("of %d failed: %v", done, failed)
	check.That(t, total <= done*3/4, "nearly everything fails, and so nothing is shown")
	halt()
	do(1, "exec", "box", "grep", "-rs", "secret", "/tmp", "own")
	do(0, "kill", "--grace", "0", "box")
	do(0, "cleanup")
	text := treeText(t, out)
	check.That(t, !strings.Contains(text, "secret"), "what is outside was brought: %s", text)
	check.Equal(t, treeText(t, outside), before, "what is outside was changed:\n")
	for _, dir := range []string{original, put, out} {
		left, err := filepath.Glob(dir + "/.sbxrun*")
		check.That(t, err == nil && len(left) == 0, "left: %v %v", left, err)
	}
}

// treeText describes everything below a directory.
func treeText(t *testing.T, dir string) string {
	var all strings.Builder
	check.Must(t, filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		var text []byte
		if e.Type().IsRegular() {
			if text, err = os.ReadFile(name); err != nil {
				return err
			}
		}
		fmt.Fprintf(&all, "%s %v %s\n", name, st.Mode(), text)
		return nil
	}))
	return all.String()
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	return string(harness.ReadFile(t, name))
}
