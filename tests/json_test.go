package tests

import (
	stdjson "encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Every failing command with --json prints one JSON value: an object with its exit code and an error with code and
// message, or a list with such an object for each name.
func TestJSONErrors(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), harness.SharedDir(t)
	file := filepath.Join(dir, "file")
	harness.Must(t, os.WriteFile(file, nil, 0o644))
	// Arguments of each command, for a sandbox or snapshot that does not exist.
	words := map[string][]string{
		"run": {"no-such-command"}, "start": {"no-such-command"}, "exec": {"nosuch", "true"}, "cp": {"nosuch:/x", dir}, "diff": {"nosuch"}, "apply": {"nosuch"},
		"ps": {"nosuch"}, "inspect": {"nosuch"}, "wait": {"nosuch"}, "logs": {"nosuch"}, "kill": {"nosuch"}, "cleanup": {"nosuch"},
		"image pull": {"127.0.0.1:1/nosuch"}, "image import": {filepath.Join(dir, "nosuch")}, "image inspect": {"nosuch"}, "image rm": {"nosuch"}, "image commit": {"nosuch", "x:1"},
		"nodes": {"--nats", "nats://127.0.0.1:1"}, "snapshot create": {"nosuch"}, "snapshot rm": {"nosuch"}, "snapshot import": {filepath.Join(dir, "nosuch")}, "volume rm": {"nosuch"},
	}
	check := func(class string, c *kong.Node, args ...string) {
		t.Helper()
		what := class + ": sbxrun " + strings.Join(args, " ")
		r := s.Start(harness.Options{Dir: "/usr", Stdin: strings.NewReader("")}, args...).Wait()
		var one struct {
			ExitCode *int `json:"exit_code"`
			Error    *struct{ Code, Message string }
		}
		err := stdjson.Unmarshal(r.Stdout, &one)
		if c.Name == "kill" || c.Name == "cleanup" {
			if strings.HasPrefix(string(r.Stdout), "[") {
				one.ExitCode, err = &r.ExitCode, nil // each element has its own error
			}
		}
		if r.ExitCode == 0 || err != nil {
			t.Errorf("%s: exit code %d, %v, stdout %q, stderr %q", what, r.ExitCode, err, r.Stdout, r.Stderr)
			return
		}
		check.That(t, strings.HasPrefix(string(r.Stdout), "[") || one.Error != nil && one.Error.Code != "" && one.Error.Message != "", "%s: no error in %s", what, r.Stdout)
		check.That(t, one.ExitCode == nil || *one.ExitCode == r.ExitCode, "%s: exit code %d, but %s", what, r.ExitCode, r.Stdout)
		n := len(harness.Lines(r.Stderr))
		check.That(t, n <= 2, "%s: %d lines on stderr: %s", what, n, r.Stderr)
	}
	tried := 0
	for _, c := range cli.Commands() {
		has := func(name string) bool {
			return slices.ContainsFunc(c.Flags, func(f *kong.Flag) bool { return f.Name == name })
		}
		if !has("json") {
			continue
		}
		path := strings.Fields(c.Path())
		with := func(flags ...string) []string { return slices.Concat(path, []string{"--json"}, flags, words[c.Path()]) }
		check("usage", c, with("--nosuch-flag")...)
		if words[c.Path()] != nil {
			check("not found", c, with()...)
			tried++
		}
		if has("state-dir") && len(path) == 1 { // the others read it only to name sandboxes
			check("state directory", c, with("--state-dir", file+"/x")...)
		}
	}
	if tried != len(words) {
		t.Errorf("%d commands were tried without what they need, want %d", tried, len(words))
	}
}
