//go:build imagetools

package tests

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// These tests need umoci, skopeo, buildah and podman; internal/setup/images.sh downloads them and runs the tests.

// tool runs one of the programs and returns its output.
func tool(t *testing.T, words ...string) string {
	t.Helper()
	out, err := harness.Command(t, exec.Command(words[0], words[1:]...), harness.Bound)
	check.Require(t, err == nil, "%q: %v: %s", words, err, out)
	return strings.TrimSpace(out)
}

// generated returns the layers of a random image: files, links of both kinds, devices, deletions, repeated entries, and
// directories that are not listed, over a few names, so that layers replace and delete what lower ones have.
func generated(t *testing.T, seed uint64) (layers [][]byte) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	words := []string{"a", "b", "c", "lib", "new\nline", "bad\xff", "ü", strings.Repeat("long", 40)}
	name := func() string {
		n := words[rng.IntN(len(words))]
		for range rng.IntN(4) {
			n += "/" + words[rng.IntN(len(words))]
		}
		return n
	}
	kinds := map[string]byte{} // of the tree so far
	for range 1 + rng.IntN(5) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		here := map[string]bool{} // names of this layer, which tools disagree about if they are also deleted
		for range 10 + rng.IntN(30) {
			n := name()
			h := &tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: int64(rng.IntN(0o10000)), ModTime: time.Unix(1e9+rng.Int64N(1e8), 0), Uid: rng.IntN(2), Format: tar.FormatPAX}
			if os.Getuid() != 0 {
				h.Mode |= 0o700 // otherwise umoci fails
			}
			below := slices.ContainsFunc(slices.Collect(maps.Keys(kinds)), func(other string) bool { return strings.HasPrefix(other, n+"/") })
			blocked := here["!"+n]
			for dir := path.Dir(n); dir != "."; dir = path.Dir(dir) {
				blocked = blocked || here["!"+dir] || kinds[dir] != 0 && kinds[dir] != tar.TypeDir
			}
			switch kind := rng.IntN(10); {
			case blocked:
				continue
			case kind < 3:
				h.Typeflag, h.Name = tar.TypeDir, []string{"./", "", "/"}[rng.IntN(3)]+n+"/"
			case below: // nothing that replaces a directory
				continue
			case kind < 4:
				h.Typeflag, h.Linkname = tar.TypeSymlink, []string{"/", "", "../", "../../../"}[rng.IntN(4)]+name()
			case kind < 5:
				files := slices.Sorted(maps.Keys(kinds))
				files = slices.DeleteFunc(files, func(f string) bool { return kinds[f] != tar.TypeReg || here["!"+f] || f == n })
				if len(files) == 0 {
					continue
				}
				h.Typeflag, h.Linkname = tar.TypeLink, files[rng.IntN(len(files))]
			case kind < 6 && !here[n]:
				if kinds[n] == 0 {
					continue
				}
				if kinds[n] == tar.TypeDir { // hide its contents only
					here[n] = true
					for other := range kinds {
						if strings.HasPrefix(other, n+"/") {
							delete(kinds, other)
							here["!"+other] = true
						}
					}
					check.Must(t, w.WriteHeader(&tar.Header{Name: n + "/.wh..wh..opq", Typeflag: tar.TypeReg, Mode: 0o600}))
					continue
				}
				delete(kinds, n)
				here["!"+n] = true
				check.Must(t, w.WriteHeader(&tar.Header{Name: path.Dir(n) + "/.wh." + path.Base(n), Typeflag: tar.TypeReg, Mode: 0o600}))
				continue
			case kind < 7:
				h.Typeflag = []byte{tar.TypeChar, tar.TypeBlock, tar.TypeFifo}[rng.IntN(3)]
				h.Name, h.Devmajor, h.Devminor = "dev/"+words[rng.IntN(3)], 1, 3
				check.Must(t, w.WriteHeader(h))
				continue
			default:
				h.Size = rng.Int64N(3000)
			}
			for dir := path.Dir(n); dir != "."; dir = path.Dir(dir) {
				kinds[dir], here[dir] = tar.TypeDir, true
			}
			kinds[n], here[n] = h.Typeflag, true
			if h.Typeflag == tar.TypeLink {
				kinds[n] = tar.TypeReg
			}
			check.Must(t, w.WriteHeader(h))
			body := make([]byte, h.Size)
			for i := range body {
				body[i] = byte(rng.Uint32())
			}
			_, err := w.Write(body)
			check.Must(t, err)
		}
		check.Must(t, w.Close())
		layers = append(layers, b.Bytes())
	}
	return layers
}

