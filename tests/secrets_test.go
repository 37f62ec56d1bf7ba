package tests

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// secret is put together at run time, so that a search of command lines does not find the test's
// own.
var secret = "s3cr3t" + strconv.Itoa(os.Getpid())

// A secret in the caller's environment is nowhere in the sandbox.
func TestSecretStaysOutside(t *testing.T) {
	t.Parallel()
	env := []string{"API_KEY=" + secret, "LD_LIBRARY_PATH=/tmp/" + secret}
	harness.Run(t, harness.Options{Env: env}, "/fixtures/probe-env", secret[:3], secret[3:]).Exits(t, 0)
	// The probe finds an existing secret.
	r := harness.Run(t, harness.Options{Env: env}, "--env", "API_KEY", "/fixtures/probe-env", secret[:3], secret[3:])
	check.That(t, r.ExitCode == 1 && bytes.Contains(r.Stdout, []byte("found in env\n")), "the probe is blind: exit code %d: %s", r.ExitCode, r.Stdout)
	check.That(t, !bytes.Contains(r.Stdout, []byte("found in /proc/1/")), "passed through for the command, but init shows it: %s", r.Stdout)
}

// A variable for the command appears in no command line on the host, because ps(1) shows these to everybody. It appears
// only in the environments of the caller and the command.
func TestSecretNotInCommandLines(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	file := filepath.Join(dir, "env")
	harness.Must(t, os.WriteFile(file, []byte("FROM_FILE="+secret+"\n"), 0o600))
	p := harness.Start(t, harness.Options{Env: []string{"API_KEY=" + secret}},
		"--timeout", "20", "--env", "API_KEY", "--env-file", file,
		"sh", "-c", `[ "$API_KEY" = "$FROM_FILE" ] && echo same; read x; exec sleep 60`)
	p.WaitOutput("same\n")
	payload := p.Role(harness.RolePayload).PID
	keeper := p.Role(harness.RoleKeeper).PID
	pids, err := filepath.Glob("/proc/[0-9]*")
	harness.Must(t, err)
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
