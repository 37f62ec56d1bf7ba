package tests

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// An ordinary user gets one error with everything that is missing, and a script for root that lets this shell set every
// limit: with cgroup v1, v2 or both, and where the machine has both, also with v1 alone.
func TestLimitsScript(t *testing.T) {
	if !harness.Root() {
		script := harness.Start(t, harness.Options{Bare: true}, "doctor", "--script").Wait()
		out, err := exec.Command("sh", "-c", string(script.Stdout)).CombinedOutput()
		want := "sbxrun: error: this is for root: sbxrun doctor --script | sudo sh\n"
		check.That(t, script.ExitCode == 0 && err != nil && string(out) == want, "exit code %d, %v: %s", script.ExitCode, err, out)
		return
	}
	t.Run("mounted by its user", limitsScriptOwnMounts)
	t.Run("as mounted", func(t *testing.T) { limitsScript(t, nil) })
	mounts := harness.ReadFile(t, "/proc/self/mountinfo")
	if bytes.Contains(mounts, []byte(" - cgroup ")) && bytes.Contains(mounts, []byte(" - cgroup2 ")) {
		const without = `awk '/ - cgroup2 / {print $5}' /proc/self/mountinfo | while read -r dir; do umount "$dir" || exit 3; done && exec "$@"`
		t.Run("v1 alone", func(t *testing.T) { limitsScript(t, []string{"unshare", "--mount", "sh", "-c", without, "-"}) })
	}
}

// limitsScript tries the script in a shell that wrap starts.
func limitsScript(t *testing.T, wrap []string) {
	const uid = 47110
	state := filepath.Join(harness.SharedDir(t), "state")
	check.Must(t, os.Mkdir(state, 0o700))
	check.Must(t, os.Chown(state, uid, uid))
	words := append(append(wrap, harness.As(uid)...), "sh", "-c", `
		all() { "$0" --cwd none --memory 64M --pids 32 --cpus 0.5 --cpu-time 5 --json true 2>/dev/null; }
		all
		"$0" doctor --script
		echo ready
		read -r word
		all`, harness.Binary(t))
	shell, stdin, lines := startShell(t, "/", state, words...)
	t.Cleanup(func() { removeCgroups(t, fmt.Sprintf("user-%d", uid)) })
	first, err := lines.ReadBytes('\n')
	check.Must(t, err)
	report, err := harness.ParseReport(first)
	check.Must(t, err)
	e := report.Error
	check.Require(t, report.ExitCode == 125 && e != nil && e.Code == "limit" && e.Hint == "to enable limits in this shell: sbxrun doctor --script | sudo sh; or run without it: --limits best-effort",
		"refused with %s", first)
	for _, name := range []string{"memory", "pids", "cpus", "cpu-time"} {
		check.That(t, strings.Contains(e.Message, name), "the refusal has no %s: %s", name, e.Message)
	}
	script := printedScript(t, lines)
	cmd := exec.Command("sh")
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if machine, detected := limits.Detect(); detected != nil || !can(machine) {
		check.That(t, err != nil, "where root cannot set limits either: %s", out)
		return
	}
	want := fmt.Sprintf("sbxrun: user %d may set limits in process %d and its descendants\n", uid, shell.Process.Pid)
	check.Require(t, err == nil && string(out) == want, "the script: %v: %s", err, out)
	// Running it again changes nothing and succeeds.
	cmd = exec.Command("sh")
	cmd.Stdin = strings.NewReader(script)
	again, err := cmd.CombinedOutput()
	check.That(t, err == nil && string(again) == string(out), "once more: %v: %s", err, again)
	_, err = io.WriteString(stdin, "on\n")
	check.Must(t, err)
	second, err := lines.ReadBytes('\n')
	check.Must(t, err)
	report, err = harness.ParseReport(second)
	check.Must(t, err)
	check.That(t, report.ExitCode == 0 && len(report.Limits) == 5 && !slices.ContainsFunc(report.Limits, func(l harness.Limit) bool { return !l.Enforced }),
		"after the script: %s", second)
}

// startShell starts a command that prints a script, and waits for a line. The test ends it.
func startShell(t *testing.T, dir, state string, words ...string) (shell *exec.Cmd, stdin io.WriteCloser, lines *bufio.Reader) {
	t.Helper()
	shell = exec.Command(words[0], words[1:]...)
	shell.Dir, shell.Env, shell.Stderr = dir, []string{"PATH=" + harness.Path, harness.Bwrap(), "SBXRUN_STATE_DIR=" + state}, os.Stderr
	stdin, err := shell.StdinPipe()
	check.Must(t, err)
	stdout, err := shell.StdoutPipe()
	check.Must(t, err)
	check.Must(t, shell.Start())
	t.Cleanup(func() {
		stdin.Close() // in case it still waits for input
		_ = shell.Wait()
	})
	return shell, stdin, bufio.NewReader(stdout)
}

