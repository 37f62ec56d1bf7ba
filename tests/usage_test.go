package tests

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/cli"
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
		{"--timeout x --json true", `--timeout: invalid duration "x"`},
		{"--timeout --json true", "--timeout: needs a value"},
		{"--json --print-filter x true", "--print-filter: has no effect without --print-command"},
		{"--json", "no command given"},
		{"--json --report - true", `--report "-": want a path or fd:N`},
		{"exec --json", "no sandbox given"},
		{"exec --json --tty box true", "--json cannot be combined with --tty"},
		{"--json --max-parallel 2 --wait-timeout 5 true", "--wait-timeout: has no effect without --on-pressure wait"},
		{"kill --json", "nothing to kill"},
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
		out, err := harness.Command(t, exec.Command("python3", "-c", reaper, command), harness.Bound)
		check.Require(t, err == nil, "%v: %s\n%s", err, out, command)
		return strings.Join(strings.Fields(out), " ")
	}
	without := print(harness.Options{})
	comment, rest, _ := strings.Cut(without, "\n")
	check.That(t, !strings.Contains(rest, "--seccomp") && len(without) <= 6000, "the filter is in it: %s", without)
	check.Equal(t, carryOut(without), "Seccomp: 0", "without the filter")
	with := print(harness.Options{}, "--print-filter", file)
	filter := harness.ReadFile(t, file)
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

// --state-dir replaces the variable, also for background processes, and a not-found error names the directory.
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

// The most common mistakes on the command line get the messages in mistakes.txt: one line with the cause and, where
// there is one, the remedy. Each line after a command is its stderr, and the last one its exit code.
func TestMistakes(t *testing.T) {
	t.Parallel()
	const golden = "mistakes.txt"
	text := harness.ReadFile(t, golden)
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "--name", "web")
	dir := harness.Dir(t)
	var got strings.Builder
	n := 0
	for line := range strings.Lines(string(text)) {
		words, ok := strings.CutPrefix(strings.TrimSpace(line), "$ sbxrun")
		if !ok {
			continue
		}
		n++
		args := strings.Fields(words)
		if before, quoted, ok := strings.Cut(words, "'"); ok { // one quoted word at the end
			args = append(strings.Fields(before), strings.Trim(quoted, "'"))
		}
		r := s.Start(harness.Options{Dir: dir, Env: []string{"PATH=/usr/bin:/bin"}}, args...).Wait()
		fmt.Fprintf(&got, "$ sbxrun%s\n%s%d\n", words, strings.NewReplacer(s.Dir, "STATE", dir, "DIR").Replace(string(r.Stderr)), r.ExitCode)
		check.That(t, strings.Count(string(r.Stderr), "\n") == 1, "%s: want one line on stderr, got %q", words, r.Stderr)
	}
	check.That(t, n >= 40, "only %d mistakes in %s", n, golden)
	check.NoDiff(t, cmp.Diff(string(text), got.String()), "%s (-want +got)", golden)
}

// Every failing command with --json prints one JSON value: an object with its exit code and an error with code and
// message, or a list with such an object for each name.
func TestJSONErrors(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), harness.SharedDir(t)
	file := filepath.Join(dir, "file")
	check.Must(t, os.WriteFile(file, nil, 0o644))
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

// suggestion is a block of suggestions.txt.
type suggestion struct {
	prepare, mistake, message, remedy string
}

// Commands that follow the messages for mistakes succeed. stderr is a terminal, because some hints are only for people.
func TestSuggestions(t *testing.T) {
	t.Parallel()
	for i, s := range suggestions(t) {
		t.Run(fmt.Sprintf("%d %s", i+1, s.mistake), func(t *testing.T) {
			t.Parallel()
			dir := harness.SharedDir(t)
			check.Must(t, os.Mkdir(dir+"/work", 0o777))
			if os.Getuid() == 0 {
				check.Must(t, os.Chown(dir+"/work", 65534, 65534))
			}
			out := onTerminal(t, dir, s)
			parts := regexp.MustCompile(`(?m)^--- (\d+)\n`).FindAllStringSubmatchIndex(out, -1)
			check.Require(t, len(parts) == 3, "printed %q", out)
			code := func(i int) string { return out[parts[i][2]:parts[i][3]] }
			mistake, remedy := out[parts[0][1]:parts[1][0]], out[parts[1][1]:parts[2][0]]
			if code(0) != "0" {
				t.Errorf("$ %s\n%s", s.prepare, out[:parts[0][0]])
			}
			check.That(t, code(1) != "0" && strings.Contains(mistake, s.message), "$ %s\nexit code %s, want a message with %q:\n%s", s.mistake, code(1), s.message, mistake)
			check.That(t, code(2) == "0", "$ %s\nexit code %s:\n%s", s.remedy, code(2), remedy)
		})
	}
}

