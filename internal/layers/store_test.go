package layers

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

const most = 1 << 30

func newStore(t testing.TB) (*snapshots.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snapshots")
	s, err := snapshots.Open(dir)
	check.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s, dir
}

// take stores the layer of a directory as a snapshot.
func take(t testing.TB, s *snapshots.Store, dir, name string, ttl time.Duration) *snapshots.Manifest {
	t.Helper()
	m, err := taken(s, open(t, dir), name, ttl, most)
	check.Must(t, err)
	return m
}

func taken(s *snapshots.Store, dir *os.File, name string, ttl time.Duration, most int64) (*snapshots.Manifest, error) {
	d, err := s.NewFile()
	if err != nil {
		return nil, err
	}
	defer d.Close()
	l, _, err := Write(context.Background(), d.File, dir, most)
	if err != nil {
		return nil, err
	}
	m, err := snapshots.NewManifest(name, ttl)
	if err != nil {
		return nil, err
	}
	m.Workdir, m.Trees = "/work", []snapshots.Tree{{Dest: "/work", Source: "/home/u", Since: "2026-01-02T03:04:05.6Z", Layers: []snapshots.Layer{l}}}
	return m, s.Add(m, map[string]*snapshots.Draft{l.SHA256: d}, most)
}

func entries(t testing.TB, dir, sub string) []string {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(dir, sub))
	check.Must(t, err)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// Snapshots that share their layers still count towards the quota, because each has a file.
func TestEqualSnapshots(t *testing.T) {
	s, _ := newStore(t)
	from := t.TempDir()
	room := int64(16 << 10)
	var err error
	n := 0
	for ; err == nil && n < 10; n++ {
		_, err = taken(s, open(t, from), "", 0, room)
	}
	check.That(t, result.CodeOf(err) == "quota-disk" && s.Used() <= room, "%d: %v, %d bytes", n, err, s.Used())
}

func TestStore(t *testing.T) {
	s, dir := newStore(t)
	from := upper(t)
	one := take(t, s, from, "one", 0)
	two := take(t, s, from, "", 0)
	n := entries(t, dir, "layers")
	check.That(t, len(n) == 1 && n[0] == one.Trees[0].Layers[0].SHA256+".tar.zst", "equal layers are stored as %q", n)
	_, err := taken(s, open(t, from), "one", 0, most)
	check.That(t, result.CodeOf(err) == "name-in-use", "a name twice: %v", err)
	_, err = taken(s, open(t, from), "no/name", 0, most)
	check.That(t, result.CodeOf(err) == "usage", "%v", err)
	check.Must(t, os.WriteFile(filepath.Join(from, "more"), []byte("more"), 0o600))
	_, err = taken(s, open(t, from), "three", 0, s.Used())
	check.That(t, result.CodeOf(err) == "quota-disk" || result.CodeOf(err) == "too-large", "no room: %v", err)
	n = entries(t, dir, "tmp")
	check.That(t, len(n) == 0, "left: %q", n)
	m, err := s.Find("one")
	check.Must(t, err)
	u := ensured(t, s, m.Trees[0].Layers[0])
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(u.Path, "closed"), 0o755) })
	check.Must(t, os.Remove(filepath.Join(from, "more")))
	a, b := listing(t, from), listing(t, u.Path)
	check.That(t, a == b, "packed:\n%s\nunpacked:\n%s", a, b)
	check.Must(t, ensured(t, s, m.Trees[0].Layers[0]).Close())
	check.Must(t, s.Remove(one))
	n = entries(t, dir, "layers")
	check.That(t, len(n) == 1, "the layer of another snapshot went: %q", n)
	check.Must(t, s.Remove(two))
	n = entries(t, dir, "layers")
	check.That(t, len(n) == 1, "what a sandbox shows may yet be part of a snapshot, and was removed: %q", n)
	found := s.Sweep(false)
	check.That(t, len(found) == 0, "what a sandbox shows was removed: %v", found)
	check.Must(t, u.Close())
	found = s.Sweep(true)
	check.That(t, len(found) == 2 && found[0].Kind == "layer" && found[1].Kind == "tree", "%v", found)
	found = s.Sweep(false)
	check.That(t, len(found) == 2 && found[0].Err == nil && found[1].Err == nil, "%v", found)
	n = append(entries(t, dir, "trees"), entries(t, dir, "layers")...)
	check.That(t, len(n) == 0, "left: %q", n)
}

