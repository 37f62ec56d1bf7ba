package faults

import (
	"bytes"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The changes include every kind: replaced and new files, hard links, a directory in place of a
// file and the reverse, and removals.
const (
	applyFiles = 20
	applySize  = 60_000
)

// applyText returns the contents of a file before or after the change.
func applyText(name string, now bool) []byte {
	word := name + " old\n"
	if now {
		word = name + " new\n"
	}
	return bytes.Repeat([]byte(word), applySize/len(word))
}

// applyScript makes the changes in a sandbox.
var applyScript = fmt.Sprintf(`new() { yes "$1 new" | head -c %d | head -n $((%[1]d / (${#1} + 5))); }
for i in $(seq %d); do new f$i >f$i; new n$i >n$i; done
rm -r gone; rm swap1; mkdir swap1; echo new >swap1/in; rm -r swap2; new swap2 >swap2
new one >one; ln one two; ln -s one link; chmod 600 mode`, applySize, applyFiles)

// applyReset restores the original.
func applyReset(t *testing.T, dir string) {
	t.Helper()
	old, err := filepath.Glob(dir + "/[a-z]*")
	check.Must(t, err)
	for _, name := range old {
		check.Must(t, os.RemoveAll(name))
	}
	for i := range applyFiles {
		name := fmt.Sprintf("f%d", i+1)
		check.Must(t, os.WriteFile(filepath.Join(dir, name), applyText(name, false), 0o644))
	}
	for _, sub := range []string{"gone", "swap2"} {
		check.Must(t, os.MkdirAll(filepath.Join(dir, sub, "deep"), 0o755))
		for _, name := range []string{"a", "b", "deep/c"} {
			check.Must(t, os.WriteFile(filepath.Join(dir, sub, name), []byte(name), 0o644))
		}
	}
	check.Must(t, os.WriteFile(filepath.Join(dir, "swap1"), applyText("swap1", false), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(dir, "mode"), []byte("text"), 0o644))
}

// applyLook counts old and new paths. It fails the test if one is neither.
func applyLook(t *testing.T, dir string) (old, now int) {
	t.Helper()
	count := func(name string, isOld, isNew bool) {
		switch {
		case isOld == isNew:
			t.Errorf("%s is neither the old one nor the new one", name)
		case isOld:
			old++
		default:
			now++
		}
	}
	holds := func(name string, text []byte) bool {
		b, err := os.ReadFile(filepath.Join(dir, name))
		return err == nil && bytes.Equal(b, text)
	}
	there := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	}
	whole := func(sub string) bool {
		return holds(sub+"/a", []byte("a")) && holds(sub+"/b", []byte("b")) && holds(sub+"/deep/c", []byte("deep/c"))
	}
	for i := range applyFiles {
		name, added := fmt.Sprintf("f%d", i+1), fmt.Sprintf("n%d", i+1)
		count(name, holds(name, applyText(name, false)), holds(name, applyText(name, true)))
		count(added, !there(added), holds(added, applyText(added, true)))
	}
	count("gone", whole("gone"), !there("gone"))
	count("swap2", whole("swap2"), holds("swap2", applyText("swap2", true)))
	// A directory is created before its contents.
	in := holds("swap1/in", []byte("new\n"))
	info, err := os.Lstat(filepath.Join(dir, "swap1"))
	count("swap1", holds("swap1", applyText("swap1", false)), err == nil && info.IsDir())
	count("swap1/in", !there("swap1/in"), in)
	for _, name := range []string{"one", "two"} {
		count(name, !there(name), holds(name, applyText("one", true)))
	}
	link, _ := os.Readlink(filepath.Join(dir, "link"))
	count("link", !there("link"), link == "one")
	mode, err := os.Stat(filepath.Join(dir, "mode"))
	check.Must(t, err)
	count("mode", mode.Mode() == 0o644, mode.Mode() == 0o600)
	return old, now
}

