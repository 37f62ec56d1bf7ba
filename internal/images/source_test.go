package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
)

// tarDir returns a tar of the files in a directory.
func tarDir(t *testing.T, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check.Must(t, w.AddFS(os.DirFS(dir)), w.Close())
	return b.Bytes()
}

// saved is one image of an archive of docker save.
type saved struct {
	tags   []string
	layers []string // names of its layers
	im     *image
}

// dockerArchive returns an archive as docker save made it before version 25, with links for repeated layers.
func dockerArchive(t *testing.T, compression string, list ...saved) []byte {
	t.Helper()
	type item struct {
		Config           string
		RepoTags, Layers []string
	}
	var entries []entry
	var items []item
	seen := map[string]string{}
	for _, s := range list {
		name := strings.TrimPrefix(Digest(s.im.config), "sha256:") + ".json"
		entries = append(entries, entry{name: name, body: string(s.im.config)})
		for i, text := range s.im.tars {
			e := entry{name: s.layers[i] + "/layer.tar", body: string(compress(t, compression, text))}
			if first := seen[Digest(text)]; first != "" {
				e = entry{name: e.name, link: "../" + first, kind: tar.TypeSymlink}
			} else {
				seen[Digest(text)] = e.name
			}
			entries = append(entries, e)
			s.layers[i] += "/layer.tar"
		}
		items = append(items, item{name, s.tags, s.layers})
	}
	b, _ := json.Marshal(items)
	return tarOf(t, append(entries, entry{name: "manifest.json", body: string(b)})...)
}

// Images are imported from every kind of local source.
func TestSources(t *testing.T) {
	base, app := tarOf(t, entry{name: "etc/os", body: "base"}), tarOf(t, entry{name: "etc/app", body: "app"})
	one, two := newImage(t, imageOptions{compression: "gzip"}, base), newImage(t, imageOptions{compression: "zstd"}, base, app)
	plain := newImage(t, imageOptions{}, base, app)
	dir := t.TempDir()
	writeLayout(t, dir+"/oci", []string{"one", "example.org/two:latest"}, one, two)
	writeLayout(t, dir+"/single", []string{""}, two)
	for name, data := range map[string][]byte{
		"oci.tar":    tarDir(t, dir+"/oci"),
		"oci.tar.gz": compress(t, "gzip", tarDir(t, dir+"/oci")),
		"docker.tar": dockerArchive(t, "", saved{[]string{"app:latest", "docker.io/library/app:2"}, []string{"a", "b"}, plain}, saved{[]string{"twice:1"}, []string{"c", "d", "e"}, newImage(t, imageOptions{}, base, base, app)}),
		"docker.gz":  compress(t, "gzip", dockerArchive(t, "", saved{nil, []string{"a", "b"}, plain})),
		"layers.gz":  dockerArchive(t, "gzip", saved{nil, []string{"a", "b"}, plain}),
		"a:b":        dockerArchive(t, "", saved{[]string{"app:1"}, []string{"a", "b"}, plain}),
		"no.tar":     []byte(strings.Repeat("no tar", 200)),
		"empty.tar":  tarOf(t),
		"loop.tar":   tarOf(t, entry{name: "manifest.json", link: "manifest.json", kind: tar.TypeSymlink}),
	} {
		check.Must(t, os.WriteFile(dir+"/"+name, data, 0o644))
	}
	check.Must(t, unix.Mkfifo(dir+"/pipe", 0o600), os.Mkdir(dir+"/links", 0o755), os.Symlink("/etc/passwd", dir+"/links/index.json"))
	const both, baseOnly = "\"etc\" 40755\n\"etc/app\" 100755 \"app\"\n\"etc/os\" 100755 \"base\"\n", "\"etc\" 40755\n\"etc/os\" 100755 \"base\"\n"
	for _, tt := range []struct{ ref, want, err string }{
		{"oci:oci:one", baseOnly, ""},
		{"oci:oci:example.org/two:latest", both, ""},
		{"oci:oci", "", `there are several images; add one of its tags after a colon: "one", "example.org/two:latest"`},
		{"oci:oci:three", "", `no image with the tag "three"`},
		{"oci:single", both, ""},
		{"single", both, ""},
		{"oci-archive:oci.tar:one", baseOnly, ""},
		{"oci.tar.gz:one", baseOnly, ""},
		{"docker-archive:docker.tar:app", both, ""},
		{"docker-archive:docker.tar:app:latest", both, ""},
		{"docker.tar:app:2", both, ""},
		{"docker-archive:docker.tar:twice:1", both, ""},
		{"docker-archive:docker.tar", "", "there are several images"},
		{"docker-archive:docker.tar:none", "", `no image with the tag "none"`},
		{"docker.gz", both, ""},
		{"layers.gz", both, ""},
		{"docker-archive:a:b", both, ""},
		{"docker-archive:a:b:app:1", both, ""},
		{"no.tar", "", "not a tar"},
		{"empty.tar", "", "no index.json"},
		{"docker-archive:empty.tar", "", "no manifest.json"},
		{"docker-archive:loop.tar", "", "no manifest.json"},
		{"docker-archive:oci.tar", "", "no manifest.json"},
		{"pipe", "", "not a regular file"},
		{"oci:pipe", "", "not a directory"},
		{"oci:links", "", "a link leads index.json out of the directory"},
		{"none", "", "no such file"},
		{"oci:", "", "the path is empty"},
	} {
		t.Run(tt.ref, func(t *testing.T) {
			s := newStore(t)
			kind, name, ok := strings.Cut(tt.ref, ":")
			ref := dir + "/" + tt.ref
			if ok && (kind == "oci" || strings.HasSuffix(kind, "-archive")) {
				ref = kind + ":" + dir + "/" + name
				if name == "" {
					ref = tt.ref
				}
			}
			for range 2 { // the second time it is there
				src, err := Open(s, ref, 1<<30)
				var m *snapshots.Image
				if err == nil {
					m, err = Import(t.Context(), s, src, Options{})
					src.Close()
				}
				if tt.err != "" {
					check.That(t, err != nil && strings.Contains(err.Error()+"; "+hint(err), tt.err), "%v", err)
					empty(t, s)
					continue
				}
				check.Must(t, err)
				check.Equal(t, listing(t, treeOf(t, s, m)), tt.want, "the tree is\n")
				again, err := Ensure(t.Context(), s, ref, nil)
				check.That(t, err == nil && again.Digest == m.Digest && again.ExpiresAt == "", "Ensure returned %+v, %v", again, err)
			}
		})
	}
}

