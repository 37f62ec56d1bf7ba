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

	"github.com/sbxrun/sbxrun/tests/harness"
)

// swaps exchanges, in each directory that it is given, a directory with a link that leads out, and a
// file with another one (renameat2(2), RENAME_EXCHANGE), for as long as it lives.
const swaps = `
import ctypes, os, sys
libc = ctypes.CDLL(None)
print("begun", flush=True)
while True:
    for top in sys.argv[1:]:
        for a, b in ("d", "evil"), ("f", "link"):
            libc.renameat2(-100, f"{top}/{a}".encode(), -100, f"{top}/{b}".encode(), 2)
`

// While two processes exchange directories and files with links that lead out, one in the sandbox
// and one on the host, in what is read and in what is written, all that moves files reads nothing
// outside and changes nothing there. It may fail.
func TestRaces(t *testing.T) {
	t.Parallel()
	s, top := harness.NewState(t), harness.SharedDir(t)
	outside := filepath.Join(top, "outside")
	for _, dir := range []string{outside, top + "/original/d", top + "/put/d"} {
		harness.Must(t, os.MkdirAll(dir, 0o755))
		text := "old"
		if dir == outside {
			text = "secret"
		}
		for i := range 20 {
			harness.Must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), []byte(text), 0o644))
		}
	}
	original, put := top+"/original", top+"/put"
	for _, dir := range []string{original, put} {
		harness.Must(t, os.Symlink(outside, dir+"/evil"))
		harness.Must(t, os.Symlink(outside+"/1", dir+"/link"))
		harness.Must(t, os.WriteFile(dir+"/f", []byte("old"), 0o644))
	}
	before := treeText(t, outside)

	b := s.Sandbox(harness.Options{Dir: original}, "--name", "box", "--cwd", "overlay", "--upper", top+"/upper", "--wait-ready", "--ready-log", "begun", "sh", "-ec", `
for i in 1 3 5 7; do echo mine >d/$i; done; rm d/2 d/4; rm -r f; echo mine >f
mkdir own own/d; for i in $(seq 20); do echo mine >own/d/$i; done; echo mine >own/f
ln -s "$1" own/evil; ln -s "$1/1" own/link
exec python3 -c "$2" own`, "sh", outside, swaps)
	b.Busy = true
	racer := exec.Command("python3", "-c", swaps, original, original+"/own", put)
	said, err := racer.StdoutPipe()
	harness.Must(t, err)
	stop, err := harness.StartCommand(racer)
	harness.Must(t, err)
	halt := func() {
		if racer.ProcessState == nil {
			_ = racer.Process.Kill() // it may have failed
			_ = racer.Wait()
			stop()
		}
	}
	t.Cleanup(halt)
	if _, err := said.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}

	done := map[string]int{}
	do := func(args ...string) {
		r := s.Start(harness.Options{Dir: top}, args...).Wait()
		if done[args[0]] += r.ExitCode; bytes.Contains(append(r.Stdout, r.Stderr...), []byte("secret")) {
			t.Errorf("%q: what is outside was read: %s%s", args, r.Stdout, r.Stderr)
		}
	}
	for n := range 2 {
		out := fmt.Sprintf("%s/out%d", top, n)
		harness.Must(t, os.Mkdir(out, 0o777))
		do("diff", "box", "-p")
		do("diff", "box", "--tar")
		do("apply", "box", "--force", "--delete")
		do("cp", "-r", "box:own", out+"/cp")
		do("cp", "box:own", "-")
		do("cp", "-r", put, fmt.Sprintf("box:/tmp/in%d", n))
		do("cp", "-r", put+"/.", "box:own")
		do("snapshot", "box", "--name", fmt.Sprint("s", n))
		do("run", "--cwd", "none", "--put", put+":/tmp", "--get", "/tmp/put:"+out, "true")
		do(append([]string{"run"}, layer(t, "--from", fmt.Sprint("s", n), "grep", "-rs", "secret", ".")...)...)
		if text := treeText(t, out); strings.Contains(text, "secret") {
			t.Errorf("what is outside was brought: %s", text)
		}
	}
	halt()
	do("exec", "box", "grep", "-rs", "secret", "/tmp", "own")
	do("kill", "--grace", "0", "box")
	do("cleanup")
	if after := treeText(t, outside); after != before {
		t.Errorf("what is outside was changed:\n%s\nfrom:\n%s", after, before)
	}
	for _, dir := range []string{original, put} {
		if left, err := filepath.Glob(dir + "/.sbxrun*"); err != nil || len(left) > 0 {
			t.Errorf("left: %v %v", left, err)
		}
	}
	t.Logf("sums of exit codes: %v", done)
}

// treeText is all that there is below a directory.
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
