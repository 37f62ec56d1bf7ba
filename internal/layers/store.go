package layers

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Write packs the upper layer of an overlay into a file, which the caller keeps and closes. leftOut is the
// number of files that were not packed. Write returns the cause of ctx when that is done.
func Write(ctx context.Context, file, upper *os.File, most int64) (l snapshots.Layer, leftOut int, err error) {
	w, err := NewWriter(Bounded(file, most))
	if err != nil {
		return l, 0, err
	}
	count, err := Pack(ctx, upper, w, Count{Bytes: most, Entries: snapshots.MaxEntries})
	sum, size, failed := w.Close()
	if failed != nil {
		err = failed // the cause of Pack's error
	}
	return snapshots.Layer{SHA256: sum, Size: size, Bytes: count.Bytes, Entries: count.Entries}, count.LeftOut, err
}

// Bounded returns a writer of at most most bytes to a file.
func Bounded(file *os.File, most int64) io.Writer {
	return &bounded{to: file, left: most, full: snapshots.Full(most)}
}

// bounded writes a limited number of bytes. It starts writing them to the disk at once, so that the
// final sync is short.
type bounded struct {
	to   *os.File
	at   int64
	left int64
	full error
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, b.full
	}
	n, err := b.to.Write(p)
	if err != nil {
		return n, snapshots.Failed(err)
	}
	// An error does not matter, because the file is synced at the end.
	_ = unix.SyncFileRange(int(b.to.Fd()), b.at, int64(n), unix.SYNC_FILE_RANGE_WRITE)
	b.at += int64(n)
	return n, err
}

// Names in the archive of a snapshot, whose first file is the manifest.
const (
	manifestName = "manifest.json"
	layersDir    = "layers/"
	layerSuffix  = ".tar.zst"
	maxManifest  = 1 << 20
)

// Export writes a snapshot as one tar: its manifest, and its layers as the store has them.
func Export(s *snapshots.Store, m *snapshots.Manifest, to io.Writer) error {
	out := *m
	out.ExpiresAt, out.Imported = "", false // depends on the importer
	text, err := result.JSON(out)
	if err != nil {
		return err
	}
	at, _ := time.Parse(result.TimeFormat, m.CreatedAt)
	w := tar.NewWriter(to)
	if err := w.WriteHeader(&tar.Header{Name: manifestName, Size: int64(len(text)), Mode: 0o600, ModTime: at}); err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	for _, l := range m.Layers() {
		if err := exportLayer(s, l, w, at); err != nil {
			return err
		}
	}
	return w.Close()
}

func exportLayer(s *snapshots.Store, l snapshots.Layer, w *tar.Writer, at time.Time) error {
	from, err := s.Layer(l)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := w.WriteHeader(&tar.Header{Name: layersDir + l.SHA256 + layerSuffix, Size: l.Size, Mode: 0o600, ModTime: at}); err != nil {
		return err
	}
	if n, err := io.Copy(w, from); err != nil {
		return err
	} else if n != l.Size {
		return refused("layer %.12s has %d bytes in the store, not %d", l.SHA256, n, l.Size)
	}
	return nil
}

// Import reads an archive written by Export and checks it completely before it becomes visible. The snapshot
// gets a new ID, and name replaces its own name unless name is "". most bounds all layers of the store
// together, and the unpacked size of each new layer.
func Import(s *snapshots.Store, from io.Reader, name string, ttl time.Duration, most int64) (*snapshots.Manifest, error) {
	archive := tar.NewReader(from)
	theirs, err := importManifest(archive)
	if err != nil {
		return nil, err
	}
	if name == "" {
		name = theirs.Name
	}
	if theirs.Size() > most { // before writing anything
		return nil, snapshots.Full(most)
	}
	m, err := snapshots.NewManifest(name, ttl)
	if err != nil {
		return nil, err
	}
	id, expires := m.ID, m.ExpiresAt
	*m = *theirs
	m.ID, m.Name, m.ExpiresAt, m.Imported = id, name, expires, true
	drafts := map[string]*snapshots.Draft{}
	defer func() {
		for _, d := range drafts {
			d.Close()
		}
	}()
	for {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, broken(err)
		}
		said, err := wanted(m, h, drafts)
		if err != nil {
			return nil, err
		}
		d, err := importLayer(s, archive, said, h.Size, most)
		if err != nil {
			return nil, err
		}
		drafts[said[0].SHA256] = d
	}
	return m, s.Add(m, drafts, most)
}

