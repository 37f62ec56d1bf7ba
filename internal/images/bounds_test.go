package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// sparse returns a tar of about 2 KiB with a file of size bytes, of which one byte is not in a hole (GNU tar, PAX format 1.0).
func sparse(t testing.TB, name string, size int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	data := make([]byte, 513)
	copy(data, fmt.Sprintf("1\n%d\n1\n", size-1))
	data[512] = 'x'
	check.Must(t, w.WriteHeader(&tar.Header{Name: "GNUSparseFile.0/" + name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(data)), ModTime: when, Format: tar.FormatPAX,
		PAXRecords: map[string]string{"GNU.sparsX.major": "1", "GNU.sparsX.minor": "0", "GNU.sparsX.name": name, "GNU.sparsX.realsize": fmt.Sprint(size)}}))
	_, err := w.Write(data)
	check.Must(t, err, w.Close())
	return bytes.ReplaceAll(b.Bytes(), []byte("GNU.sparsX."), []byte("GNU.sparse.")) // package tar writes no sparse files
}

// A sparse file counts with its size, and can be unpacked again from the store.
func TestSparse(t *testing.T) {
	const size = 1 << 20
	im := newImage(t, imageOptions{}, sparse(t, "a", size), sparse(t, "b", size), sparse(t, "c", size))
	s := newStore(t)
	_, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{MaxSize: 2 * size})
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	empty(t, s)
	m, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{MaxSize: 4 * size})
	trees := filepath.Join(s.Path(), "trees")
	check.Must(t, err, os.RemoveAll(trees), os.Mkdir(trees, 0o700))
	check.Must(t, Unpack(t.Context(), s, m, nil))
	var st unix.Stat_t
	check.Must(t, unix.Stat(treeOf(t, s, m)+"/c", &st))
	check.That(t, st.Size == size, "the file has %d bytes", st.Size)
}

// An invalid image leaves no unpacked layers.
func TestDroppedTrees(t *testing.T) {
	im := newImage(t, imageOptions{}, tarOf(t, entry{name: "f", body: "x"}), tarOf(t, entry{name: "../f", body: "x"}))
	s := newStore(t)
	_, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{})
	check.Require(t, result.CodeOf(err) == "damaged", "%v", err)
	left, err := os.ReadDir(filepath.Join(s.Path(), "trees"))
	check.That(t, err == nil && len(left) == 0, "left: %v, %v", left, err)
}

// A link that replaces an unpacked tree is ignored, and the tree is unpacked again.
func TestExchangedTree(t *testing.T) {
	im := newImage(t, imageOptions{}, tarOf(t, entry{name: "f", body: "x"}))
	s := newStore(t)
	m, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{})
	check.Must(t, err)
	outside := t.TempDir()
	check.Must(t, os.WriteFile(outside+"/f", []byte("secret"), 0o600))
	roots, err := filepath.Glob(s.Path() + "/trees/*/root")
	check.Require(t, err == nil && len(roots) == 2, "%v, %v", roots, err)
	for _, root := range roots {
		check.Must(t, os.RemoveAll(root), os.Symlink(outside, root))
	}
	check.Must(t, Unpack(t.Context(), s, m, nil))
	text, err := os.ReadFile(treeOf(t, s, m) + "/f")
	check.That(t, err == nil && string(text) == "x", "the image has %q, %v", text, err)
	text, err = os.ReadFile(outside + "/f")
	check.That(t, err == nil && string(text) == "secret", "outside is %q, %v", text, err)
}

// The digest of an index means the image for this machine.
func TestPlatformsOfIndex(t *testing.T) {
	other := Platform{OS: "linux", Architecture: "s390x"}
	here := Host()
	all := Manifest{SchemaVersion: 2, MediaType: MediaTypeIndex}
	blobs := map[string][]byte{}
	for _, p := range []Platform{other, here} {
		im := newImage(t, imageOptions{platform: p}, tarOf(t, entry{name: "f", body: "x"}))
		d := im.add(MediaTypeManifest, im.raw())
		d.Platform = &p
		all.Manifests = append(all.Manifests, d)
		maps.Copy(blobs, im.blobs)
	}
	raw, err := json.Marshal(all)
	check.Must(t, err)
	s := newStore(t)
	for _, p := range []*Platform{&other, nil} {
		_, err := Import(t.Context(), s, memory{raw, blobs}, Options{Platform: p})
		check.Must(t, err)
	}
	m, err := s.FindImage(Digest(raw))
	check.That(t, err == nil && m.Platform == here.String(), "found %+v, %v", m, err)
}

