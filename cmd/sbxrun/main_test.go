package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// asCommand is a variable that makes the test binary run as sbxrun.
const asCommand = "SBXRUN_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		os.Unsetenv(asCommand)
		main()
	}
	os.Exit(m.Run())
}

// sbxrunCommand returns a command that runs sbxrun in a small environment, as uid unless that is 0.
func sbxrunCommand(t *testing.T, uid uint32, dir string, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	c.Args[0] = "sbxrun"
	c.Dir = dir
	c.Env = []string{asCommand + "=1", "PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent"}
	if testing.CoverMode() != "" {
		c.Env = append(c.Env, "GOCOVERDIR="+shared(t)) // or Go's runtime prints a warning
	}
	if uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	return c
}

// identities returns the users for sbxrun: 0 for the user of the tests and, for root, another one.
func identities() []uint32 {
	if os.Geteuid() == 0 {
		return []uint32{0, 65534}
	}
	return []uint32{0}
}

// sbxrun runs a command to its end, at most for a time limit.
func sbxrun(t *testing.T, c *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	check.Must(t, c.Start())
	timer := time.AfterFunc(harness.Bound, func() { _ = c.Process.Kill() }) // may just have ended
	err := c.Wait()
	check.That(t, timer.Stop(), "%q hangs; stderr %q", c.Args, errs.String())
	check.Require(t, err == nil || errors.As(err, new(*exec.ExitError)), "%v", err)
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

// shared returns a new directory that all users can write to.
func shared(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	check.Must(t, err)
	check.Must(t, errors.Join(os.Chmod(dir, 0o777), os.Chmod(filepath.Dir(dir), 0o755)))
	return dir
}

// A command with write access to the report's directory neither sees the report nor can replace it.
func TestRunReportInWritableDirectory(t *testing.T) {
	for _, uid := range identities() {
		dir := shared(t)
		const forge = `ls -A; ls -A >seen; echo '{"status":"forged"}' >r.json; ln -s r.json .r.json.tmp; (sleep 0.2; echo late >>r.json) & exit 3`
		stdout, stderr, code := sbxrun(t, sbxrunCommand(t, uid, dir, "--report", "r.json", "--bind", ".", "sh", "-c", forge))
		check.That(t, stdout == "" && code == 3, "uid %d: the payload sees %q; code %d, stderr %q", uid, stdout, code, stderr)
		text, err := os.ReadFile(dir + "/r.json")
		var rep struct{ Status string }
		check.That(t, err == nil && json.Unmarshal(text, &rep) == nil && rep.Status == "failed", "uid %d: report %q, %v", uid, text, err)
		check.Equal(t, names(t, dir), ".r.json.tmp r.json seen", "uid %d: left in the directory", uid)
	}
}

// A run without a report leaves nothing in its place.
func TestRunReportNeverWritten(t *testing.T) {
	for _, uid := range identities() {
		dir := shared(t)
		_, stderr, code := sbxrun(t, sbxrunCommand(t, uid, dir, "--report", "r.json", "--print-command", "true"))
		check.That(t, code == 0, "uid %d: code %d, stderr %q", uid, code, stderr)
		check.Equal(t, names(t, dir), "", "uid %d: left by --print-command", uid)

		c := sbxrunCommand(t, uid, dir, "--report", "r.json", "--bind", ".", "sh", "-c", "echo up; exec sleep 100")
		out, err := c.StdoutPipe()
		check.Must(t, err)
		check.Must(t, c.Start())
		_, err = io.ReadFull(out, make([]byte, 3))
		check.That(t, err == nil, "uid %d: the payload does not start: %v", uid, err)
		check.Equal(t, names(t, dir), "", "uid %d: while the payload runs", uid)
		check.OK(t, c.Process.Kill())
		err = c.Wait()
		check.That(t, err != nil, "uid %d: ended in good order", uid)
		check.Equal(t, names(t, dir), "", "uid %d: left by a killed sbxrun", uid)
	}
}

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check.Must(t, err)
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return strings.Join(list, " ")
}

