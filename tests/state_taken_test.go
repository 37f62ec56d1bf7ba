package tests

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// Another user cannot disable commands by taking the name of the state directory in /tmp. Without
// another place for it, --apply fails before the command runs.
func TestTakenStateDirectory(t *testing.T) {
	t.Parallel()
	// The binaries may be below /tmp, so they are shown at /mnt.
	const script = `set -e
mount --bind "$1" /mnt; mount -t tmpfs -o mode=1777 tmpfs /tmp; mkdir -m 755 /tmp/home /tmp/home/work
uid=$(id -u); [ $uid != 0 ] || { uid=61000; chown -R 61000:61000 /tmp/home; }
case $2 in
directory) mkdir -m 700 /tmp/sbxrun-$uid ;;
link) mkdir -m 700 /tmp/other; ln -s other /tmp/sbxrun-$uid ;;
file) : >/tmp/sbxrun-$uid ;;
open) mkdir -m 777 /tmp/sbxrun-$uid; chown $uid /tmp/sbxrun-$uid; chmod 777 /tmp/sbxrun-$uid ;;
esac
cd /tmp/home/work
as() { home=$1; shift; set -- env -u SBXRUN_STATE_DIR -u XDG_RUNTIME_DIR HOME=$home /mnt/sbxrun "$@"
  [ $(id -u) = $uid ] || set -- setpriv --reuid $uid --regid $uid --clear-groups "$@"
  setpriv --ambient-caps=-all --inh-caps=-all "$@"; }
as /tmp/home --max-parallel 1 true; echo max-parallel
as /tmp/home ps >/dev/null; echo ps
as /tmp/home --cwd overlay --apply sh -c 'echo applied >a'; cat a
[ "$3" = alone ] || { as /tmp/home start --name box >/dev/null; as /tmp/home ps | grep -q box; as /tmp/home exec box true; as /tmp/home kill box >/dev/null; echo start; }
rc=0; as /nonexistent --cwd overlay --apply sh -c 'echo ran >&2' 2>/tmp/err || rc=$?
echo $rc; grep -c ran /tmp/err || true; grep -c "sbxrun: error: .*state directory" /tmp/err
ls -A /tmp/sbxrun-$uid/ /tmp/other 2>/dev/null | grep -v : || true
`
	kinds := []string{"link", "file", "open"}
	wrap, alone := []string{"unshare", "--mount", "--user", "--map-current-user", "--keep-caps"}, "alone"
	want := "max-parallel\nps\napplied\n"
	if harness.Root() {
		// Only root can give a directory to another user, and see the supervisor end with a PID
		// namespace.
		kinds = append(kinds, "directory")
		wrap, alone = []string{"unshare", "--mount", "--pid", "--fork", "--mount-proc"}, ""
		want += "start\n"
	}
	want += "125\n0\n1\n"
	for _, kind := range kinds {
		args := append(wrap[1:len(wrap):len(wrap)], "bash", "-c", script, "bash", filepath.Dir(harness.Binary(t)), kind, alone)
		out, err := exec.Command(wrap[0], args...).CombinedOutput()
		if got := strings.TrimRight(string(out), "\n") + "\n"; err != nil || got != want {
			t.Errorf("%s: %v\n%s", kind, err, got)
		}
	}
}