func hint(err error) string {
	if e, ok := errors.AsType[*result.Error](err); ok {
		return e.Hint
	}
	return ""
}

// An exported image has the same digest, whatever its compression, and can be exported from a store that has its layers
// with another one.
func TestExport(t *testing.T) {
	text := tarOf(t, entry{name: "f", body: strings.Repeat("text", 1000)})
	for _, kind := range []string{"", "gzip", "zstd"} {
		for _, first := range []string{"", "gzip", "zstd"} {
			s, other := newStore(t), newStore(t)
			_, err := importLayout(t, s, newImage(t, imageOptions{compression: first, config: map[string]any{"User": "1"}}, text), Options{})
			check.Must(t, err)
			m, err := importLayout(t, s, newImage(t, imageOptions{compression: kind}, text, text), Options{Name: "name:1"})
			check.Must(t, err)
			file := t.TempDir() + "/out.tar"
			f, err := os.Create(file)
			check.Must(t, err, Export(s, m, f), f.Close())
			src, err := Open(other, file+":name:1", 1<<30)
			check.Must(t, err)
			got, err := Import(t.Context(), other, src, Options{})
			check.Must(t, err)
			src.Close()
			check.That(t, (got.Digest == m.Digest) == (kind == first || kind == ""), "%q in a store with %q: %s became %s", kind, first, m.Digest, got.Digest)
			a, b := listing(t, treeOf(t, s, m)), listing(t, treeOf(t, other, got))
			check.That(t, a == b, "%s became %s", a, b)
		}
	}
}

// failing is a source that fails after a number of blobs.
type failing struct {
	memory
	left int
	read []string
}