// unpacked describes the files of a tree, one per name. Devices and pipes, which sbxrun does not unpack, are left out, and
// so is the directory dev, where unprivileged umoci has files instead. Owners can read all files and search all
// directories; special bits have no effect.
func unpacked(t *testing.T, root string, since time.Time) map[string]string {
	t.Helper()
	all, names := map[string]string{}, map[uint64][]string{}
	check.Must(t, filepath.WalkDir(root, func(at string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err != nil || at == root {
			return err
		}
		name := strings.TrimPrefix(at, root+"/")
		if name == "dev" {
			return fs.SkipDir
		}
		if err := unix.Lstat(at, &st); err != nil {
			return err
		}
		mode, text := st.Mode&0o777, ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			mode |= 0o700
		case unix.S_IFLNK:
			if text, err = os.Readlink(at); err != nil {
				return err
			}
		case unix.S_IFREG:
			mode |= 0o400
			data, err := os.ReadFile(at)
			if err != nil {
				return err
			}
			text = fmt.Sprintf("%d bytes %x", len(data), sha256.Sum256(data))
			names[st.Ino] = append(names[st.Ino], name)
		default:
			return nil
		}
		when := fmt.Sprint(st.Mtim.Sec)
		if st.Mode&unix.S_IFMT == unix.S_IFDIR && (st.Mtim.Sec == 0 || st.Mtim.Sec >= since.Unix()) {
			when = "unlisted"
		}
		all[name] = fmt.Sprintf("%o %s %s", st.Mode&unix.S_IFMT|mode, text, when)
		return nil
	}))
	for _, linked := range names {
		for _, name := range linked[1:] {
			all[name] += fmt.Sprintf(" and is linked with %q", linked[0])
		}
	}
	return all
}

// treeOfImage returns the path of an image's tree, which a run or an import has unpacked.
func treeOfImage(t *testing.T, s *harness.State, digest string) string {
	t.Helper()
	trees, err := filepath.Glob(s.Dir + "-data/snapshots/trees/image-" + strings.TrimPrefix(digest, "sha256:") + "-*/root")
	check.Require(t, err == nil && len(trees) == 1, "the trees of %s are %q, %v", digest, trees, err)
	return trees[0]
}

// debianLayers returns the contents of Debian packages, which are tars, and the digest of their programs' image.
func debianLayers(t *testing.T) (layers [][]byte) {
	t.Helper()
	packages, err := filepath.Glob(os.Getenv("SBXRUN_IMAGE_PACKAGES") + "/*.deb")
	check.Must(t, err)
	for _, name := range packages {
		data, err := exec.Command("dpkg-deb", "--fsys-tarfile", name).Output()
		check.Must(t, err)
		layers = append(layers, data)
	}
	return layers
}

// An image unpacks to the same tree as with umoci unpack, file by file.
func TestImageToolsUmoci(t *testing.T) {
	s := harness.NewState(t)
	rootless := []string{}
	if os.Getuid() != 0 {
		rootless = []string{"--rootless"}
	}
	images := map[string][][]byte{"Debian": debianLayers(t), "programs": {treeTar(t, rootTree(t))}}
	for seed := range uint64(40) {
		images[fmt.Sprint("generated ", seed)] = generated(t, seed)
	}
	for name, layers := range images {
		t.Run(name, func(t *testing.T) {
			dir := harness.SharedDir(t)
			begin := time.Now()
			digest := ociLayout(t, dir+"/oci", runtime.GOARCH, nil, layers...)
			tool(t, slices.Concat([]string{"umoci", "unpack", "--image", dir + "/oci:v1"}, rootless, []string{dir + "/bundle"})...)
			r := s.Run("image", "import", "oci:"+dir+"/oci")
			check.Require(t, r.ExitCode == 0, "import: %s", r.Stderr)
			want, got := unpacked(t, dir+"/bundle/rootfs", begin), unpacked(t, treeOfImage(t, s, digest), begin)
			for _, name := range slices.Sorted(maps.Keys(want)) {
				if theirs, ours := want[name], got[name]; ours != theirs && !(strings.HasSuffix(theirs, " unlisted") && strings.HasPrefix(ours, strings.TrimSuffix(theirs, "unlisted"))) {
					t.Errorf("%q is\n%q, with umoci\n%q", name, ours, theirs)
				}
			}
			for name := range got {
				check.That(t, want[name] != "", "%q is %q, with umoci missing", name, got[name])
			}
			check.That(t, len(want) >= 5, "only %d files", len(want))
		})
	}
}

