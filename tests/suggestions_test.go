package tests

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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
			harness.Must(t, os.Mkdir(dir+"/work", 0o777))
			if os.Getuid() == 0 {
				harness.Must(t, os.Chown(dir+"/work", 65534, 65534))
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
	harness.Must(t, err)
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
	harness.Must(t, err)
	timer := time.AfterFunc(harness.Bound, func() { _ = cmd.Process.Kill() }) // fails only if it has just exited
	harness.Must(t, cmd.Wait())
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
