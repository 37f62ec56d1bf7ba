package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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
	harness.Must(t, os.Mkdir(state, 0o700))
	harness.Must(t, os.Chown(state, uid, uid))
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
