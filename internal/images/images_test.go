package images

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
)

func newStore(t testing.TB) *snapshots.Store {
	t.Helper()
	s, err := snapshots.Open(filepath.Join(t.TempDir(), "snapshots"))
	check.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// entry is an entry of a layer's tar; a name that ends with / is a directory.
type entry struct {
	name, link, body string
	kind             byte
	mode             int64
	pax              map[string]string
}

var when = time.Unix(1_600_000_000, 0)

func tarOf(t testing.TB, list ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range list {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, ModTime: when, PAXRecords: e.pax}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(e.body))
		}
		check.Must(t, w.WriteHeader(h))
		_, err := w.Write([]byte(e.body))
		check.Must(t, err)
	}
	check.Must(t, w.Close())
	return b.Bytes()
}

func compress(t testing.TB, kind string, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	switch kind {
	case "gzip":
		w = gzip.NewWriter(&b)
	case "zstd":
		z, err := zstd.NewWriter(&b)
		check.Must(t, err)
		w = z
	default:
		return data
	}
	_, err := w.Write(data)
	check.Must(t, err, w.Close())
	return b.Bytes()
}

// image is an image under construction.
type image struct {
	manifest Manifest
	config   []byte
	blobs    map[string][]byte
	tars     [][]byte
}

type imageOptions struct {
	compression string
	config      map[string]any
	platform    Platform
}

func newImage(t testing.TB, o imageOptions, tars ...[]byte) *image {
	t.Helper()
	im := &image{blobs: map[string][]byte{}, tars: tars}
	diffs := []string{}
	im.manifest = Manifest{SchemaVersion: 2, MediaType: MediaTypeManifest, Layers: []Descriptor{}}
	for _, text := range tars {
		blob := compress(t, o.compression, text)
		diffs = append(diffs, Digest(text))
		kind := MediaTypeLayer
		if o.compression != "" {
			kind += "+" + o.compression
		}
		im.manifest.Layers = append(im.manifest.Layers, im.add(kind, blob))
	}
	if o.platform == (Platform{}) {
		o.platform = Host()
	}
	c := map[string]any{"os": o.platform.OS, "architecture": o.platform.Architecture, "config": o.config, "rootfs": map[string]any{"type": "layers", "diff_ids": diffs}}
	im.config, _ = json.Marshal(c)
	d := im.add(MediaTypeConfig, im.config)
	im.manifest.Config = &d
	return im
}

func (im *image) add(kind string, data []byte) Descriptor {
	d := Descriptor{MediaType: kind, Digest: Digest(data), Size: int64(len(data))}
	im.blobs[d.Digest] = data
	return d
}

func (im *image) raw() []byte {
	b, _ := json.Marshal(im.manifest)
	return b
}

// layout writes an OCI layout with the images and their tags.
func writeLayout(t testing.TB, dir string, tags []string, images ...*image) {
	t.Helper()
	check.Must(t, os.MkdirAll(dir+"/blobs/sha256", 0o755), os.WriteFile(dir+"/oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	index := Manifest{SchemaVersion: 2, MediaType: MediaTypeIndex}
	for i, im := range images {
		d := im.add(MediaTypeManifest, im.raw())
		if tags[i] != "" {
			d.Annotations = map[string]string{refName: tags[i]}
		}
		index.Manifests = append(index.Manifests, d)
		for digest, data := range im.blobs {
			check.Must(t, os.WriteFile(dir+"/blobs/sha256/"+strings.TrimPrefix(digest, "sha256:"), data, 0o644))
		}
	}
	b, _ := json.Marshal(index)
	check.Must(t, os.WriteFile(dir+"/index.json", b, 0o644))
}

// listing describes the files of a directory, one per line, except devices and times.
func listing(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	check.Must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&all, "%q %o", rel, st.Mode)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&all, " %q", b)
		case unix.S_IFLNK:
			target, _ := os.Readlink(path)
			fmt.Fprintf(&all, " -> %q", target)
		}
		all.WriteByte('\n')
		return nil
	}))
	return all.String()
}

// treeOf returns the path of the tree of an image.
func treeOf(t testing.TB, s *snapshots.Store, m *snapshots.Image) string {
	t.Helper()
	u, err := s.Unpacked(snapshots.ImageKey(m.Digest, uint32(os.Getuid()), uint32(os.Getgid())))
	check.Must(t, err)
	t.Cleanup(func() { u.Close() })
	return u.Path
}