// If adding a snapshot fails, none of its layers stays.
func TestStoreUndo(t *testing.T) {
	for _, what := range []string{"full", "manifest"} {
		s, dir := newStore(t)
		m, err := snapshots.NewManifest("one", 0)
		check.Must(t, err)
		drafts := map[string]*snapshots.Draft{}
		for _, name := range []string{"a", "b"} {
			from := t.TempDir()
			check.Must(t, os.WriteFile(filepath.Join(from, name), nil, 0o600))
			d, err := s.NewFile()
			check.Must(t, err)
			defer d.Close()
			l, _, err := Write(context.Background(), d.File, open(t, from), most)
			check.Must(t, err)
			drafts[l.SHA256] = d
			m.Trees = append(m.Trees, snapshots.Tree{Dest: "/" + name, Source: "/home/u", Since: "2026-01-02T03:04:05.6Z", Layers: []snapshots.Layer{l}})
		}
		room := int64(most)
		if what == "full" {
			room = m.Size() - 1
		} else {
			check.Must(t, os.Mkdir(filepath.Join(dir, "manifests", m.ID+".json"), 0o700)) // blocks the manifest
		}
		err = s.Add(m, drafts, room)
		check.That(t, err != nil, "%s: no error", what)
		n := entries(t, dir, "layers")
		check.That(t, len(n) == 0, "%s: left: %q", what, n)
	}
}

func TestExpire(t *testing.T) {
	s, dir := newStore(t)
	from := upper(t)
	m := take(t, s, from, "short", time.Millisecond)
	time.Sleep(2 * time.Millisecond) // times have a resolution of 1 ms
	_, err := s.Find("short")
	check.That(t, result.CodeOf(err) == "not-found" && strings.Contains(err.Error(), "expired"), "%v", err)
	next := take(t, s, from, "short", 0) // reuses the name
	_, err = s.Find(m.ID)
	check.That(t, result.CodeOf(err) == "not-found", "%v", err)
	found := s.Sweep(false)
	check.That(t, len(found) == 0, "%v", found)
	check.Must(t, s.Remove(next))
	take(t, s, from, "", time.Millisecond)
	time.Sleep(2 * time.Millisecond)
	found = s.Sweep(false)
	check.That(t, len(found) == 2 && len(entries(t, dir, "layers"))+len(entries(t, dir, "manifests")) == 0, "%v", found)
}

// Leftovers of killed processes are removed, and files in use stay.
func TestAbandoned(t *testing.T) {
	s, dir := newStore(t)
	file, err := s.NewFile()
	check.Must(t, err)
	defer file.Close()
	tree, err := s.NewTree()
	check.Must(t, err)
	defer tree.Close()
	check.Must(t, os.WriteFile(filepath.Join(dir, "tmp", "0123456789abcdef"), []byte("half"), 0o600))
	check.Must(t, os.MkdirAll(filepath.Join(dir, "tmp", "fedcba9876543210", "root", "closed"), 0o700))
	check.Must(t, os.WriteFile(filepath.Join(dir, "tmp", "fedcba9876543210", "root", "closed", "f"), nil, 0o600))
	check.Must(t, os.Chmod(filepath.Join(dir, "tmp", "fedcba9876543210", "root", "closed"), 0))
	check.Must(t, os.WriteFile(filepath.Join(dir, "layers", strings.Repeat("0", 64)+".tar.zst"), nil, 0o600))
	found := s.Sweep(false)
	check.That(t, len(found) == 3, "%v", found)
	n := entries(t, dir, "tmp")
	check.That(t, len(n) == 2 && len(entries(t, dir, "layers")) == 0, "%q", n)
}

// An archive that announces too much is rejected before any layer is read, because many small layers
// could fill the disk.
func TestImportTooLarge(t *testing.T) {
	s, _ := newStore(t)
	from := t.TempDir()
	text := make([]byte, 1<<20)
	_, _ = rand.Read(text)
	check.Must(t, os.WriteFile(from+"/random", text, 0o600))
	m := take(t, s, from, "one", 0)
	var b bytes.Buffer
	check.Must(t, Export(s, m, &b))
	other, dir := newStore(t)
	in := bytes.NewReader(b.Bytes())
	_, err := Import(other, in, "", 0, m.Size()-1)
	check.That(t, result.CodeOf(err) == "quota-disk", "%v", err)
	read := b.Len() - in.Len()
	check.That(t, read <= 1<<16 && len(entries(t, dir, "tmp")) == 0, "%d bytes were read", read)
}