// An image that cannot be unpacked does not take the name of an older one.
func TestNameOfUnpacked(t *testing.T) {
	s := newStore(t)
	old := newImage(t, imageOptions{}, tarOf(t, entry{name: "f", body: "old"}))
	m, err := Import(t.Context(), s, memory{old.raw(), old.blobs}, Options{Name: "app:1"})
	check.Must(t, err)
	im := newImage(t, imageOptions{}, tarOf(t, entry{name: "f", body: "new"}))
	ctx, cancel := context.WithCancel(t.Context())
	o := Options{Name: "app:1", Progress: func(p Progress) {
		if p.Done {
			cancel()
		}
	}}
	_, err = Import(ctx, s, memory{im.raw(), im.blobs}, o)
	check.That(t, err != nil, "no error")
	now, err := s.FindImage("app:1")
	check.That(t, err == nil && now.Digest == m.Digest, "app:1 has another image, %v", err)
}

// A known image of docker save is found without reading its layers again.
func TestKnownArchive(t *testing.T) {
	s, file := newStore(t), t.TempDir()+"/app.tar"
	im := newImage(t, imageOptions{config: map[string]any{"Entrypoint": []string{""}}}, tarOf(t, entry{name: "f", body: "x"}))
	data := dockerArchive(t, "gzip", saved{[]string{"app:1"}, []string{"1"}, im})
	check.Must(t, os.WriteFile(file, data, 0o600))
	m, err := Ensure(t.Context(), s, "docker-archive:"+file, nil)
	check.Must(t, err)
	check.That(t, len(m.Config.Entrypoint) == 0, "the removed entrypoint is %q", m.Config.Entrypoint)
	layer := compress(t, "gzip", im.tars[0])
	check.Must(t, os.WriteFile(file, bytes.Replace(data, layer, make([]byte, len(layer)), 1), 0o600))
	again, err := Ensure(t.Context(), s, "docker-archive:"+file, nil)
	check.That(t, err == nil && again.Digest == m.Digest, "%+v, %v", again, err)
}

// The compressed layers of a docker archive are hashed once, however many names they have, and only if they are small enough.
func TestHashedArchive(t *testing.T) {
	const layers = 100
	var names, diffs []string
	entries := []entry{{name: "l", body: string(compress(t, "gzip", tarOf(t, entry{name: "f", body: "x"})))}}
	for i := range layers {
		names, diffs = append(names, fmt.Sprint(i)), append(diffs, Digest([]byte{byte(i)}))
		entries = append(entries, entry{name: fmt.Sprint(i), link: "l", kind: tar.TypeSymlink})
	}
	config, err := json.Marshal(map[string]any{"os": "linux", "architecture": runtime.GOARCH, "rootfs": map[string]any{"diff_ids": diffs}})
	check.Must(t, err)
	list, err := json.Marshal([]any{map[string]any{"Config": "c", "Layers": names}})
	check.Must(t, err)
	file := filepath.Join(t.TempDir(), "archive")
	check.Must(t, os.WriteFile(file, tarOf(t, append(entries, entry{name: "c", body: string(config)}, entry{name: "manifest.json", body: string(list)})...), 0o600))
	s := newStore(t)
	for most, want := range map[int64]int{1 << 20: 1, 10: 0} { // layers hashed
		src, err := Open(s, "docker-archive:"+file, most)
		check.Must(t, err)
		_, err = src.Manifest(t.Context())
		got := len(src.(*docker).hashed)
		check.That(t, got == want && (err == nil) == (want > 0), "with at most %d bytes: %d layers hashed, %v", most, got, err)
		check.Must(t, src.Close())
	}
}