// printedScript returns the lines before "ready".
func printedScript(t *testing.T, lines *bufio.Reader) (script string) {
	t.Helper()
	for {
		line, err := lines.ReadString('\n')
		check.Must(t, err)
		if line == "ready\n" {
			return script
		}
		script += line
	}
}

// can reports whether the test process can set all limits.
func can(m *limits.Machine) bool {
	_, err := m.Plan(limits.Request{Memory: 64 << 20, Pids: 32, CPUs: 0.5, CPUTime: 5e9}, true)
	return err == nil
}

// removeCgroups removes cgroups of a name and everything below.
func removeCgroups(t *testing.T, name string) {
	var dirs []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && slices.Contains(strings.Split(path, "/"), name) {
			dirs = append(dirs, path)
		}
		return nil // cgroups of other tests come and go
	})
	for _, dir := range slices.Backward(dirs) {
		harness.Until(t, harness.Scaled(harness.Slack), dir+" is removed", func() bool { return os.Remove(dir) == nil || os.IsNotExist(os.Remove(dir)) })
	}
}

// The script changes no files where a user's shell shows a cgroup file system but root sees a directory of the user's.
func limitsScriptOwnMounts(t *testing.T) {
	const uid = 47111
	top := harness.SharedDir(t)
	fake := filepath.Join(top, "fake")
	check.Must(t, os.Mkdir(fake, 0o755))
	shell, _, lines := startShell(t, "", top+"/state", "unshare", "--mount", "sh", "-c", `
		awk '/ - cgroup2? / {print $5}' /proc/self/mountinfo >"$1/mounts"
		while read -r dir; do mkdir "$1/fake/$((n += 1))"; mount --rbind "$dir" "$1/fake/$n" && umount -l "$dir" || exit 3; done <"$1/mounts"
		"$0" doctor --script; echo ready; read -r word`, harness.Binary(t), top)
	script := printedScript(t, lines)
	script = strings.Replace(script, "uid=0 ", fmt.Sprintf("uid=%d ", uid), 1)
	cgroups := harness.ReadFile(t, fmt.Sprintf("/proc/%d/cgroup", shell.Process.Pid))
	for line := range strings.Lines(string(cgroups)) { // the script would use these directories as the shell's cgroups
		own := strings.TrimSpace(strings.SplitN(line, ":", 3)[2])
		dirs, err := filepath.Glob(fake + "/*")
		check.Must(t, err)
		for _, dir := range dirs {
			check.Must(t, os.MkdirAll(filepath.Join(dir, own), 0o755))
		}
	}
	cmd := exec.Command("sh")
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(out), "may set limits"), "the script: %v: %s", err, out)
	_ = filepath.WalkDir(fake, func(path string, d fs.DirEntry, err error) error {
		check.That(t, err != nil || d.Name() != fmt.Sprintf("user-%d", uid), "the script has made %s", path)
		return nil
	})
}

// doctor --script --pid --uid lets root run one command as a user that can set limits, as docs/concepts/limits.md
// shows.
func TestLimitsScriptForCommand(t *testing.T) {
	if os.Geteuid() != 0 {
		return // the script is for root
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		return // the script would change this machine
	}
	const uid = 47112
	s := harness.NewState(t)
	state := filepath.Join(harness.SharedDir(t), "state")
	check.Must(t, os.Mkdir(state, 0o700))
	check.Must(t, os.Chown(state, uid, uid))
	t.Cleanup(func() { removeCgroups(t, fmt.Sprintf("user-%d", uid)) })
	run := func(recipe string) (string, error) {
		cmd := exec.Command("sh", "-c", recipe, "sh", harness.Binary(t), "--cwd", "none", "--memory", "64M", "--pids", "32", "--json", "sh", "-c", "id -u")
		cmd.Dir, cmd.Env = "/", []string{"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + harness.Path, harness.Bwrap(), "SBXRUN_STATE_DIR=" + state}
		return harness.Command(t, cmd, harness.Bound)
	}
	const as = `exec setpriv --reuid 47112 --regid 47112 --clear-groups "$@"`
	if out, err := run(as); err == nil {
		return // this user can set limits anyway
	} else if machine, detected := limits.Detect(); detected != nil || !can(machine) {
		t.Logf("root cannot set limits here either: %s", out)
		return
	}
	out, err := run(`sbxrun doctor --script --pid $$ --uid 47112 | sh >&2 && ` + as)
	check.That(t, err == nil && strings.Contains(out, `"stdout":"47112\n"`), "with limits: %v, %s", err, out)

	out, _ = text(t, s, 0, "doctor", "--script", "--pid", "1")
	check.That(t, strings.Contains(out, "\nuid=0 shell=1\n"), "--pid 1: %.60q", out)
	for _, flags := range []string{"--script --pid -1", "--script --pid 4194305", "--pid 1", "--script --uid -1"} {
		check.Equal(t, s.Run(append([]string{"doctor"}, strings.Fields(flags)...)...).ExitCode, 125, "%s: exit code", flags)
	}
}
