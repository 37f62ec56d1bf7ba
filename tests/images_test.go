package tests

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	stdjson "encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// treeTar returns a tar of a directory, as other tools make it: with owners, and a device.
func treeTar(t harness.T, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check.Must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		target := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			target, _ = os.Readlink(path)
		}
		h, err := tar.FileInfoHeader(info, target)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		h.Name, h.Uid, h.Gid = "./"+rel, 0, 0
		if info.IsDir() {
			h.Name += "/"
		}
		if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if err == nil {
			_, err = w.Write(data)
		}
		return err
	}))
	check.Must(t, errors.Join(w.WriteHeader(&tar.Header{Name: "./dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}), w.Close()))
	return b.Bytes()
}

// ociLayout writes an image with one tag in OCI layout, and returns the digest of its manifest.
func ociLayout(t harness.T, dir, arch string, config map[string]any, layers ...[]byte) string {
	t.Helper()
	check.Must(t, os.MkdirAll(dir+"/blobs/sha256", 0o755))
	blob := func(kind string, data []byte) map[string]any {
		digest := digestOf(data)
		check.Must(t, os.WriteFile(dir+"/blobs/sha256/"+strings.TrimPrefix(digest, "sha256:"), data, 0o644))
		return map[string]any{"mediaType": "application/vnd.oci.image." + kind, "digest": digest, "size": len(data)}
	}
	encode := func(v any) []byte {
		b, err := stdjson.Marshal(v)
		check.Must(t, err)
		return b
	}
	var list, diffs []any
	for _, text := range layers {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, err := z.Write(text)
		check.Must(t, errors.Join(err, z.Close()))
		list, diffs = append(list, blob("layer.v1.tar+gzip", b.Bytes())), append(diffs, digestOf(text))
	}
	c := blob("config.v1+json", encode(map[string]any{"os": "linux", "architecture": arch, "config": config, "rootfs": map[string]any{"type": "layers", "diff_ids": diffs}}))
	m := blob("manifest.v1+json", encode(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": c, "layers": list}))
	m["annotations"] = map[string]any{"org.opencontainers.image.ref.name": "v1"}
	check.Must(t, os.WriteFile(dir+"/oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	check.Must(t, os.WriteFile(dir+"/index.json", encode(map[string]any{"schemaVersion": 2, "manifests": []any{m}}), 0o644))
	return m["digest"].(string)
}

// imageConfig is the configuration of most images of the tests.
var imageConfig = map[string]any{"Env": []string{"PATH=/opt/bin", "APP=1", "HOME=/root", "LANG=C.UTF-8"}, "Entrypoint": []string{"/opt/bin/script"}, "Cmd": []string{"default"}, "WorkingDir": "/srv", "User": "1234:77"}

// imageOf imports an image of the host's programs with a second layer, and returns its digest and its layout.
func imageOf(t harness.T, s *harness.State, name string) (digest, dir string) {
	t.Helper()
	dir = harness.SharedDir(t)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range []string{"etc/.wh.os-release", "srv/data"} {
		check.Must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}))
	}
	check.Must(t, w.Close())
	digest = ociLayout(t, dir+"/oci", runtime.GOARCH, imageConfig, treeTar(t, rootTree(t)), b.Bytes())
	if name != "" {
		r := s.Run("image", "import", "oci:"+dir+"/oci", "--name", name)
		got := strings.TrimSpace(string(r.Stdout))
		check.Require(t, r.ExitCode == 0 && got == digest, "import: exit code %d, %q, want %s: %s", r.ExitCode, got, digest, r.Stderr)
	}
	return digest, dir + "/oci"
}

// The error for an image that cannot be used names the cause.
func TestImageErrors(t *testing.T) {
	t.Parallel()
	foreign, broken, large := harness.SharedDir(t), harness.SharedDir(t), harness.SharedDir(t)
	ociLayout(t, foreign, "s390x", nil)
	ociLayout(t, broken, runtime.GOARCH, nil, []byte("no tar"))
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check.Must(t, w.WriteHeader(&tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5 << 20}))
	_, err := w.Write(make([]byte, 5<<20))
	check.Must(t, errors.Join(err, w.Close()))
	accounts := ociLayout(t, large, runtime.GOARCH, nil, b.Bytes())
	s := harness.NewState(t)
	for dir, want := range map[string]string{
		foreign: "but this machine is linux/" + runtime.GOARCH, broken: "not a tar",
		large: "error: image " + accounts[:len("sha256:")+12] + ": /etc/passwd: larger than 4 MiB",
	} {
		s.Run("--cwd", "none", "--image", "oci:"+dir, "true").Exits(t, 125).ErrHas(t, want)
	}
}

// An image goes through its whole life on a tmpfs and on an overlayfs. For an operation that a file system does not
// support, the error is one line with a remedy.
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
