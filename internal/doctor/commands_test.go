package doctor

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// command matches the command in a line of a remedy: the text after the introduction, up to the end.
var command = regexp.MustCompile(`(?:^|: |with |\()((?:sudo )?(?:apparmor_parser|apt-get|ausearch|chmod|dmesg|docker run|echo|kubectl|incus|lsns|lxc|mkdir|mount|podman run|printf|sbxrun|setcap|setpriv|sysctl|ulimit)\b.*)$`)

var (
	quoted = regexp.MustCompile(`'[^']*'`)
	prose  = regexp.MustCompile(`,? (?:and|or|if|lists|shows|in|to|on|what) `)
)

// Every command that a remedy suggests is one that a shell can parse, and contains no text of an error.
func TestCommandsOfRemedies(t *testing.T) {
	// Only these values may be part of a command. The others are messages.
	safe := map[string]bool{"sudo": true, "uid": true, "gid": true, "bwrap": true, "profile": true, "disallowed": true, "limit": true, "more": true, "missing": true, "open": true, "host": true}
	holder := regexp.MustCompile(`{([a-z-]+)}`)
	known := other(nil).facts()
	for name := range safe {
		if known[name] == "" {
			known[name] = "VALUE"
		}
	}
	known["sudo"], known["bwrap"], known["open"] = "sudo ", "'/opt/a b/bwrap'", "'/run/a b'"
	commands := 0
	for _, r := range remedies {
		for _, fix := range []string{r.fix, r.in.docker, r.in.podman, r.in.kubernetes, r.in.lxc, r.in.unknown} {
			for _, m := range holder.FindAllStringSubmatch(fix, -1) {
				check.That(t, safe[m[1]], "%q: %s is part of the remedy %q", r.seen, m[0], fix)
			}
			for line := range strings.SplitSeq(fill(fix, known), "\n") {
				m := command.FindStringSubmatch(line)
				if m == nil {
					continue
				}
				commands++
				check.That(t, !prose.MatchString(quoted.ReplaceAllString(m[1], "")), "%q: there is more than a command in %q", r.seen, m[1])
				out, err := exec.Command("sh", "-nc", m[1]).CombinedOutput()
				check.That(t, err == nil, "%q: %q: %v: %s", r.seen, m[1], err, out)
			}
		}
	}
	check.That(t, commands >= 20, "only %d commands found", commands)
}

// The remedy for a state directory that others can enter is a working chmod command. The remedy for an unusable
// directory has no chmod.
func TestStateDirRemedy(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "a $b 'c'")
	check.Must(t, os.Mkdir(dir, 0o755))
	fix := func(dir string) string {
		t.Setenv("SBXRUN_STATE_DIR", dir)
		_, err := checkStateDir()
		e := newExam(t.Context(), caller())
		return e.finding("", err).Fix
	}
	_, line, ok := strings.Cut(strings.Split(fix(dir), "\n")[0], ": ")
	check.Require(t, ok, "%q", fix(dir))
	out, err := exec.Command("sh", "-c", line).CombinedOutput()
	check.That(t, err == nil, "%s: %v: %s", line, err, out)
	_, err = checkStateDir()
	check.That(t, err == nil, "after %s: %v", line, err)
	file := filepath.Join(top, "file")
	check.Must(t, os.WriteFile(file, nil, 0o600))
	check.Must(t, os.Mkdir(filepath.Join(top, "closed"), 0o500))
	for _, bad := range []string{file, filepath.Join(file, "x"), filepath.Join(top, "closed/x")} {
		got := fix(bad)
		check.That(t, !strings.Contains(got, "chmod") && (os.Geteuid() == 0 || strings.HasPrefix(got, "set SBXRUN_STATE_DIR")), "%s: %q", bad, got)
	}
	// A message is not used as a path either.
	seen := failure{step: stepStateDir, errno: unix.EACCES, text: "/run/sbxrun cannot be created: /run: permission denied"}
	_, got, _ := explain(seen, other(nil))
	check.That(t, got == "set SBXRUN_STATE_DIR to a directory of your own", "%q", got)
}
