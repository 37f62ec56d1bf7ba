package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// refusal is the output of a command that leads to /proc/self/exe.
const refusal = "sbxrun: /proc/self/exe cannot be executed here"

// selfExe returns a directory with commands that lead to /proc/self/exe, which would print
// sbxrun's version, and their names.
func selfExe(t *testing.T, uid int) (dir string, commands []string) {
	t.Helper()
	dir = harness.Dir(t)
	harness.Must(t, os.Symlink("/proc/self/exe", filepath.Join(dir, "link")))
	for name, interpreter := range map[string]string{"relative": "link", "nested": filepath.Join(dir, "direct"), "direct": "/proc/self/exe"} {
		harness.Must(t, os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, "#!%s --version\n", interpreter), 0o755))
	}
	if uid != 0 {
		harness.Must(t, os.Chown(dir, uid, uid))
	}
	harness.Must(t, os.Chmod(dir, 0o755))
	return dir, []string{"./relative", "./nested"}
}

// A command whose interpreter leads to /proc/self/exe does not execute sbxrun's own file in the
// sandbox (CVE-2019-5736).
func TestSelfExe(t *testing.T) {
	t.Parallel()
	identities := map[string]int{"": 0}
	if harness.Root() {
		identities["61234:61234"] = 61234
	}
	for user, uid := range identities {
		var flags []string
		if user != "" {
			flags = []string{"--user", user}
		}
		t.Run("user "+user, func(t *testing.T) {
			t.Parallel()
			dir, commands := selfExe(t, uid)
			s := harness.NewState(t)
			b := s.Sandbox(harness.Options{}, append(flags, "--bind", dir+":"+dir, "--workdir", dir)...)
			for _, command := range commands {
				launchRefused(t, harness.Run(t, harness.Options{Dir: dir}, append(flags, "-w", command)...))
				launchRefused(t, b.Exec(harness.Options{}, nil, command))
			}
			for _, command := range append(commands, "./direct", "./link", "/proc/self/exe") {
				r := b.Detach(nil, command).Ended()
				check.That(t, r.ExitCode == 126, "%s: %s", command, r.Raw())
			}
			launchRefused(t, b.Exec(harness.Options{}, nil, "./link"))
			// Init, the only other process, is a fork of sbxrun.
			b.Exec(harness.Options{}, nil, "cat", "/proc/1/exe").Exits(t, 1).Out(t, "")
			launchRefused(t, b.Exec(harness.Options{}, nil, "/proc/self/exe", "wait", "--version"))
			started := s.Sandbox(harness.Options{}, append(flags, "--bind", dir+":"+dir, "--workdir", dir, "./nested")...)
			started.Ended()
			s.Run("logs", started.ID).ErrHas(t, refusal).Out(t, "")
		})
	}
}

func launchRefused(t *testing.T, r *harness.Result) {
	t.Helper()
	check.That(t, r.ExitCode == 126 && len(r.Stdout) == 0 && strings.Contains(string(r.Stderr), refusal), "exit code %d, stdout %q, stderr %q", r.ExitCode, r.Stdout, r.Stderr)
}

// sbxrun does not execute an sbxrund that more users can change than sbxrun itself.
func TestServerProgramOfOthers(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	marker := filepath.Join(harness.SharedDir(t), "executed")
	server := filepath.Join(dir, "sbxrund")
	harness.Must(t, os.WriteFile(server, []byte("#!/bin/sh\n: >"+marker+"\n"), 0o755))
	o := harness.Options{Bare: true, Dir: "/usr", Wrap: []string{"sh", "-c", `cp "$1" "$0/sbxrun"; chmod 755 "$0/sbxrun"; shift; exec "$0/sbxrun" "$@"`, dir}}
	try := func(what string, refused bool) {
		t.Helper()
		for _, args := range [][]string{{"serve"}, {"mcp"}, {"--net", "allow=example.org", "true"}} {
			_ = os.Remove(marker)
			r := harness.Start(t, o, args...).Wait()
			_, err := os.Stat(marker)
			if executed := err == nil; executed == refused || refused && (r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "cannot be trusted")) {
				t.Errorf("%s, %q: exit code %d, executed %v, stderr %s", what, args, r.ExitCode, executed, r.Stderr)
			}
		}
	}
	try("as installed", false)
	harness.Must(t, os.Chmod(server, 0o775))
	try("writable for a group", true)
	harness.Must(t, os.Chmod(server, 0o755))
	if harness.Root() {
		harness.Must(t, os.Chown(server, 12345, 12345))
		try("another user's", true)
	}
}
