package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// Commands that read a layer with many entries and long paths stay within a memory limit, or
// refuse the layer in one line when its paths are too long together. SBXRUN_SOAK=100 makes 30,000
// entries; 400 makes 100,000 and copies them too.
func TestManyEntries(t *testing.T) {
	n := min(100_000, max(2000, 300*soak(t)))
	const most = 640 << 10 // KiB of memory; all paths together have at most 64 MiB
	for _, tt := range []struct {
		name    string
		levels  int // number of directories, each with a name of 240 bytes
		refused bool
	}{
		{"long", 60 << 20 / (240 * 100_000), false}, // 2: 60 MB of paths with 100,000 files
		{"longer", 10, n > 26_000},                  // 250 MB with 100,000 files, which a snapshot still accepts
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t)
			dir := filepath.Join(e.top, "original")
			harness.Must(t, os.Mkdir(dir, 0o755))
			e.start([]string{"--name", "box", "--timeout", "30m", "--cwd", "none", "--overlay", dir + ":/data", "--upper", filepath.Join(e.top, "upper")})
			e.ok("exec", "box", "sh", "-ec", fmt.Sprintf(`cd /data; n=$(printf %%0240d 1); for i in $(seq %d); do mkdir $n; cd $n; done; n=$(printf %%0100d 1); seq %d | sed s/^/$n/ | xargs touch`, tt.levels, n))
			type verb struct {
				refused bool
				args    []string
			}
			verbs := []verb{
				{tt.refused, []string{"diff", "box", "--stat"}}, {tt.refused, []string{"diff", "box", "--json"}},
				{tt.refused, []string{"apply", "box"}},
				{false, []string{"snapshot", "create", "box", "--name", "s"}}, {false, e.startFlags("--from", "s", "--name", "again")},
			}
			copied, got := filepath.Join(e.top, "copied"), filepath.Join(e.top, "got")
			if soak(t) >= 400 { // as slow as the disk
				verbs = append(verbs, verb{false, []string{"cp", "-r", "box:/data", copied}}, verb{false, []string{"run", "--cwd", "none", "--from", "s", "--get", "/data:" + got, "true"}})
			}
			for _, verb := range verbs {
				c, err := e.begin(verb.args...)
				harness.Must(t, err)
				<-c.exited // no time limit: as slow as the disk
				s := e.wait(c)
				peak := c.cmd.ProcessState.SysUsage().(*syscall.Rusage)
				t.Logf("%s: %v, peak of %d MiB", verb.args[0], s.took.Round(time.Millisecond), peak.Maxrss>>10)
				if peak.Maxrss > most {
					t.Errorf("%s: it took %d KiB of memory", verb.args[0], peak.Maxrss)
				}
				if verb.refused && (s.code != 125 || !strings.Contains(s.stderr, "too long in total")) || !verb.refused && s.code != 0 {
					t.Errorf("%v", s)
				}
			}
			for _, dir := range []string{copied, filepath.Join(got, "data")} {
				files := -1 // the directory itself
				err := filepath.WalkDir(dir, func(string, os.DirEntry, error) error { files++; return nil })
				if soak(t) >= 400 && (err != nil || files != n+tt.levels) {
					t.Errorf("%s: %d entries, %v, want %d", dir, files, err, n+tt.levels)
				}
			}
			e.do("kill", "--all", "--grace", "0")
			e.ok("cleanup")
			e.cleared()
		})
	}
}