func importLayout(t testing.TB, s *snapshots.Store, im *image, o Options) (*snapshots.Image, error) {
	t.Helper()
	dir := t.TempDir()
	writeLayout(t, dir, []string{""}, im)
	src, err := Open(s, "oci:"+dir, 1<<30)
	check.Must(t, err)
	defer src.Close()
	return Import(t.Context(), s, src, o)
}

// The tree of an image is that of its layers, with deletions, replaced files, unlisted directories and links applied.
func TestImportTree(t *testing.T) {
	base := tarOf(t, entry{name: "./"}, entry{name: "./etc/"}, entry{name: "./etc/hostname", body: "base\n", mode: 0o644}, entry{name: "./etc/motd", body: "m"},
		entry{name: "usr/lib/", mode: 0o755}, entry{name: "usr/lib/a", body: "a"}, entry{name: "lib", link: "usr/lib", kind: tar.TypeSymlink},
		entry{name: "usr/share/doc/x/", mode: 0o700}, entry{name: "usr/share/doc/x/y", body: "y"}, entry{name: "/abs/olute", body: "abs"},
		entry{name: "etc/second", link: "./etc/motd", kind: tar.TypeLink}, entry{name: "dev/null", kind: tar.TypeChar}, entry{name: "run/pipe", kind: tar.TypeFifo},
		entry{name: "twice", body: "1"}, entry{name: "twice", body: "22"}, entry{name: "su", body: "s", mode: 0o4755}, entry{name: "closed/", mode: 0o1000}, entry{name: "closed/f", mode: 0o1000, body: "f"},
		entry{name: "new\nline", body: "n"}, entry{name: "bad\xff\xfe", body: "b"}, entry{name: "turned", body: "file"}, entry{name: "emptied/sub/deep", body: "d"})
	app := tarOf(t, entry{name: "opt/app/bin", body: "#!"}, entry{name: "etc/.wh.motd"}, entry{name: "usr/share/doc/.wh..wh..opq"}, entry{name: "usr/share/doc/"}, entry{name: "usr/share/doc/README", body: "r"},
		entry{name: "lib/b", body: "b"}, entry{name: "linked", link: "etc/hostname", kind: tar.TypeLink}, entry{name: "made/for/link", link: "usr/lib/a", kind: tar.TypeLink}, entry{name: "turned/"}, entry{name: "turned/inside", body: "i"},
		entry{name: "etc/.wh.second", link: "opt/app/bin", kind: tar.TypeLink}, entry{name: "lib/.wh.none"}, entry{name: "emptied", body: "a file now"}, entry{name: ".wh..wh.plnk/x", body: "aufs"})
	const want = `"abs" 40755
"abs/olute" 100755 "abs"
"bad\xff\xfe" 100755 "b"
"closed" 40700
"closed/f" 100400 "f"
"emptied" 100755 "a file now"
"etc" 40755
"etc/hostname" 100644 "base\n"
"lib" 120777 -> "usr/lib"
"linked" 100644 "base\n"
"made" 40755
"made/for" 40755
"made/for/link" 100755 "a"
"new\nline" 100755 "n"
"opt" 40755
"opt/app" 40755
"opt/app/bin" 100755 "#!"
"su" 100755 "s"
"turned" 40755
"turned/inside" 100755 "i"
"twice" 100755 "22"
"usr" 40755
"usr/lib" 40755
"usr/lib/a" 100755 "a"
"usr/lib/b" 100755 "b"
"usr/share" 40755
"usr/share/doc" 40755
"usr/share/doc/README" 100755 "r"
`
	for _, kind := range []string{"", "gzip", "zstd"} {
		t.Run("compression "+kind, func(t *testing.T) {
			s := newStore(t)
			im := newImage(t, imageOptions{compression: kind}, base, app)
			m, err := importLayout(t, s, im, Options{Name: "app:1"})
			check.Must(t, err)
			check.Equal(t, listing(t, treeOf(t, s, m)), want, "the tree is\n")
			found, err := s.FindImage("app:1")
			check.Must(t, err)
			check.That(t, found.Digest == Digest(im.raw()) && !found.Pending, "found %+v", found)
		})
	}
}
