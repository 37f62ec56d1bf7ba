package tests

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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

// While two processes exchange directories and files with links that lead out, in the sandbox and
// on the host, no command that moves files reads or changes anything outside. Commands may fail
// then, but not before.
func TestRaces(t *testing.T) {
	t.Parallel()
	s, top := harness.NewState(t), harness.SharedDir(t)
	outside, original, put, out := top+"/outside", top+"/original", top+"/put", top+"/out"
	for _, dir := range []string{outside, original + "/d", put + "/d", out + "/d"} {
		harness.Must(t, os.MkdirAll(dir, 0o755))
		text := "old"
		if dir == outside {
			text = "secret"
		}
		for i := range 20 {
			harness.Must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), []byte(text), 0o644))
		}
	}
	for _, dir := range []string{original, put, out} {
		harness.Must(t, os.Symlink(outside, dir+"/evil"))
		harness.Must(t, os.Symlink(outside+"/1", dir+"/link"))
		harness.Must(t, os.WriteFile(dir+"/f", []byte("old"), 0o644))
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
	harness.Must(t, err)
	stop, err := harness.StartCommand(racer)
	harness.Must(t, err)
	halt := func() {
		if racer.ProcessState == nil {
			_ = racer.Process.Kill() // fails only if it has exited
			_ = racer.Wait()
			stop()
		}
	}
	t.Cleanup(halt)
	_, err = said.Read(make([]byte, 6))
	check.Require(t, err == nil, "%v", err)
	do(0, "exec", "box", "sh", "-c", "echo >/tmp/go")
	do(0, "wait", "--log", "begun", "box")
	done = 0
	for n := range max(1, harness.Soak(t)/50) {
		round(n + 1)
	}
	t.Logf("of %d failed: %v", done, failed)
	total := 0
	for _, n := range failed {
		total += n
	}
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
	harness.Must(t, filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
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
