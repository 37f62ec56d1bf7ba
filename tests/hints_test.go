package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// If a missing command looks like an argument of timeout(1) or docker, a hint names sbxrun's
// equivalent; otherwise there is no hint.
func TestTimeoutHint(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	for _, name := range []string{"1", "stop", "job.py"} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\necho ran\n"), 0o755))
	}
	for _, c := range []struct {
		args []string
		code int
		want string // end of stderr
	}{
		{[]string{"-k", "1", "-s", "INT", "5", "sleep", "1"}, 127, "; use --timeout 5 for a deadline\n"},
		{[]string{"--cwd", "none", "--rootfs", harness.SharedDir(t), "true"}, 127, "not found in the sandbox's PATH /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"},
		{[]string{"-v", "cache:/cache", "true"}, 127, `command "cache:/cache": no such file; use --volume NAME:DST to mount a volume, or --bind SRC:DST for a directory` + "\n"},
		{[]string{"--env", "PATH=" + dir, "stop", "x"}, 0, ""},
		{[]string{"-t", "nosuch"}, 127, "PATH /usr/bin:/bin\n"},
		{[]string{"--env", "PATH=" + dir, "1", "x"}, 0, ""},
		{[]string{"./1"}, 0, ""},
		{[]string{"sh", "-c", "exit 127"}, 127, ""},
	} {
		r := harness.Start(t, harness.Options{Bare: true, Dir: dir, Env: []string{"PATH=/usr/bin:/bin"}}, c.args...).Wait()
		check.That(t, r.ExitCode == c.code && strings.HasSuffix(string(r.Stderr), c.want) && (c.want != "" || len(r.Stderr) == 0),
			"%q: exit code %d, stderr %q", c.args, r.ExitCode, r.Stderr)
	}
}

// docker's rm and ls get a hint only if a sandbox must be meant; otherwise they run as programs.
func TestDockerWords(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.Dir(t)
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	run := func(args ...string) (*harness.Result, string) {
		t.Helper()
		return harness.Said(t, func(o harness.Options) *harness.Process {
			o.Dir = dir
			return s.Start(o, args...)
		})
	}
	const lsHint = "sbxrun: hint: ls lists files; use sbxrun ps to list sandboxes"
	r, text := run("ls")
	check.That(t, r.ExitCode == 0 && text == "", "ls without sandboxes: exit code %d, %q", r.ExitCode, text)
	b := s.Sandbox(harness.Options{}, "--name", "web")
	s.Sandbox(harness.Options{}, "--name", "file")
	refused := func(word string) string {
		return "sbxrun: error: rm removes files, but \"" + word + "\" is a sandbox; use sbxrun kill " + word + " to end it, sbxrun cleanup " + word + " to remove its record, or sbxrun -- rm " + word + " for a file of that name"
	}
	for _, c := range []struct {
		line string
		code int
		want string // beginning of stderr; "" for nothing
	}{
		{"rm web", 125, refused("web")},
		{"rm -f web", 125, refused("web")},
		{"rm -f " + b.ID, 125, refused(b.ID)},
		{"rm web nosuch", 1, "rm: cannot remove 'web'"},
		{"rm " + b.ID[:6], 1, "rm: cannot remove"}, // could be a file's name
		{"rm file", 1, "rm: cannot remove 'file': Read-only file system"},
		{"rm -f nosuch", 0, ""},
		{"-- rm -f web", 0, ""},
		{"run rm -f web", 0, ""},
		{"ls", 0, lsHint},
		{"ls -a", 0, ""},
		{"-- ls", 0, ""},
	} {
		r, text := run(strings.Fields(c.line)...)
		check.That(t, r.ExitCode == c.code && strings.HasPrefix(text, c.want) && (c.want != "" || text == "") && (!strings.Contains(c.line, "ls") || c.line == "ls" || !strings.Contains(text, lsHint)),
			"%s: exit code %d, %q, want %q", c.line, r.ExitCode, text, c.want)
	}
	s.Start(harness.Options{Bare: true, Dir: dir}, "ls").Wait().Exits(t, 0).Out(t, "file\n").Err(t, "")
	s.Run("kill", "--all")
	r, text = run("rm", "-f", "web")
	check.That(t, r.ExitCode == 125 && strings.HasPrefix(text, refused("web")), "rm of one that has ended: exit code %d, %q", r.ExitCode, text)
}

// help and version work like the flags. A program of that name runs after --.
func TestHelpCommand(t *testing.T) {
	t.Parallel()
	run := func(args ...string) *harness.Result {
		return harness.Start(t, harness.Options{Bare: true, Dir: "/usr"}, args...).Wait()
	}
	for _, c := range [][2][]string{
		{{"help"}, {"--help"}}, {{"version"}, {"--version"}},
		{{"help", "run"}, {"run", "--help"}}, {{"help", "exec"}, {"exec", "--help"}}, {{"help", "doctor"}, {"doctor", "--help"}},
	} {
		got, want := run(c[0]...), run(c[1]...)
		check.That(t, got.ExitCode == 0 && string(got.Stdout) == string(want.Stdout) && len(got.Stdout) != 0 && len(got.Stderr) == 0,
			"%q: exit code %d, stdout %.100q, stderr %q; want as %q", c[0], got.ExitCode, got.Stdout, got.Stderr, c[1])
	}
	for _, args := range [][]string{{"help", "nosuch"}, {"help", "run", "exec"}, {"help", "help"}} {
		if r := run(args...); r.ExitCode != 125 || len(r.Stdout) > 0 || !strings.HasSuffix(string(r.Stderr), "; see sbxrun --help\n") {
			t.Errorf("%q: exit code %d, stdout %.100q, stderr %q", args, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	run("--", "help").Exits(t, 127)
}

// In a removed current directory, relative paths are errors. Without a check, --bind .:/x would show all of the host's
// files.
func TestRemovedDirectory(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--workdir", "/tmp", "--bind", ".:/x", "ls", "/x"}, `bind ".:/x": the current directory was removed, or cannot be reached`},
		{[]string{"--workdir", "/tmp", "--ro-bind", "etc:/x", "ls", "/x"}, `bind "etc:/x": the current directory was removed, or cannot be reached`},
		{[]string{"--report", "r.json", "--workdir", "/tmp", "true"}, `cannot write the report to "r.json": its directory was removed`},
		{[]string{"true"}, "the current directory cannot be used: it was removed"},
	} {
		dir, err := os.MkdirTemp("/dev/shm", "gone") // of a tmpfs, where some operations still work
		check.Must(t, err)
		t.Cleanup(func() { os.Remove(dir) }) // if a failure has left it
		wrap := []string{"sh", "-c", `rmdir "$PWD" && exec "$@"`, "sh"}
		r := harness.Start(t, harness.Options{Bare: true, Dir: dir, Wrap: wrap}, c.args...).Wait()
		check.That(t, r.ExitCode == 125 && len(r.Stdout) == 0 && strings.HasPrefix(string(r.Stderr), "sbxrun: error: "+c.want),
			"%q: exit code %d, stdout %.100q, stderr %q; want %q", c.args, r.ExitCode, r.Stdout, r.Stderr, c.want)
	}
}