// Layouts and archives that umoci, skopeo, buildah and podman write are images, and so are those that sbxrun writes for them.
func TestImageToolsLayouts(t *testing.T) {
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	conf := at("storage.conf")
	check.Must(t, os.MkdirAll(at(".config/containers"), 0o755))
	check.Must(t, os.WriteFile(at(".config/containers/policy.json"), []byte(`{"default": [{"type": "insecureAcceptAnything"}]}`), 0o644))
	check.Must(t, os.WriteFile(conf, fmt.Appendf(nil, "[storage]\ndriver = \"vfs\"\nrunroot = %q\ngraphroot = %q\n", at("run"), at("graph")), 0o644))
	t.Setenv("CONTAINERS_STORAGE_CONF", conf)
	t.Setenv("HOME", dir)
	t.Setenv("XDG_RUNTIME_DIR", at("xdg"))
	check.Must(t, errors.Join(os.Mkdir(at("xdg"), 0o700), os.WriteFile(at("file"), []byte("data\n"), 0o644)))
	ociLayout(t, at("ours"), runtime.GOARCH, imageConfig, treeTar(t, rootTree(t)))

	refs := map[string]string{} // what reads the file as expected, by what wrote it
	tool(t, "umoci", "insert", "--rootless", "--image", at("ours")+":v1", "--tag", "umoci", at("file"), "/srv/data")
	refs["umoci"] = "oci:" + at("ours") + ":umoci"
	copied := func(name, from, to string, flags ...string) {
		tool(t, slices.Concat([]string{"skopeo", "copy"}, flags, []string{from, to})...)
		refs["skopeo, "+name] = to
	}
	copied("oci", refs["umoci"], "oci:"+at("skopeo")+":v1")
	copied("zstd", refs["umoci"], "oci:"+at("zstd")+":v1", "--dest-compress-format", "zstd")
	copied("oci-archive", refs["umoci"], "oci-archive:"+at("skopeo.oci")+":v1")
	copied("docker-archive", refs["umoci"], "docker-archive:"+at("skopeo.tar")+":app:1")
	if os.Getuid() == 0 { // ordinary users need subuids
		buildah := func(args ...string) string { return tool(t, append([]string{"buildah"}, args...)...) }
		buildah("from", "--name", "box", "oci:"+at("ours")+":v1")
		buildah("copy", "box", at("file"), "/srv/data")
		for _, ref := range []string{"oci:" + at("buildah") + ":v1", "oci-archive:" + at("buildah.oci") + ":v1", "docker-archive:" + at("buildah.tar") + ":app:1"} {
			buildah("commit", "box", ref)
			refs["buildah, "+ref[:strings.IndexByte(ref, ':')]] = ref
		}
		tool(t, "podman", "load", "--input", at("skopeo.tar"))
		for _, format := range []string{"oci-dir", "oci-archive", "docker-archive"} {
			tool(t, "podman", "save", "--format", format, "--output", at("podman-"+format), "app:1")
			refs["podman, "+format] = strings.Replace(format, "oci-dir", "oci", 1) + ":" + at("podman-"+format)
		}
		tool(t, "podman", "save", "--multi-image-archive", "--output", at("podman-multi"), "app:1")
		refs["podman, several"] = "docker-archive:" + at("podman-multi") + ":app:1"
	}
	for name, ref := range refs {
		t.Run(name, func(t *testing.T) {
			r := s.Run("--cwd", "none", "--image", ref, "sh", "-c", "cat /srv/data; pwd; echo $APP; id -u; ls /etc/os-release")
			got := string(r.Stdout)
			check.That(t, r.ExitCode == 0 && got == "data\n/srv\n1\n1234\n/etc/os-release\n", "exit code %d, %q; %s", r.ExitCode, got, r.Stderr)
		})
	}

	// In a store of its own: an export has the layer as it is in the store, which may be another program's with the same
	// contents.
	s = harness.NewState(t)
	s.Run("image", "import", refs["umoci"], "--name", "app:2").Exits(t, 0)
	s.Run("image", "export", "app:2", at("exported")).Exits(t, 0)
	if os.Getuid() == 0 {
		copied("exported", "oci-archive:"+at("exported"), "oci:"+at("again")+":v1")
		s.Run("image", "import", "oci:"+at("again"), "--name", "app:3").Exits(t, 0)
		check.Equal(t, imageNamed(t, s, "app:3"), imageNamed(t, s, "app:2"), "the exported image")
		out := tool(t, "podman", "load", "--input", at("exported"))
		check.That(t, strings.Contains(out, "Loaded image"), "podman load printed %s", out)
	}
}

// Packages can be installed into a writable image of Debian; the result is committed, exported, and imported elsewhere.
func TestImageToolsApt(t *testing.T) {
	archive := os.Getenv("SBXRUN_IMAGE_DEBIAN")
	if archive == "" {
		return // only root can run debootstrap
	}
	s, other := harness.NewState(t), harness.NewState(t)
	layer := harness.ReadFile(t, archive)
	dir := harness.SharedDir(t)
	ociLayout(t, dir+"/oci", runtime.GOARCH, nil, layer)
	run := func(s *harness.State, args ...string) string {
		t.Helper()
		r := s.Run(args...)
		check.Require(t, r.ExitCode == 0, "%q: exit code %d: %s%s", args, r.ExitCode, r.Stdout, r.Stderr)
		return string(r.Stdout)
	}
	run(s, "image", "import", "oci:"+dir+"/oci", "--name", "debian:1")
	b := s.Sandbox(harness.Options{}, "--name", "build", "--image", "debian:1", "--overlay", "/", "--tmp-size", "2G", "--user", "0:0", "--net", "host", "--cwd", "none")
	execOut(t, b, `echo 'APT::Sandbox::User "root";' >/etc/apt/apt.conf.d/99sandbox
apt-get update && apt-get install -y --no-install-recommends sqlite3`)
	run(s, "image", "commit", "build", "debian:2")
	run(s, "image", "export", "debian:2", dir+"/debian.tar")
	run(other, "image", "import", dir+"/debian.tar", "--name", "there")
	got := run(other, "--image", "there", "--cwd", "none", "sqlite3", ":memory:", "select 6 * 7")
	check.That(t, got == "42\n", "sqlite3 printed %q", got)
}
