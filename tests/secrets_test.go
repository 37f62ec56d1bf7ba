package tests

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// secret is put together at run time, so that a search of command lines does not find the test's own.
var secret = "s3cr3t" + strconv.Itoa(os.Getpid())

// A secret in the caller's environment is nowhere in the sandbox.
func TestSecretStaysOutside(t *testing.T) {
	t.Parallel()
	env := []string{"API_KEY=" + secret, "LD_LIBRARY_PATH=/tmp/" + secret}
	harness.Run(t, harness.Options{Env: env}, "/fixtures/probe-env", secret[:3], secret[3:]).Exits(t, 0)
	// The probe finds an existing secret.
	r := harness.Run(t, harness.Options{Env: env}, "--env", "API_KEY", "/fixtures/probe-env", secret[:3], secret[3:]).Exits(t, 1).OutHas(t, "found in env\n")
	check.That(t, !bytes.Contains(r.Stdout, []byte("found in /proc/1/")), "passed through for the command, but init shows it: %s", r.Stdout)
}

// A variable for the command appears in no command line on the host, because ps(1) shows these to everybody. It appears
// only in the environments of the caller and the command.
func TestSecretNotInCommandLines(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	file := filepath.Join(dir, "env")
	check.Must(t, os.WriteFile(file, []byte("FROM_FILE="+secret+"\n"), 0o600))
	p := harness.Start(t, harness.Options{Env: []string{"API_KEY=" + secret}},
		"--timeout", "600", "--env", "API_KEY", "--env-file", file,
		"sh", "-c", `[ "$API_KEY" = "$FROM_FILE" ] && echo same; read x; exec sleep 600`)
	p.WaitOutput("same\n")
	payload := p.Role(harness.RolePayload).PID
	keeper := p.Role(harness.RoleKeeper).PID
	pids, err := filepath.Glob("/proc/[0-9]*")
	check.Must(t, err)
	for _, dir := range pids {
		line, err := os.ReadFile(dir + "/cmdline")
		check.That(t, err != nil || !bytes.Contains(line, []byte(secret)), "%s/cmdline: %q", dir, line)
	}
	for _, role := range []int{harness.RoleMonitor, harness.RoleInit} {
		pid := p.Role(role).PID
		env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		check.That(t, err != nil || !bytes.Contains(env, []byte(secret)), "environ of bwrap, process %d", pid)
	}
	check.That(t, payload != keeper, "the harness is blind")
	p.Signal(15)
	p.Wait().Expect(t, 128+15, "canceled")
}

// Without flags the environment contains only these variables.
func TestCleanEnvironment(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{Bare: true, Env: []string{"LANG=C.UTF-8", "LC_TIME=C", "TERM=dumb", "TZ=UTC", "EDITOR=vi", "SSH_AUTH_SOCK=/run/x", "LD_PRELOAD=", "BASH_ENV=/x"}}, "env", "-0")
	got := map[string]bool{}
	for _, pair := range bytes.Split(bytes.Trim(r.Stdout, "\x00"), []byte{0}) {
		name, _, _ := bytes.Cut(pair, []byte("="))
		got[string(name)] = true
	}
	for _, name := range []string{"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_TIME", "TERM", "TZ"} {
		check.That(t, got[name], "%s is not set", name)
		delete(got, name)
	}
	delete(got, "PWD") // set by bwrap with --chdir
	check.That(t, len(got) == 0, "also set: %v", got)
}

// refusal is the output of a command that leads to /proc/self/exe.
const refusal = "sbxrun: /proc/self/exe cannot be executed here"

// selfExe returns a directory with commands that lead to /proc/self/exe, which would print
// sbxrun's version, and their names.
func selfExe(t *testing.T, uid int) (dir string, commands []string) {
	t.Helper()
	dir = harness.Dir(t)
	check.Must(t, os.Symlink("/proc/self/exe", filepath.Join(dir, "link")))
	for name, interpreter := range map[string]string{"relative": "link", "nested": filepath.Join(dir, "direct"), "direct": "/proc/self/exe"} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, "#!%s --version\n", interpreter), 0o755))
	}
	if uid != 0 {
		check.Must(t, os.Chown(dir, uid, uid))
	}
	check.Must(t, os.Chmod(dir, 0o755))
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
	check.Must(t, os.WriteFile(server, []byte("#!/bin/sh\n: >"+marker+"\n"), 0o755))
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
	check.Must(t, os.Chmod(server, 0o775))
	try("writable for a group", true)
	check.Must(t, os.Chmod(server, 0o755))
	if harness.Root() {
		check.Must(t, os.Chown(server, 12345, 12345))
		try("another user's", true)
	}
}
