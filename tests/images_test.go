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
func treeTar(t *testing.T, dir string) []byte {
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
func ociLayout(t *testing.T, dir, arch string, config map[string]any, layers ...[]byte) string {
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
func imageOf(t *testing.T, s *harness.State, name string) (digest, dir string) {
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

// A command runs in an image, which is named in any way, with the image's configuration.
func TestImageRun(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	digest, dir := imageOf(t, s, "app:1")
	archive := filepath.Dir(dir) + "/app.tar"
	r := s.Run("image", "export", "app:1", archive)
	check.Require(t, r.ExitCode == 0, "export: %s", r.Stderr)
	for name, tt := range map[string]struct {
		image string
		args  []string
		want  string
	}{
		"name":          {"app:1", []string{"ls", "/srv"}, "data\n"},
		"digest":        {digest, []string{"ls", "/srv"}, "data\n"},
		"pinned name":   {"app@" + digest, []string{"ls", "/srv"}, "data\n"},
		"prefix":        {digest[len("sha256:"):][:12], []string{"ls", "/srv"}, "data\n"},
		"layout":        {"oci:" + dir, []string{"ls", "/srv"}, "data\n"},
		"tag":           {"oci:" + dir + ":v1", []string{"ls", "/srv"}, "data\n"},
		"archive":       {"oci-archive:" + archive, []string{"ls", "/srv"}, "data\n"},
		"deleted":       {"app:1", []string{"sh", "-c", "ls /etc/os-release 2>/dev/null; ls /dev/zero"}, "/dev/zero\n"},
		"read-only":     {"app:1", []string{"sh", "-c", "{ echo x >/srv/x || rm /srv/data; } 2>/dev/null; echo $?"}, "1\n"},
		"variables":     {"app:1", []string{"sh", "-c", "echo $PATH $APP $HOME $LANG"}, "/opt/bin 1 /home/sandbox C.UTF-8\n"},
		"precedence":    {"app:1", []string{"--env", "APP=2", "--env", "PATH=/bin", "sh", "-c", "echo $PATH $APP"}, "/bin 2\n"},
		"user":          {"app:1", []string{"sh", "-c", "id -u; id -g"}, "1234\n77\n"},
		"chosen user":   {"app:1", []string{"--user", "0:0", "id", "-u"}, "0\n"},
		"workdir":       {"app:1", []string{"sh", "-c", "pwd"}, "/srv\n"},
		"given workdir": {"app:1", []string{"--workdir", "/opt", "sh", "-c", "pwd"}, "/opt\n"},
		"no command":    {"app:1", nil, "script default\n"},
		"writable":      {"app:1", []string{"--overlay", "/", "sh", "-c", "echo x >/srv/x && rm /srv/data && ls /srv"}, "x\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"--cwd", "none", "--image", tt.image}, tt.args...)
			if name == "writable" {
				args = append(layer(t), args...)
			}
			r := s.Start(harness.Options{}, args...).Wait()
			got := string(r.Stdout)
			check.That(t, r.ExitCode == 0 && got == tt.want, "exit code %d, printed %q, want %q; %s", r.ExitCode, got, tt.want, r.Stderr)
		})
	}
	t.Run("report", func(t *testing.T) {
		t.Parallel()
		r := s.Run("--json", "--cwd", "none", "--image", "app:1", "id")
		var got struct {
			Image struct{ Name, Digest, Platform string }
		}
		check.Must(t, stdjson.Unmarshal(r.Stdout, &got))
		i := got.Image
		check.That(t, i.Name == "app:1" && i.Digest == digest && i.Platform == "linux/"+runtime.GOARCH, "%s", r.Stdout)
	})
}

// The errors for images name the cause.
func TestImageErrors(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	_, dir := imageOf(t, s, "app:1")
	foreign, broken, large := harness.SharedDir(t), harness.SharedDir(t), harness.SharedDir(t)
	ociLayout(t, foreign, "s390x", nil)
	ociLayout(t, broken, runtime.GOARCH, nil, []byte("no tar"))
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check.Must(t, w.WriteHeader(&tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5 << 20}))
	_, err := w.Write(make([]byte, 5<<20))
	check.Must(t, errors.Join(err, w.Close()))
	accounts := ociLayout(t, large, runtime.GOARCH, nil, b.Bytes())
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"missing":          {[]string{"--image", "none"}, `no image named "none"; pull it: sbxrun image pull none`},
		"missing digest":   {[]string{"--image", "app@" + digestOf(nil)}, "no image named"},
		"only a digest":    {[]string{"--image", digestOf(nil)}, `"; list images: sbxrun image ls`},
		"invalid name":     {[]string{"--image", "../../etc"}, "invalid image name"},
		"with a root":      {[]string{"--image", "app:1", "--rootfs", "/srv"}, "exclude each other"},
		"with tools":       {[]string{"--image", "app:1", "--tools"}, "leave it out with --image"},
		"print":            {[]string{"--image", "app:1", "--print-command"}, "no bwrap command does the same"},
		"platform":         {[]string{"--image", "oci:" + foreign}, "but this machine is linux/" + runtime.GOARCH},
		"broken":           {[]string{"--image", "oci:" + broken}, "not a tar"},
		"large accounts":   {[]string{"--image", "oci:" + large}, "error: image " + accounts[:len("sha256:")+12] + ": /etc/passwd: larger than 4 MiB"},
		"no such tag":      {[]string{"--image", "oci:" + dir + ":v2"}, `no image with the tag "v2"; add one of its tags after a colon: "v1"`},
		"no layout":        {[]string{"--image", "oci:" + filepath.Dir(dir)}, "not in OCI layout"},
		"no such path":     {[]string{"--image", "oci:/none"}, "no such file"},
		"snapshot's image": {[]string{"--image", "app:1", "--from", "none"}, "no snapshot named"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.Run(append(append([]string{"--cwd", "none"}, tt.args...), "true")...).Exits(t, 125).ErrHas(t, tt.want)
		})
	}
}