func TestExportImport(t *testing.T) {
	s, _ := newStore(t)
	from := upper(t)
	m := take(t, s, from, "one", time.Hour)
	var b bytes.Buffer
	check.Must(t, Export(s, m, &b))
	other, dir := newStore(t)
	got, err := Import(other, bytes.NewReader(b.Bytes()), "", 0, most)
	check.Must(t, err)
	check.That(t, got.Name == "one" && got.ID != m.ID && got.ExpiresAt == "" && got.Trees[0].Layers[0] == m.Trees[0].Layers[0], "%+v", got)
	_, err = Import(other, bytes.NewReader(b.Bytes()), "", 0, most)
	check.That(t, result.CodeOf(err) == "name-in-use", "twice: %v", err)
	again, err := Import(other, bytes.NewReader(b.Bytes()), "two", time.Hour, most)
	check.Must(t, err)
	check.That(t, again.ExpiresAt != "" && len(entries(t, dir, "layers")) == 1, "%+v", again)
	u := ensured(t, other, got.Trees[0].Layers[0])
	defer u.Close()
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(u.Path, "closed"), 0o755) })
	check.Equal(t, listing(t, u.Path), listing(t, from), "unpacked")
	_, err = Import(other, bytes.NewReader(b.Bytes()), "small", 0, 1000)
	check.That(t, err != nil, "above --max-size")
	// A truncated archive is rejected and leaves nothing behind.
	for n := 0; n < b.Len()-2048; n += 701 {
		_, err := Import(other, bytes.NewReader(b.Bytes()[:n]), "cut", 0, most)
		check.That(t, result.CodeOf(err) == "damaged", "cut after %d bytes of %d: %v", n, b.Len(), err)
	}
	n := entries(t, dir, "tmp")
	check.That(t, len(n) == 0 && len(entries(t, dir, "manifests")) == 2, "left: %q", n)
}

// Importing an invalid archive gives no snapshot, writes nothing outside, and leaves nothing behind.
func TestImportHostile(t *testing.T) {
	from, _ := newStore(t)
	m := take(t, from, upper(t), "one", 0)
	l := m.Trees[0].Layers[0]
	var good bytes.Buffer
	check.Must(t, Export(from, m, &good))
	packed := func(text []byte) []byte {
		var b bytes.Buffer
		w, err := NewWriter(&b)
		check.Must(t, err)
		_, err = w.Write(text)
		check.Must(t, err)
		_, _, err = w.Close()
		check.Must(t, err)
		return b.Bytes()
	}
	manifest := func(change func(*snapshots.Manifest)) string {
		other := *m
		other.Trees = []snapshots.Tree{m.Trees[0]}
		other.Trees[0].Layers = []snapshots.Layer{l}
		change(&other)
		return string(harness.JSON(t, other))
	}
	real, err := from.Layer(l)
	check.Must(t, err)
	layer, err := io.ReadAll(real)
	check.Must(t, err, real.Close())
	type part struct{ name, content string }
	plain := part{"manifest.json", manifest(func(*snapshots.Manifest) {})}
	right := part{"layers/" + l.SHA256 + ".tar.zst", string(layer)}
	bomb := packed(make([]byte, 64<<20))
	// Change the uncompressed data: a bit of the compressed layer may have no meaning.
	r, err := NewReader(bytes.NewReader(layer))
	check.Must(t, err)
	flipped, err := io.ReadAll(r)
	check.Must(t, err)
	r.Close()
	flipped[bytes.Index(flipped, []byte("#!/bin/sh\n"))] ^= 1
	flipped = packed(flipped)
	for name, parts := range map[string][]part{
		"no manifest":       {right},
		"no layer":          {plain},
		"empty":             {},
		"twice":             {plain, right, right},
		"something else":    {plain, right, {"etc/passwd", "x"}},
		"leads out":         {plain, {"layers/../../" + l.SHA256 + ".tar.zst", string(layer)}},
		"a bit":             {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].Size = int64(len(flipped)) })}, {right.name, string(flipped)}},
		"another size":      {plain, {right.name, string(layer) + "x"}},
		"another hash":      {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].SHA256 = strings.Repeat("0", 64) })}, {"layers/" + strings.Repeat("0", 64) + ".tar.zst", string(layer)}},
		"fewer bytes":       {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].Bytes-- })}, right},
		"fewer entries":     {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].Entries-- })}, right},
		"bomb":              {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].Size = int64(len(bomb)) })}, {right.name, string(bomb)}},
		"huge":              {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].Bytes = 1 << 40 })}, right},
		"name of a path":    {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Name = "../../x" })}, right},
		"id of a path":      {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.ID = "../../../manifest" })}, right},
		"hash of a path":    {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Layers[0].SHA256 = "../" + l.SHA256[3:] })}, right},
		"destination":       {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Dest = "/work/../etc" })}, right},
		"source":            {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees[0].Source = "home" })}, right},
		"two of a kind":     {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees = append(m.Trees, m.Trees[0]) })}, right},
		"no trees":          {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Trees = nil })}, right},
		"newer":             {{"manifest.json", manifest(func(m *snapshots.Manifest) { m.Version = 9 })}, right},
		"not JSON":          {{"manifest.json", "{"}, right},
		"manifest too long": {{"manifest.json", strings.Repeat(" ", maxManifest+1)}, right},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, p := range parts {
				check.Must(t, w.WriteHeader(&tar.Header{Name: p.name, Size: int64(len(p.content)), Mode: 0o600}))
				_, err := io.WriteString(w, p.content)
				check.Must(t, err)
			}
			check.Must(t, w.Close())
			s, dir := newStore(t)
			_, err := Import(s, &b, "", 0, most)
			check.That(t, result.CodeOf(err) == "damaged" || result.CodeOf(err) == "too-large", "accepted, or not refused in a line: %v", err)
			for _, sub := range []string{"tmp", "layers", "manifests"} {
				n := entries(t, dir, sub)
				check.That(t, len(n) == 0, "left in %s: %q", sub, n)
			}
			n := entries(t, filepath.Dir(dir), ".")
			check.That(t, len(n) == 1, "beside the store: %q", n)
		})
	}
}

