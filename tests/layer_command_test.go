package tests

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A command, its interpreter and the working directory can be in a snapshot, or in a layer on disk.
func TestCommandInLayer(t *testing.T) {
	t.Parallel()
	const script = `mkdir bin; ln -s /bin/sh bin/shell; printf '#!%s/bin/shell\necho ran\n' "$PWD" >bin/prog; chmod +x bin/prog; ln -s prog bin/link; echo >bin/plain`
	dir, s := original(t), harness.NewState(t)
	execOut(t, s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay")...), script)
	snapshot(t, s, "box", "--name", "s")
	upper := []string{"--cwd", "overlay", "--upper", filepath.Join(harness.Dir(t), "upper")}
	run := func(args ...string) *harness.Result {
		return s.Start(harness.Options{Dir: dir}, append([]string{"run"}, args...)...).Wait()
	}
	if r := run(append(upper, "sh", "-c", script)...); r.ExitCode != 0 {
		t.Fatalf("%s", r.Stderr)
	}
	bin := filepath.Join(dir, "bin")
	for name, flags := range map[string][]string{"from": layer(t, "--from", "s"), "upper": upper} {
		for _, tt := range []struct {
			args   []string
			code   int
			output string
		}{
			{[]string{"bin/prog"}, 0, "ran\n"},
			{[]string{bin + "/link"}, 0, "ran\n"},
			{[]string{"--env", "PATH=" + bin + ":/usr/bin:/bin", "prog"}, 0, "ran\n"},
			{[]string{"--workdir", bin, "./prog"}, 0, "ran\n"},
			{[]string{"bin/nosuch"}, 127, `command "bin/nosuch" not found in the sandbox`},
			{[]string{"bin/plain"}, 126, `command "bin/plain" cannot be executed: permission denied`},
			{[]string{"--workdir", bin + "/nosuch", "true"}, 125, "bin/nosuch\" of the sandbox: no such file or directory"},
		} {
			r := run(append(flags, tt.args...)...)
			got := string(r.Stdout) + string(r.Stderr)
			check.That(t, r.ExitCode == tt.code && strings.Contains(got, tt.output), "%s, %q: exit code %d, want %d; %s", name, tt.args, r.ExitCode, tt.code, got)
		}
	}
}
