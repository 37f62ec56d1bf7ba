package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// When a command has planted programs in a directory of PATH, the next sbxrun executes none of
// them on the host.
func TestPlantedProgramsInPath(t *testing.T) {
	t.Parallel()
	project := harness.Dir(t)
	bin := filepath.Join(project, ".venv/bin")
	harness.Must(t, os.MkdirAll(bin, 0o755))
	marker := filepath.Join(project, "executed")
	plant := `for name in bwrap sbxrund newuidmap newgidmap setpriv unshare nsenter systemd-run loginctl mount umount fusermount3 getent sh env id git tar; do
	printf '#!/bin/sh\n: >"` + marker + `-$0"\nexit 1\n' | sed "s,\$0,$name," >.venv/bin/$name; chmod 755 .venv/bin/$name; done`
	harness.Run(t, harness.Options{Dir: project}, "-w", "sh", "-c", plant).Expect(t, 0, "exited")
	o := harness.Options{Dir: project, Env: []string{"PATH=" + bin + ":" + harness.Path}}
	harness.Run(t, o, "--cwd", "none", "/bin/true").Expect(t, 0, "exited")
	harness.Run(t, o, "-w", "/bin/true").Expect(t, 0, "exited")
	harness.NewState(t).Sandbox(o).Exec(o, nil, "/bin/true").Expect(t, 0, "exited")
	o.Bare = true
	for _, args := range [][]string{{"doctor"}, {"--print-command", "/bin/true"}} {
		r := harness.Start(t, o, args...).Wait()
		if r.ExitCode != 0 && !strings.Contains(string(r.Stderr), "a command without sbxrun takes bubblewrap 0.8") {
			t.Errorf("%q: exit code %d, stderr %s", args, r.ExitCode, r.Stderr)
		}
	}
	if found, _ := filepath.Glob(marker + "*"); len(found) > 0 {
		t.Errorf("executed: %q", found)
	}
}

// sbxrun refuses a named bwrap that a sandbox could replace.
func TestNamedBwrapExposed(t *testing.T) {
	t.Parallel()
	dir, marker := harness.Dir(t), filepath.Join(harness.SharedDir(t), "executed")
	bwrap := filepath.Join(dir, "bwrap")
	harness.Must(t, os.WriteFile(bwrap, []byte("#!/bin/sh\n: >"+marker+"\nexec /usr/bin/bwrap \"$@\"\n"), 0o755))
	for _, c := range []struct {
		dir  string
		args []string
		code int
	}{
		{"/usr", []string{"true"}, 0},
		{dir, []string{"true"}, 125},
		{dir, []string{"-w", "true"}, 125},
		{"/usr", []string{"--bind", dir, "true"}, 125},
		{"/usr", []string{"--bind", bwrap + ":/mnt/x", "true"}, 125},
		{"/usr", []string{"start", "--bind", dir + ":/mnt", "sleep", "60"}, 125},
	} {
		_ = os.Remove(marker)
		r := harness.Start(t, harness.Options{Dir: c.dir, Bare: true, Env: []string{"SBXRUN_BWRAP=" + bwrap}}, c.args...).Wait()
		_, err := os.Stat(marker)
		if executed := err == nil; r.ExitCode != c.code || c.code != 0 && (executed || !strings.Contains(string(r.Stderr), "cannot be trusted")) {
			t.Errorf("%q in %s: exit code %d, executed %v, stderr %s", c.args, c.dir, r.ExitCode, executed, r.Stderr)
		}
	}
}
