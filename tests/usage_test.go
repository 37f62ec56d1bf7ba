package tests

import (
	stdjson "encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Usage errors are JSON if --json is given, before or after the error, and only then.
func TestUsageErrorsAsJSON(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, c := range []struct {
		line string
		want string // beginning of error.message; "" for no JSON
	}{
		{"--json --badflag true", "unknown flag --badflag"},
		{"--badflag --json true", "unknown flag --badflag"},
		{"--badflag 5 --json true", "unknown flag --badflag"},
		{"--timeout x --json true", `--timeout: invalid duration "x"`},
		{"--json --timeout=x true", `--timeout: invalid duration "x"`},
		{"--timeout --json true", "--timeout: needs a value"},
		{"--json --memory", "--memory: needs a value"},
		{"--json --print-filter x true", "--print-filter: has no effect without --print-command"},
		{"--json", "no command given"},
		{"--json --report - true", `--report "-": want a path or fd:N`},
		{"run --badflag --json", "unknown flag --badflag"},
		{"exec --json", "no sandbox given"},
		{"exec --badflag --json box true", "unknown flag --badflag"},
		{"exec --json --workdir . box true", `working directory "."`},
		{"exec --json --tty box true", "--json cannot be combined with --tty"},
		{"exec --json --detach --tty box true", "--detach cannot be combined with --tty"},
		{"--json --max-parallel 2 --wait-timeout 5 true", "--wait-timeout: has no effect without --on-pressure wait"},
		{"exec --json --detach --verbose box true", "--verbose: has no effect with --detach"},
		{"ps box --tag a=b --json", "--tag: execs have no tags"},
		{"exec --json --report - box true", `--report "-"`},
		{"start --badflag --json", "unknown flag --badflag"},
		{"start --json --net x", `--net: invalid value "x"`},
		{"start --json --user x true", `--user "x"`},
		{"ps --json --badflag", "unknown flag --badflag"},
		{"ps --tag x --json", `--tag "x"`},
		{"ps --json x y", "unexpected argument y"},
		{"inspect --json", "no sandbox given"},
		{"wait --json", "no sandbox given"},
		{"wait x --log ( --json", "--log: "},
		{"logs --tail x --json web", `--tail "x"`},
		{"logs --json nosuch", `no sandbox named "nosuch" in `},
		{"kill --json", "nothing to kill"},
		{"cleanup --json --older-than x", `--older-than: invalid duration "x"`},
		{"stats --interval 0 --json", "--interval: must be greater than 0"},
		{"--proof-timeout 0 --json true", "--proof-timeout: must be greater than 0"},
		{"exec --proof-timeout 0s --json box true", "--proof-timeout: must be greater than 0"},
		{"start --proof-timeout 0 --json", "--proof-timeout: must be greater than 0"},
		{"start --ready-interval 0 --json", "--ready-interval: must be greater than 0"},
		{"kill --proof-timeout 0 --json box", "--proof-timeout: must be greater than 0"},
		{"snapshot create --json", "no sandbox given"},
		{"snapshot create x y --json", "unexpected argument y"},
		{"snapshot create --json nosuch", `no sandbox named "nosuch" in `},
		{"snapshot import /nosuch --json", "open /nosuch: "},
		{"snapshot ls --json --badflag", "unknown flag --badflag"},
		{"nodes --json", "no NATS server configured"},
		{"doctor --badflag --json", "unknown flag --badflag"},
		{"doctor --json --state-dir x", "unknown flag --state-dir"},
		// Here --json is the command's argument, or not given.
		{"--timeout=x true --json", ""},
		{"--badflag -- --json", ""},
		{"--json=false --badflag true", ""},
		{"--report - true", ""},
	} {
		r := s.Start(harness.Options{}, strings.Fields(c.line)...).Wait()
		check.That(t, r.ExitCode == 125 && strings.HasPrefix(string(r.Stderr), "sbxrun: error: "+c.want), "%s: exit code %d, stderr %q", c.line, r.ExitCode, r.Stderr)
		if c.want == "" {
			check.That(t, len(r.Stdout) == 0, "%s: stdout %q", c.line, r.Stdout)
			continue
		}
		var said struct {
			ExitCode int `json:"exit_code"`
			Error    struct{ Message string }
			Cause    *string
		}
		if err := stdjson.Unmarshal(r.Stdout, &said); err != nil {
			t.Errorf("%s: %v: stdout %q", c.line, err, r.Stdout)
			continue
		}
		check.That(t, said.ExitCode == 125 && strings.HasPrefix(said.Error.Message, c.want), "%s: stdout %s", c.line, r.Stdout)
		command, _, _ := strings.Cut(c.line, " ")
		report := strings.HasPrefix(command, "-") || command == "run" || command == "exec" && !strings.Contains(c.line, "--detach")
		got := said.Cause != nil
		check.That(t, got == report, "%s: a report: %v, want %v: %s", c.line, got, report, r.Stdout)
	}
}

// The error for an invalid value contains a valid one.
func TestExamplesInErrors(t *testing.T) {
	t.Parallel()
	file := filepath.Join(harness.Dir(t), "secrets")
	harness.Must(t, os.WriteFile(file, []byte("A=1\nnothing like it\n"), 0o644))
	for _, c := range []struct{ line, want string }{
		{"--timeout abc", "(1500ms, 5m, 1h, 1d)"},
		{"--memory abc", "(512K, 64M, 1.5G, 1T)"},
		{"--max-output x", "(512K, 64M, 1.5G, 1T)"},
		{"--pids x", "such as 64"},
		{"--cpus x", "such as 0.5 or 2"},
		{"--env-file /nonexistent", "a line for each variable, such as LANG=C"},
		{"--env-file " + file, "a line for each variable, such as LANG=C"},
		{"--env-file /usr", "a line for each variable, such as LANG=C"},
		{"--report fd:x", "such as fd:3"},
		{"--report -", "use --report /dev/stdout for stdout, or ./- for a file of that name"},
	} {
		r := harness.Start(t, harness.Options{Bare: true}, append(strings.Fields(c.line), "true")...).Wait()
		check.That(t, r.ExitCode == 125 && strings.Contains(string(r.Stderr), c.want) && !strings.Contains(string(r.Stderr), "nothing like"),
			"%s: exit code %d, stderr %q", c.line, r.ExitCode, r.Stderr)
	}
}

// JSON contains <, > and & unescaped, for runs and sandboxes.
func TestJSONUnescaped(t *testing.T) {
	t.Parallel()
	const text = "<a & b>"
	r := harness.Start(t, harness.Options{Bare: true}, "--json", "echo", text).Wait()
	check.That(t, strings.Count(string(r.Stdout), text) == 2, "run --json: %s", r.Stdout)
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--tag", "text="+text, "--", "sh", "-c", `echo "$0"; exec sleep 60`, text)
	for _, args := range [][]string{{"ps", "--json"}, {"inspect", b.ID}, {"exec", "--json", b.ID, "echo", text}, {"kill", "--json", text}} {
		s.Run(args...).OutHas(t, text)
	}
	record, err := os.ReadFile(filepath.Join(s.Dir, b.ID, "record.json"))
	harness.Must(t, err)
	check.That(t, strings.Contains(string(record), text), "record: %s", record)
}

// reaper runs a command for bash and reaps its orphans, which a plain bwrap leaves.
const reaper = `
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
code = subprocess.run(["bash", "-c", sys.argv[1]]).returncode
try:
    while True: os.wait()
except ChildProcessError: sys.exit(code)
`

// The printed command passes the filter only if it was written, names its length, and works.
func TestPrintCommand(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	file := filepath.Join(dir, "the filter")
	script := `grep Seccomp: /proc/self/status`
	print := func(o harness.Options, flags ...string) string {
		t.Helper()
		o.Bare, o.Dir = true, "/usr"
		r := harness.Start(t, o, append(append([]string{"--print-command"}, flags...), "sh", "-c", script)...).Wait()
		check.Require(t, r.ExitCode == 0 && len(r.Stderr) == 0, "%q: exit code %d, stderr %s", flags, r.ExitCode, r.Stderr)
		return string(r.Stdout)
	}
	carryOut := func(command string) string {
		t.Helper()
		out, err := exec.Command("python3", "-c", reaper, command).CombinedOutput()
		check.Require(t, err == nil, "%v: %s\n%s", err, out, command)
		return strings.Join(strings.Fields(string(out)), " ")
	}
	without := print(harness.Options{})
	comment, rest, _ := strings.Cut(without, "\n")
	check.That(t, !strings.Contains(rest, "--seccomp") && len(without) <= 6000, "the filter is in it: %s", without)
	check.Equal(t, carryOut(without), "Seccomp: 0", "without the filter")
	with := print(harness.Options{}, "--print-filter", file)
	filter, err := os.ReadFile(file)
	harness.Must(t, err)
	want := "# without its seccomp filter of " + strconv.Itoa(len(filter)) + " bytes, which --print-filter FILE writes"
	check.That(t, comment == want && len(filter) != 0 && len(filter)%8 == 0, "comment %q, want %q", comment, want)
	got := carryOut(with)
	check.That(t, !strings.HasPrefix(with, "#") && got == "Seccomp: 2", "with the filter: %q: %s", got, with)
	// To a descriptor, from which the command reads it.
	open := []string{"bash", "-c", `exec "$@" 5>"$0"`, file}
	with = print(harness.Options{Wrap: open}, "--print-filter", "fd:5")
	again, err := os.ReadFile(file)
	check.That(t, err == nil && string(again) == string(filter), "another filter by a descriptor: %v", err)
	check.Equal(t, carryOut("exec 5<'"+file+"'\n"+with), "Seccomp: 2", "by a descriptor")
	off := print(harness.Options{}, "--seccomp", "off")
	check.That(t, !strings.Contains(off, "#") && carryOut(off) == "Seccomp: 0", "--seccomp off: %s", off)
}

// --state-dir replaces the variable, also for background processes, and a not-found error names
// the directory.
func TestStateDirFlag(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	other := harness.NewState(t) // the variable's directory
	at := []string{"--state-dir", s.Dir}
	b := s.Sandbox(harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + other.Dir}}, append(at, "--", "sh", "-c", "echo said; exec sleep 600")...)
	run := func(command string, args ...string) *harness.Result {
		t.Helper()
		return other.Run(append(append([]string{command}, at...), args...)...)
	}
	for _, c := range []struct {
		r    *harness.Result
		want string
	}{
		{run("ps", "--quiet"), b.ID},
		{run("inspect", b.ID), b.ID},
		{run("exec", b.ID, "echo", "in it"), "in it"},
		{run("wait", "--log", "said", b.ID), ""},
		{run("logs", b.ID), "said"},
		{run("stats", "--json"), b.ID},
	} {
		check.That(t, c.r.ExitCode == 0 && strings.Contains(string(c.r.Stdout), c.want), "exit code %d, stdout %s, stderr %s", c.r.ExitCode, c.r.Stdout, c.r.Stderr)
	}
	run("cleanup", b.ID).Exits(t, 125).OutHas(t, "still running")
	relative := other.Start(harness.Options{Dir: filepath.Dir(s.Dir)}, "ps", "--quiet", "--state-dir", filepath.Base(s.Dir)).Wait()
	check.That(t, strings.TrimSpace(string(relative.Stdout)) == b.ID, "a relative path: %s%s", relative.Stdout, relative.Stderr)
	other.Run("ps", "--state-dir", "").Exits(t, 125).ErrHas(t, "--state-dir: the value is empty")
	for _, args := range [][]string{{"kill", b.ID}, {"logs", b.ID}, {"wait", b.ID}, {"inspect", b.ID}, {"exec", b.ID, "true"}} {
		want := "no sandbox named \"" + b.ID + "\" in " + other.Dir + ";"
		other.Run(args...).Exits(t, 125).ErrHas(t, want)
	}
	other.Run("kill", "--all").Exits(t, 0).Out(t, "0 killed, looked in "+other.Dir+"\n")
	r := run("kill", "--all")
	check.That(t, r.ExitCode == 0 && strings.HasSuffix(string(r.Stdout), "\n1 killed\n"), "kill --all: exit code %d, %s", r.ExitCode, r.Stdout)
}
