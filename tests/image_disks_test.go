package tests

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// An image goes through its whole life on a tmpfs and on an overlayfs. What a file system cannot do is one line with a
// remedy.
func TestImageDisks(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	_, layout := imageOf(t, s, "")
	const life = `export SBXRUN_STATE_DIR=$disk/state SBXRUN_DATA_DIR=$disk/data
sbxrun=$1 layout=$2
shift 2
step() {
	printf '%s: ' "$1"
	shift
	"$sbxrun" "$@" >"$disk/out" 2>&1
	echo $? $(cat "$disk/out")
}
step import image import "oci:$layout" --name app
step run --cwd none --image app cat /etc/group
step root --cwd none --image app --user 0:0 id -u
step memory --cwd none --image app --overlay / sh -c 'echo x >/new; ls /new'
step overlay --cwd none --image app ${1+--upper "$1/overlay"} --overlay / sh -c 'echo x >/new; rm /srv/data; ls /new /srv'
step upper --cwd none --image app --overlay / --upper "$disk/upper" sh -c 'echo x >/new; ls /new'
step start start --name box --timeout 10m --cwd none --image app ${1+--upper "$1/box"} --overlay /
step exec exec box sh -c 'echo x >/new; rm /srv/data'
step diff diff box
step snapshot snapshot create box --name snap
step commit image commit box app:2
step kill kill box
step from --cwd none ${1+--upper "$1/from"} --from snap sh -c 'ls /new /srv'
step committed --cwd none --image app:2 sh -c 'ls /new /srv'
step export image export app:2 "$disk/app.tar"
step again image import "$disk/app.tar" --name app:3
step archive --cwd none --image "oci-archive:$disk/app.tar" ls /srv
step remove image rm app app:2 app:3
step unsnap snapshot rm snap
step cleanup cleanup
echo left: $(ls "$disk/data/snapshots/trees" "$disk/data/snapshots/images" "$disk/data/snapshots/tmp" | grep -v ':$')
exit 0`
	mounts := map[string]string{
		"tmpfs":     `mount -t tmpfs tmpfs "$disk" || exit`,
		"overlayfs": `mkdir "$0/l" "$0/u" "$0/w" && mount -t overlay -o "userxattr,lowerdir=$0/l,upperdir=$0/u,workdir=$0/w" overlay "$disk" || exit`,
	}
	for disk, mount := range mounts {
		t.Run(disk, func(t *testing.T) {
			t.Parallel()
			dir := harness.SharedDir(t)
			check.Must(t, os.Mkdir(dir+"/disk", 0o755))
			// The sandboxes end with the PID namespace.
			wrap := []string{"unshare", "--mount", "--pid", "--fork", "--mount-proc"}
			script := "disk=$0/disk\n" + mount + "\n" + life
			if os.Geteuid() != 0 {
				// The privileges to mount are given up before sbxrun starts.
				wrap = []string{"unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "--pid", "--fork", "--mount-proc"}
				script = "disk=$0/disk\n" + mount + "\nexport disk\nexec setpriv --ambient-caps=-all --inh-caps=-all sh -c '" + strings.ReplaceAll(life, "'", `'\''`) + `' "$0" "$@"`
			}
			args := []string{layout}
			if !kernel(t, 6, 6) { // layers in memory need extended attributes
				args = append(args, harness.Dir(t))
			}
			r := harness.Start(t, harness.Options{Bare: true, Wrap: append(wrap, "sh", "-c", script, dir)}, args...).Wait().Exits(t, 0)
			got := string(r.Stdout)
			want := []string{
				"import: 0 sha256:.*", "run: 0 root:x:0: .*", "root: 0 0", "memory: 0 /new", "overlay: 0 /new /srv:", "upper: 0 /new",
				"start: 0.*", "exec: 0", "diff: 0 A new D srv/data", "snapshot: 0 .*", "commit: 0 sha256:.*", "kill: 0 .*proven.*",
				"from: 0 /new /srv:", "committed: 0 /new /srv:", "export: 0", "again: 0 sha256:.*", "archive: 0", "remove: 0", "unsnap: 0", "cleanup: 0.*", "left:",
			}
			var missing []string
			for _, w := range want {
				name, _, _ := strings.Cut(w, ":")
				switch {
				case name == "upper" && disk == "overlayfs":
					w = `upper: 125 sbxrun: error: --upper .*: its file system cannot have a layer \(overlay\); name a directory on another file system, such as ext4, XFS or tmpfs`
				case (name == "upper" || name == "memory") && !kernel(t, 6, 6):
					w = name + ": 125 sbxrun: error: cannot mount image sha256:.*: its layer needs extended attributes, which directories in memory have from Linux 6.6 on; --upper DIR keeps the layer on disk"
				case name == "from" && disk == "overlayfs":
					w = "from: 125 sbxrun: error: cannot unpack snapshot snap: the file system of the data directory cannot hold the layers of snapshots .*; set SBXRUN_DATA_DIR or --data-dir to a directory on another file system.*"
				}
				if !regexp.MustCompile(`(?m)^` + w + `$`).MatchString(got) {
					missing = append(missing, w)
				}
			}
			check.That(t, len(missing) == 0, "without %q:\n%s", missing, got)
		})
	}
}