// sbxrun does not wait for named pipes without a reader or writer.
func TestRunNamedPipes(t *testing.T) {
	for _, uid := range identities() {
		dir := shared(t)
		check.Must(t, errors.Join(unix.Mkfifo(dir+"/pipe", 0o777), os.Chmod(dir+"/pipe", 0o777)))
		for _, tt := range []struct {
			args []string
			code int
			want string
		}{
			{[]string{"--report", "pipe", "true"}, 125, `sbxrun: error: cannot write the report to "pipe"`},
			{[]string{"./pipe"}, 126, `sbxrun: error: command "./pipe" cannot be executed: it is not a regular file`},
			{[]string{"--env", "PATH=.", "pipe"}, 127, `sbxrun: error: command "pipe" not found`},
		} {
			stdout, stderr, code := sbxrun(t, sbxrunCommand(t, uid, dir, tt.args...))
			check.That(t, code == tt.code && stdout == "" && strings.HasPrefix(stderr, tt.want), "uid %d, %q: code %d, stderr %q; want %d, %q", uid, tt.args, code, stderr, tt.code, tt.want)
		}
	}
}

// An empty variable at the end of the environment reaches the command.
func TestRunLastVariableEmpty(t *testing.T) {
	for _, uid := range identities() {
		for _, args := range [][]string{{"--env", "X="}, {"--env=X="}, {"--env", "Y=1", "--env", "X="}} {
			args = append(args, "sh", "-c", `echo "${X-unset}."`)
			stdout, stderr, code := sbxrun(t, sbxrunCommand(t, uid, shared(t), args...))
			check.That(t, stdout == ".\n" && stderr == "" && code == 0, "uid %d, %q: code %d, stdout %q, stderr %q", uid, args, code, stdout, stderr)
		}
	}
}

// A run does not follow a link that an earlier command has created in a writable bind.
func TestRunLinkPlantedByAPayload(t *testing.T) {
	for _, uid := range identities() {
		dir, host := shared(t), shared(t)
		bind := "--bind=" + dir + ":/w"
		_, stderr, code := sbxrun(t, sbxrunCommand(t, uid, dir, bind, "ln", "-s", "/oldroot"+host, "/w/link"))
		check.Require(t, code == 0, "uid %d: code %d, stderr %q", uid, code, stderr)
		for _, dest := range []string{"/w/link/new", "/w/link"} {
			_, stderr, code := sbxrun(t, sbxrunCommand(t, uid, dir, bind, "--tmpfs", dest, "true"))
			check.That(t, code == 125 && strings.Contains(stderr, "is a symbolic link") && strings.Count(stderr, "\n") == 1, "uid %d, %s: code %d, stderr %q", uid, dest, code, stderr)
		}
		check.Equal(t, names(t, host), "", "uid %d: made on the host", uid)
	}
}

// The completion functions of shells ask sbxrun for the words that complete a command line.
func TestComplete(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"--net ", "words\nnone\nhost\n"},
		{"kill ", "sandboxes\n"},
		{"logs web/", "sandboxes --all web\n"},
		{"exec web ls ", "command 2\n"},
		{"--ro-bind ", "files\n"},
		{"version ", "\n"},
	} {
		args := append([]string{"__complete"}, strings.Split(tt.args, " ")...)
		stdout, stderr, code := sbxrun(t, sbxrunCommand(t, 0, shared(t), args...))
		check.That(t, stdout == tt.want && stderr == "" && code == 0, "%q: code %d, stdout %q, stderr %q", tt.args, code, stdout, stderr)
	}
	stdout, stderr, code := sbxrun(t, sbxrunCommand(t, 0, shared(t), "__complete"))
	check.That(t, stdout == "\n" && stderr == "" && code == 0, "without words: code %d, stdout %q, stderr %q", code, stdout, stderr)
}