// When apply is killed at a random moment, each file is the old one or the new one, and the next
// apply or cleanup removes temporary files. SBXRUN_SOAK=100 kills 200 times.
func TestApplyKilled(t *testing.T) {
	for _, kind := range []struct {
		name  string
		disk  bool
		force bool // one directory, reset and changed again before each try; otherwise one per try
		tries int
	}{{"memory", false, true, 85}, {"disk", true, true, 85}, {"unforced", true, false, 30}} {
		t.Run(kind.name, func(t *testing.T) {
			e := newEnv(t)
			tries := max(6, scaled(t, kind.tries))
			top := filepath.Join(e.top, "original")
			dirs := []string{"0"}
			for i := 1; !kind.force && i <= tries; i++ {
				dirs = append(dirs, fmt.Sprint(i))
			}
			for _, dir := range dirs {
				check.Must(t, os.MkdirAll(filepath.Join(top, dir), 0o755))
				applyReset(t, filepath.Join(top, dir))
			}
			start := []string{"--name", "box", "--timeout", "20m", "--cwd", "none", "--overlay", top + ":/data"}
			if kind.disk {
				start = append(start, "--upper", filepath.Join(e.top, "upper"))
			} else if s := e.do("run", "--cwd", "none", "--overlay", top+":/data", "true"); s.ExitCode != 0 && strings.Contains(string(s.Stderr), "from Linux 6.6 on") {
				t.Skip(string(s.Stderr))
			}
			e.start(start)
			e.ok("exec", "box", "sh", "-ec", "cd /data/0; "+applyScript+`
cd ..; for d in *; do [ $d = 0 ] || { rm -r $d/gone $d/swap1 $d/swap2; cp -dR --preserve=mode,links 0/. $d; }; done`)
			apply := func(dir string) []string {
				if kind.force {
					return []string{"apply", "box", "--force", "--delete", "--quiet"}
				}
				return []string{"apply", "box", "/data/" + dir, "--delete", "--quiet"}
			}
			// apply spends most time comparing, so half of the kills come after that.
			begin := func(name string) (c *harness.Process, staged time.Time) {
				c, err := e.begin(apply(name)...)
				check.Must(t, err)
				for !c.Over() {
					if staged, _ := filepath.Glob(top + "/.sbxrun-*"); len(staged) > 0 {
						break
					}
				}
				return c, time.Now()
			}
			c, staged := begin("0")
			s := e.wait(c)
			check.Require(t, s.ExitCode == 0, "%v", s)
			compared, applied := staged.Sub(c.Begin), max(s.Ended.Sub(staged), time.Millisecond) // staging may not have been seen
			old, _ := applyLook(t, filepath.Join(top, "0"))
			check.Require(t, old == 0, "%d paths were not applied", old)
			cut := 0
			for i := range tries {
				name := dirs[(i+1)%len(dirs)]
				dir := filepath.Join(top, name)
				if kind.force {
					applyReset(t, dir)
				}
				var c *harness.Process
				var err error
				at := time.Now().Add(mathrand.N(compared + applied*5/4))
				if i%4 < 2 {
					c, err = e.begin(apply(name)...)
					check.Must(t, err)
				} else {
					c, at = begin(name)
					at = at.Add(mathrand.N(applied * 5 / 4))
				}
				for time.Now().Before(at) && !c.Over() {
				}
				c.Signal(unix.SIGKILL)
				s := e.wait(c)
				old, now := applyLook(t, dir)
				check.That(t, s.ExitCode != 0 || old == 0, "try %d: it says that all is applied, and %d paths are old", i, old)
				if old > 0 && now > 0 {
					cut++
				}
				if i%2 == 0 && old > 0 { // the next apply removes temporary files as cleanup does
					e.ok(apply(name)...)
					old, _ := applyLook(t, dir)
					check.That(t, old == 0, "try %d: %d paths are old after another apply", i, old)
					applyClear(t, top)
				}
				e.ok("cleanup")
				applyClear(t, top)
				notes, _ := filepath.Glob(filepath.Join(e.state, "apply-*"))
				check.That(t, len(notes) == 0, "try %d: notes are left: %q", i, notes)
				if t.Failed() {
					break
				}
			}
			t.Logf("%d of %d times in the midst of it", cut, tries)
			e.do("kill", "--all", "--grace", "0")
			e.ok("cleanup")
			e.cleared()
		})
	}
}

// applyClear fails the test if a temporary file is left next to the originals.
func applyClear(t *testing.T, dir string) {
	t.Helper()
	left, err := filepath.Glob(dir + "/.*")
	check.Must(t, err)
	for _, name := range left {
		base := filepath.Base(name)
		check.That(t, base == "." || base == "..", "%s is left", name)
	}
}