// A sandbox with a writable image can be changed, copied from and to, kept as a snapshot, and committed; the result can be
// exported and imported elsewhere. The image itself stays as it is, and cannot be removed in the meantime.
func TestImageWritable(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	digest, _ := imageOf(t, s, "app:1")
	b := s.Sandbox(harness.Options{}, layer(t, "--name", "box", "--cwd", "none", "--image", "app:1", "--overlay", "/")...)
	execOut(t, b, "echo x >/srv/new && rm /srv/data && mkdir /made && mv /opt/bin/env /opt/bin/env2")
	check.Equal(t, execOut(t, b, "pwd; echo $APP"), "/srv\n1\n", "an exec has")
	file := harness.SharedDir(t) + "/file"
	check.Must(t, os.WriteFile(file, []byte("copied\n"), 0o644))
	for _, args := range [][]string{{"cp", file, "box:/srv/copied"}, {"cp", "box:/srv/new", file + "2"}, {"snapshot", "create", "box", "--name", "snap"}, {"image", "commit", "box", "app:2"}} {
		r := s.Run(args...)
		check.Require(t, r.ExitCode == 0, "%q: %s", args, r.Stderr)
	}
	check.Equal(t, readFile(t, file+"2"), "x\n", "copied")
	s.Run("diff", "box").Out(t, "A made/\nD opt/bin/env\nA opt/bin/env2 (executable)\nA srv/copied\nD srv/data\nA srv/new\n")
	s.Run("image", "rm", "app:1").Exits(t, 76).ErrHas(t, `image "app:1" is in use`)
	r := s.Run("cleanup", "-n")
	check.That(t, !strings.Contains(string(r.Stdout), digest[7:]), "cleanup would remove the image: %s", r.Stdout)
	archive := file + ".tar"
	r = s.Run("image", "export", "app:2", archive)
	check.Require(t, r.ExitCode == 0, "export: %s", r.Stderr)
	other := harness.NewState(t)
	r = other.Run("image", "import", archive, "--name", "there")
	check.Require(t, r.ExitCode == 0, "import: %s", r.Stderr)
	const script = "cat /srv/copied /srv/new; ls /srv /opt/bin/env /made 2>/dev/null; pwd"
	const want = "copied\nx\n/made:\n\n/srv:\ncopied\nnew\n/srv\n"
	for name, r := range map[string]*harness.Result{
		"snapshot":  s.Run(layer(t, "--cwd", "none", "--from", "snap", "sh", "-c", script)...),
		"committed": s.Run("--cwd", "none", "--image", "app:2", "sh", "-c", script),
		"imported":  other.Run("--cwd", "none", "--image", "there", "sh", "-c", script),
	} {
		got := string(r.Stdout)
		check.That(t, r.ExitCode == 0 && got == want, "%s: exit code %d, %q; %s", name, r.ExitCode, got, r.Stderr)
	}
	s.Run(layer(t, "--from", "snap", "--image", "app:2", "true")...).Exits(t, 125).ErrHas(t, "was taken over image "+digest)
	s.Run("--cwd", "none", "--image", "app:1", "sh", "-c", "ls /srv /opt/bin/env").Out(t, "/opt/bin/env\n\n/srv:\ndata\n")
}