// Invalid layers with the right hash are rejected.
func TestImportHostileLayers(t *testing.T) {
	for name, headers := range hostile {
		if name == "twice" || strings.Contains(name, "link") || name == "no parent" || name == "opaque nowhere" {
			continue // detected only when unpacking: TestUnpackHostile
		}
		s, dir := newStore(t)
		d, err := s.NewFile()
		check.Must(t, err)
		w, err := NewWriter(d.File)
		check.Must(t, err)
		text := archive(headers)
		_, err = w.Write(text)
		check.Must(t, err)
		sum, size, err := w.Close()
		check.Must(t, err)
		_, err = d.File.Seek(0, 0)
		check.Must(t, err)
		err = verify(d.File, []snapshots.Layer{{SHA256: sum, Size: size, Bytes: int64(len(text)), Entries: 10}})
		check.That(t, result.CodeOf(err) == "damaged", "%s: %v", name, err)
		check.Must(t, d.Close())
		n := entries(t, dir, "tmp")
		check.That(t, len(n) == 0, "left: %q", n)
	}
}

// ensured unpacks a layer for this user if necessary, and holds it.
func ensured(t *testing.T, s *snapshots.Store, l snapshots.Layer) *snapshots.Unpacked {
	t.Helper()
	check.Must(t, Ensure(s, l, nil))
	u, err := s.Unpacked(snapshots.Key(l, uint32(os.Getuid()), uint32(os.Getgid())))
	check.Must(t, err)
	return u
}

// A stored layer that has changed on the disk is not used.
func TestDamagedLayer(t *testing.T) {
	s, dir := newStore(t)
	m := take(t, s, upper(t), "one", 0)
	l := m.Trees[0].Layers[0]
	at := filepath.Join(dir, "layers", l.SHA256+".tar.zst")
	text, err := os.ReadFile(at)
	check.Must(t, err)
	clear(text[len(text)/2 : len(text)/2+64])
	check.Must(t, os.WriteFile(at, text, 0o600))
	err = Ensure(s, l, nil)
	check.That(t, result.CodeOf(err) == "damaged", "%v", err)
	n := append(entries(t, dir, "tmp"), entries(t, dir, "trees")...)
	check.That(t, len(n) == 0, "left: %q", n)
	check.Must(t, os.Remove(at))
	err = Ensure(s, l, nil)
	check.That(t, result.CodeOf(err) == "damaged", "%v", err)
}

// The store must be private to its owner.
func TestPrivate(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.Chmod(dir, 0o755))
	_, err := snapshots.Open(dir)
	check.That(t, result.CodeOf(err) == "data", "%v", err)
	s, err := snapshots.Look(filepath.Join(dir, "none"))
	check.Must(t, err)
	_, err = s.Find("x")
	check.That(t, result.CodeOf(err) == "not-found", "%v", err)
	found := s.Sweep(false)
	check.That(t, len(found) == 0, "%v", found)
	_, err = s.NewFile()
	check.That(t, err != nil, "a file in a store that there is not")
	check.That(t, errors.Is(unix.Access(filepath.Join(dir, "none"), 0), unix.ENOENT), "looking has made it")
}