func (f *failing) Blob(ctx context.Context, d Descriptor) (io.ReadCloser, error) {
	if f.left--; f.left < 0 {
		return nil, errors.New("connection lost")
	}
	f.read = append(f.read, d.Digest)
	return f.memory.Blob(ctx, d)
}

// An import that failed is not visible, and the next one reads only the missing layers.
func TestResume(t *testing.T) {
	s := newStore(t)
	im := newImage(t, imageOptions{compression: "gzip"}, tarOf(t, entry{name: "a", body: "1"}), tarOf(t, entry{name: "b", body: "2"}), tarOf(t, entry{name: "c", body: "3"}))
	src := &failing{memory: memory{im.raw(), im.blobs}, left: 3}
	_, err := Import(t.Context(), s, src, Options{Name: "x"})
	check.Require(t, err != nil && strings.Contains(err.Error(), "connection lost"), "%v", err)
	_, err = s.FindImage("x")
	check.That(t, result.CodeOf(err) == "no-such-image", "the incomplete image: %v", err)
	found := s.Sweep(false)
	check.That(t, len(found) == 0, "cleanup removed %+v", found)
	src.left, src.read = 100, nil
	m, err := Import(t.Context(), s, src, Options{Name: "x"})
	check.Must(t, err)
	check.That(t, len(src.read) == 2 && src.read[1] == im.manifest.Layers[2].Digest, "read again: %q", src.read)
	check.Equal(t, listing(t, treeOf(t, s, m)), "\"a\" 100755 \"1\"\n\"b\" 100755 \"2\"\n\"c\" 100755 \"3\"\n", "the tree")
}

// Images share layers and files. A name moves to the image that gets it last. Only the removal of the last image removes
// a layer, and cleanup removes expired images.
func TestShared(t *testing.T) {
	s := newStore(t)
	base := tarOf(t, entry{name: "f", body: "base"})
	one := newImage(t, imageOptions{compression: "gzip"}, base)
	two := newImage(t, imageOptions{compression: "zstd"}, base, tarOf(t, entry{name: "g", body: "two"}))
	a, err := importLayout(t, s, one, Options{Name: "a"})
	check.Must(t, err)
	b, err := importLayout(t, s, two, Options{Name: "b", TTL: time.Hour})
	check.Must(t, err)
	var first, second unix.Stat_t
	check.Must(t, unix.Stat(treeOf(t, s, a)+"/f", &first), unix.Stat(treeOf(t, s, b)+"/f", &second))
	check.That(t, first.Ino == second.Ino, "the images do not share the file")
	count := func(dir string) int {
		names, err := os.ReadDir(filepath.Join(s.Path(), dir))
		check.Must(t, err)
		return len(names)
	}
	check.Equal(t, count("layers"), 2)
	again, err := importLayout(t, s, two, Options{Name: "a"})
	check.Must(t, err)
	found, err := s.FindImage("a")
	check.That(t, err == nil && found.Digest == b.Digest && strings.Join(again.Names, " ") == "a b", "the name leads to %+v, %v; %q", found, err, again.Names)
	_, err = s.FindImage(a.Digest)
	check.OK(t, err)
	check.OK(t, s.RemoveImage("a"))
	_, err = s.FindImage("b")
	check.OK(t, err)
	err = s.RemoveImage(a.Digest)
	check.That(t, result.CodeOf(err) == "in-use", "%v", err) // treeOf holds it
}