// onTerminal runs the commands of a block in a directory of their own, with a terminal as stdout and stderr. After each
// command there is a line with its exit code.
func onTerminal(t *testing.T, dir string, s suggestion) string {
	t.Helper()
	ptmx, tty, err := pty.Open()
	check.Must(t, err)
	defer ptmx.Close()
	read := make(chan string)
	go func() {
		text, _ := io.ReadAll(ptmx) // EIO: all have closed the terminal
		read <- string(text)
	}()
	var script strings.Builder
	for _, command := range []string{s.prepare, s.mistake, s.remedy} {
		fmt.Fprintf(&script, "(%s\n)\necho \"--- $?\"\n", command+" ")
	}
	cmd := contained("bash", "-c", strings.ReplaceAll(script.String(), "( \n)", "true"))
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir+"/work", tty, tty
	cmd.Env = []string{"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + harness.Path, "HOME=" + dir, "SBXRUN_STATE_DIR=" + dir + "/state", "SBXRUN_DATA_DIR=" + dir + "/data",
		"TERM=dumb", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*", harness.Bwrap()}
	done, err := harness.StartCommand(cmd)
	tty.Close()
	check.Must(t, err)
	timer := time.AfterFunc(harness.Bound, func() { _ = cmd.Process.Kill() }) // fails only if it has just exited
	check.Must(t, cmd.Wait())
	timer.Stop()
	done()
	return strings.ReplaceAll(<-read, "\r\n", "\n")
}

// contained returns a command that runs in a PID namespace, which ends processes that it leaves behind.
func contained(command ...string) *exec.Cmd {
	args := []string{"--fork", "--pid", "--mount-proc", "--kill-child"}
	if os.Getuid() != 0 {
		args = append([]string{"--user", "--map-current-user"}, args...)
	}
	return exec.Command("unshare", append(args, command...)...)
}

func suggestions(t *testing.T) (list []suggestion) {
	t.Helper()
	for i, block := range strings.Split(readFile(t, "suggestions.txt"), "\n\n") {
		if i == 0 {
			continue // explains the format
		}
		var s suggestion
		for line := range strings.Lines(block) {
			text := strings.TrimSuffix(line[2:], "\n")
			switch {
			case line[0] == '>':
				s.prepare = text
			case line[0] == ':':
				s.message = text
			case s.mistake == "":
				s.mistake = text
			default:
				s.remedy = text
			}
		}
		check.Require(t, s.mistake != "" && s.message != "" && s.remedy != "", "incomplete block:\n%s", block)
		list = append(list, s)
	}
	return list
}

// Arguments up to the kernel's limits (execve(2)) arrive unchanged.
func TestArgumentsLong(t *testing.T) {
	t.Parallel()
	count := func(args ...string) *harness.Result {
		t.Helper()
		return harness.Run(t, harness.Options{}, append([]string{"python3", "-c", "import sys; print(len(sys.argv) - 1, sum(map(len, sys.argv[1:])))"}, args...)...)
	}
	expect := func(r *harness.Result, want string) {
		t.Helper()
		r.Expect(t, 0, "exited")
		check.Equal(t, string(r.Stdout), want)
	}
	many := make([]string, 20000)
	for i := range many {
		many[i] = "0123456789abcdef"
	}
	expect(count(many...), "20000 320000\n")
	const longest = 128<<10 - 1
	expect(count(strings.Repeat("x", longest)), "1 131071\n")

	// With one byte more the kernel refuses to start sbxrun itself.
	p, err := harness.TryStart(t, harness.Options{}, "echo", strings.Repeat("x", longest+1))
	if err == nil {
		p.Wait()
	}
	check.That(t, errors.Is(err, syscall.E2BIG), "an argument of 131072 bytes: %v", err)
}

// The same limit applies to the command's environment, where it shows only at its exec.
func TestEnvironmentLong(t *testing.T) {
	t.Parallel()
	file := filepath.Join(harness.Dir(t), "env")
	write := func(n int) {
		check.Must(t, os.WriteFile(file, []byte("LONG="+strings.Repeat("x", n)+"\n"), 0o600))
	}
	write(128<<10 - 1 - len("LONG="))
	harness.Run(t, harness.Options{}, "--env-file", file, "sh", "-c", "echo ${#LONG}").Expect(t, 0, "exited").Out(t, "131066\n")
	write(128 << 10)
	r := harness.Run(t, harness.Options{}, "--env-file", file, "true")
	check.That(t, r.Report != nil && !r.Report.Started && r.ExitCode >= 125 && r.ExitCode <= 126 && len(r.Stderr) != 0, "exit code %d, stderr %.500q", r.ExitCode, r.Stderr)
}

// Values with line breaks, empty values and odd text arrive unchanged.
func TestEnvironmentValues(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{Env: []string{"PASSED=three\nlines\n"}},
		"--env", "A=one\ntwo", "--env", "EMPTY=", "--env", "PASSED", "--env", `ODD=a=b $(c) "d" \`,
		"sh", "-c", `printf '<%s>' "$A" "$EMPTY" "$PASSED" "$ODD"`)
	r.Expect(t, 0, "exited")
	want := "<one\ntwo><><three\nlines\n>" + `<a=b $(c) "d" \>`
	check.That(t, string(r.Stdout) == want, "%q, want %q", r.Stdout, want)
}

// An argument that is not UTF-8 arrives, and the report is valid JSON.
func TestArgumentBytes(t *testing.T) {
	t.Parallel()
	harness.Run(t, harness.Options{}, "printf", "%s", "\xff\x01\n").Expect(t, 0, "exited").Out(t, "\xff\x01\n")
}
