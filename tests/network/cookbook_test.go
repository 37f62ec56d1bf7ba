package network

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The cookbook's clone works as printed. The lab's certificate authority is in a copy of the host's store.
func TestClone(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("git"); err != nil {
		harness.Skip(t, "git is missing")
	}
	const line = "sbxrun -w --net host git clone https://example.org/x.git"
	check.That(t, strings.Contains(string(harness.ReadFile(t, "../../docs/guides/cookbook.md")), "\n"+line+"\n"), "not in the cookbook: %s", line)
	dir := harness.SharedDir(t)
	const script = `cp -a /etc/ssl/certs "$DIR/certs"; chmod u+w "$DIR/certs"; cat "$CA" >>"$DIR/certs/ca-certificates.crt"
mount --bind "$DIR/certs" /etc/ssl/certs; mkdir "$DIR/work"; cd "$DIR/work"; `
	command := []string{"unshare", "--mount", "--propagation", "private", "sh", "-e", "-c", script + line}
	if !harness.Root() {
		command = []string{"unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "--propagation", "private",
			"sh", "-e", "-c", script + "setpriv --ambient-caps=-all --inh-caps=-all " + line}
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "DIR="+dir, "CA="+shared("ca.pem"), "PATH="+filepath.Dir(harness.Binary(t))+":"+harness.Path, "SBXRUN_STATE_DIR="+dir+"/state")
	out, err := harness.Command(t, cmd, harness.Bound)
	check.Require(t, err == nil, "%v: %s", err, out)
	commits, err := exec.Command("git", "-c", "safe.directory=*", "-C", dir+"/work/x", "log", "--format=%s").CombinedOutput()
	check.That(t, err == nil && string(commits) == "hello from the lab\n", "%v: %s", err, commits)
}