// Cleanup removes an expired image with its names, layers and trees, unless a sandbox uses it.
func TestExpired(t *testing.T) {
	s := newStore(t)
	im := newImage(t, imageOptions{}, tarOf(t, entry{name: "f", body: "x"}))
	m, err := importLayout(t, s, im, Options{Name: "x", TTL: time.Millisecond})
	check.Must(t, err)
	at, err := time.Parse("2006-01-02T15:04:05.000Z", m.ExpiresAt)
	check.Must(t, err)
	time.Sleep(time.Until(at.Add(time.Millisecond)))
	_, err = s.FindImage("x")
	check.That(t, result.CodeOf(err) == "no-such-image" && strings.Contains(err.Error(), "has expired"), "%v", err)
	u, err := s.Unpacked(snapshots.ImageKey(m.Digest, uint32(os.Getuid()), uint32(os.Getgid())))
	check.Must(t, err)
	s.Sweep(false)
	_, err = s.Image(m.Digest)
	check.That(t, err == nil, "cleanup removed an image in use: %v", err)
	check.Must(t, u.Close())
	dry := s.Sweep(true)
	check.That(t, len(dry) >= 4, "%+v", dry)
	for _, l := range s.Sweep(false) {
		check.Must(t, l.Err)
	}
	empty(t, s)
	names, err := os.ReadDir(filepath.Join(s.Path(), "trees"))
	check.That(t, err == nil && len(names) == 0, "trees are left: %v, %v", names, err)
}

// Names of images are those of registries, without digests and other kinds of references.
func TestNames(t *testing.T) {
	for _, name := range []string{"python", "python:3.13", "ghcr.io/org/tool:1.0-A_b", "localhost:5000/x", "a/b/c", "x_y.z-1", "sha:1", "ociimage:1"} {
		check.OK(t, snapshots.ParseImageName(name), "%q", name)
	}
	for _, name := range []string{"", "a b", "Python", "../../etc", "a/../b", "/a", "a/", "a//b", "a:", ":a", "-a", ".a", "a@b", "a\nb", "a%b", "oci:x", "oci-archive:x", "docker-archive:x", "sha256:0", "a:b/c", "é", strings.Repeat("a", 129), "a:b:c"} {
		err := snapshots.ParseImageName(name)
		check.That(t, err != nil, "%q is valid", name)
	}
}

// FuzzArchive opens archives of any kind, and imports from them: errors are expected, and they leave nothing.
func FuzzArchive(f *testing.F) {
	im := newImage(f, imageOptions{compression: "gzip"}, tarOf(f, entry{name: "f", body: "x"}))
	dir := f.TempDir()
	writeLayout(f, dir, []string{"v1"}, im)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check.Must(f, w.AddFS(os.DirFS(dir)), w.Close())
	f.Add(b.Bytes())
	f.Add(tarOf(f, entry{name: "manifest.json", body: `[{"Config":"c","Layers":["l"]}]`}, entry{name: "l", link: "../l", kind: tar.TypeSymlink}, entry{name: "c", body: `{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":["sha256:"]}}`}))
	s := newStore(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		file := t.TempDir() + "/a"
		check.Must(t, os.WriteFile(file, data, 0o600))
		for _, kind := range []string{"oci-archive:", "docker-archive:", ""} {
			src, err := Open(s, kind+file, 1<<20)
			if err != nil {
				continue
			}
			m, err := Import(t.Context(), s, src, Options{MaxSize: 1 << 20})
			check.Must(t, src.Close())
			if err == nil {
				check.Must(t, s.RemoveImage(m.Digest))
			}
		}
		s.Sweep(false)
		names, err := os.ReadDir(filepath.Join(s.Path(), "tmp"))
		check.Require(t, err == nil && len(names) == 0, "left over: %v, %v", names, err)
	})
}

// Several imports of one image at once succeed, and leave one image.
func TestConcurrent(t *testing.T) {
	s := newStore(t)
	im := newImage(t, imageOptions{compression: "gzip"}, tarOf(t, entry{name: "a", body: "1"}), tarOf(t, entry{name: "b", body: "2"}))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			m, err := Import(context.Background(), s, memory{im.raw(), im.blobs}, Options{Name: "x"})
			if err != nil {
				t.Error(err)
				return
			}
			u, err := s.Unpacked(snapshots.ImageKey(m.Digest, uint32(os.Getuid()), uint32(os.Getgid())))
			if err != nil {
				t.Error(err)
				return
			}
			check.Equal(t, listing(t, u.Path), "\"a\" 100755 \"1\"\n\"b\" 100755 \"2\"\n", "the tree")
			u.Close()
		})
	}
	all.Wait()
	found := s.Sweep(false)
	check.That(t, len(found) == 0, "left over: %+v", found)
}