func importManifest(archive *tar.Reader) (*snapshots.Manifest, error) {
	h, err := archive.Next()
	if err == io.EOF {
		return nil, refused("the archive is empty")
	}
	if err != nil {
		return nil, broken(err)
	}
	if h.Name != manifestName || h.Typeflag != tar.TypeReg || h.Size > maxManifest {
		return nil, refused("not a snapshot: the archive begins with %.80q, not with a manifest", h.Name)
	}
	text, err := io.ReadAll(archive)
	if err != nil {
		return nil, broken(err)
	}
	return snapshots.Parse(text)
}

// wanted returns the manifest's entries for the next layer, which may occur several times. It returns an error
// unless the layer belongs to the snapshot and is new.
func wanted(m *snapshots.Manifest, h *tar.Header, drafts map[string]*snapshots.Draft) (said []snapshots.Layer, err error) {
	hash, ok := strings.CutSuffix(strings.TrimPrefix(h.Name, layersDir), layerSuffix)
	if !ok || h.Typeflag != tar.TypeReg || h.Name != layersDir+hash+layerSuffix {
		return nil, refused("unexpected file %.80q in the archive", h.Name)
	}
	if drafts[hash] != nil {
		return nil, refused("duplicate layer %.12s", hash)
	}
	for _, t := range m.Trees {
		for _, l := range t.Layers {
			if l.SHA256 == hash {
				said = append(said, l)
			}
		}
	}
	if slices.ContainsFunc(said, func(l snapshots.Layer) bool { return l.Size == h.Size }) {
		return said, nil
	}
	return nil, refused("the manifest has no layer %.12s of %d bytes", hash, h.Size)
}

// importLayer stores a layer if it matches its entries in the manifest.
func importLayer(s *snapshots.Store, from io.Reader, said []snapshots.Layer, size, most int64) (d *snapshots.Draft, err error) {
	if size > most {
		return nil, snapshots.Full(most)
	}
	if d, err = s.NewFile(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = result.All(err, d.Close())
		}
	}()
	// Read it back from the disk, to check the stored data.
	if _, err := io.Copy(d.File, from); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return d, snapshots.Failed(err)
	} else if err != nil {
		return d, broken(err)
	}
	if _, err := d.File.Seek(0, io.SeekStart); err != nil {
		return d, err
	}
	for _, l := range said {
		if l.Bytes > most {
			return d, tree.TooLarge("layer %.12s has %d bytes unpacked, more than --max-size", l.SHA256, l.Bytes)
		}
	}
	return d, verify(d.File, said)
}

// verify compares a packed layer with its entries in the manifest.
func verify(from io.Reader, said []snapshots.Layer) error {
	r, err := NewReader(from)
	if err != nil {
		return err
	}
	defer r.Close()
	for _, l := range said[1:] {
		if l != said[0] {
			return refused("the manifest has contradictory entries for layer %.12s", l.SHA256)
		}
	}
	got, err := Check(r, Count{Bytes: said[0].Bytes, Entries: said[0].Entries})
	if err != nil {
		return err
	}
	return compare(said[0], got, r.Sum())
}

func compare(l snapshots.Layer, got Count, sum string) error {
	if sum != l.SHA256 || got.Bytes != l.Bytes || got.Entries != l.Entries {
		return refused("layer %.12s does not match its manifest: %d bytes, %d entries, hash %.12s", l.SHA256, got.Bytes, got.Entries, sum)
	}
	return nil
}

// Ensure unpacks a layer for its owner, or this process's user if that is nil, unless it was unpacked in this
// boot. To use it, hold it with [snapshots.Store.Unpacked].
func Ensure(s *snapshots.Store, l snapshots.Layer, owner *proc.Cred) error {
	o := proc.Cred{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	if owner != nil {
		o = *owner
	}
	key := snapshots.Key(l, o.UID, o.GID)
	if u, err := s.Unpacked(key); err == nil {
		return u.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	from, err := s.Layer(l)
	if err != nil {
		return err
	}
	defer from.Close()
	r, err := NewReader(from)
	if err != nil {
		return err
	}
	defer r.Close()
	d, err := s.NewTree()
	if err != nil {
		return err
	}
	defer d.Close()
	got, err := Unpack(r, d.File, owner, Count{Bytes: l.Bytes, Entries: l.Entries})
	if err == nil {
		err = compare(l, got, r.Sum())
	}
	if err != nil {
		return snapshots.Failed(err)
	}
	return d.Keep(key)
}
