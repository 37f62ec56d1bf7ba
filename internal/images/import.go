package images

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Import adds an image to the store. Blobs that the store has are not read again. The image becomes visible when it is
// complete; the layers of an interrupted import are kept for a day, so that the next import continues there.
func Import(ctx context.Context, store *snapshots.Store, src Source, o Options) (*snapshots.Image, error) {
	if o.Name != "" {
		if err := snapshots.ParseImageName(o.Name); err != nil {
			return nil, err
		}
	}
	if o.MaxSize == 0 {
		o.MaxSize = DefaultMaxSize
	}
	m, list, err := describe(ctx, src, &o)
	if err != nil {
		return nil, err
	}
	there, err := store.BeginImage(m)
	if err != nil {
		return nil, err
	}
	err = fetch(ctx, store, src, m, list, there, &o)
	if err == nil && !o.Packed { // before it gets the name of an older one
		err = Unpack(ctx, store, m, o.Owner)
	}
	if err != nil {
		if damaged(err) {
			err = result.All(err, store.DropImage(m))
		}
		return nil, err
	}
	if err := store.AddImage(m, o.Name); err != nil {
		return nil, err
	}
	return m, nil
}

// fetch adds the missing layers to the store.
func fetch(ctx context.Context, store *snapshots.Store, src Source, m *snapshots.Image, list []Descriptor, there map[string]snapshots.Layer, o *Options) error {
	var total int64
	var entries int
	for i := range m.Layers {
		l := &m.Layers[i]
		p := Progress{Layer: i + 1, Layers: len(m.Layers), Digest: l.Digest, Size: list[i].Size}
		var size int64
		if known, ok := there[l.SHA256]; ok {
			l.Layer, size = known, known.Bytes
			p.Bytes, p.Done, p.Present = p.Size, true, true
		} else {
			got, content, err := fetchLayer(ctx, store, src, m, list[i], l.SHA256, layers.Count{Bytes: o.MaxSize - total, Entries: min(snapshots.MaxEntries, maxEntries-entries)}, o, p)
			if err != nil {
				return err
			}
			there[l.SHA256], size = got, max(got.Bytes, content)
			p.Bytes, p.Done = p.Size, true
		}
		if total, entries = total+size, entries+l.Entries; total > o.MaxSize || entries > maxEntries {
			return invalid("its layers have more than %d bytes or %d entries in total", o.MaxSize, maxEntries)
		}
		if o.Progress != nil {
			o.Progress(p)
		}
	}
	return nil
}

// blob reads a blob, with its hash. It returns an error for data beyond the expected size.
type blob struct {
	ctx    context.Context
	from   io.Reader
	left   int64
	hash   hash.Hash
	also   io.Writer
	report func(n int64)
	n      int64
}

func (b *blob) Read(p []byte) (int, error) {
	if b.ctx.Err() != nil {
		return 0, context.Cause(b.ctx)
	}
	n, err := b.from.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, invalid("a layer is larger than its manifest says")
	}
	b.hash.Write(p[:n])
	if b.also != nil {
		if _, err := b.also.Write(p[:n]); err != nil {
			return n, err
		}
	}
	if b.n += int64(n); b.report != nil {
		b.report(b.n)
	}
	return n, err
}

// fetchLayer reads a layer once: it stores it, verifies it, and unpacks it for the owner. content is the size of its files.
func fetchLayer(ctx context.Context, store *snapshots.Store, src Source, m *snapshots.Image, d Descriptor, diff string, most layers.Count, o *Options, p Progress) (l snapshots.Layer, content int64, err error) {
	rc, err := src.Blob(ctx, d)
	if err != nil {
		return l, 0, err
	}
	defer rc.Close()
	draft, err := store.NewFile()
	if err != nil {
		return l, 0, err
	}
	defer draft.Close()
	to := layers.Bounded(draft.File, o.MaxSize)
	in := &blob{ctx: ctx, from: rc, left: d.Size, hash: sha256.New()}
	if o.Progress != nil {
		o.Progress(p)
		next := int64(0)
		in.report = func(n int64) {
			if n >= next {
				p.Bytes, next = n, n+1<<20
				o.Progress(p)
			}
		}
	}
	begin := make([]byte, 4)
	n, err := io.ReadFull(in, begin)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return l, 0, err
	}
	var packer *layers.Writer
	in.also = to
	if layers.Compression(begin[:n]) == "" {
		if packer, err = layers.NewWriter(to); err != nil {
			return l, 0, err
		}
		in.also = packer
	}
	_, failed := in.also.Write(begin[:n])
	var count layers.Count
	var sum string
	if failed == nil {
		count, sum, failed = unpackLayer(store, io.MultiReader(bytes.NewReader(begin[:n]), in), diff, o.Owner, most, func(sum string) error {
			if _, err := io.Copy(io.Discard, in); err != nil { // after the end of the compressed data
				return err
			}
			if got := "sha256:" + hex.EncodeToString(in.hash.Sum(nil)); got != d.Digest || in.left != 0 {
				return invalid("layer %.19s has the digest %.19s, and %d bytes of %d", d.Digest, got, d.Size-in.left, d.Size)
			}
			if sum != diff {
				return invalid("layer %.19s has the DiffID %.12s, not %.12s", d.Digest, sum, diff)
			}
			return nil
		})
	}
	if packer != nil {
		if _, _, err := packer.Close(); err != nil {
			failed = err // the cause
		}
	}
	if failed != nil {
		return l, 0, snapshots.Failed(failed)
	}
	l = snapshots.Layer{SHA256: sum, Bytes: count.Bytes, Entries: count.Entries}
	return l, count.Content, store.AddLayer(m, &l, draft, o.MaxSize)
}

// unpackLayer unpacks a layer to a plain tree, which it keeps if check accepts the layer's hash.
func unpackLayer(store *snapshots.Store, from io.Reader, diff string, owner *proc.Cred, most layers.Count, check func(sum string) error) (c layers.Count, sum string, err error) {
	tree, err := store.NewTree()
	if err != nil {
		return c, "", err
	}
	defer tree.Close()
	changes, err := tree.Create(changesName)
	if err != nil {
		return c, "", err
	}
	defer changes.Close()
	r, err := layers.NewReader(from)
	if err != nil {
		return c, "", err
	}
	defer r.Close()
	if c, err = layers.Plain(r, tree.File, changes, owner, most); err != nil {
		return c, "", err
	}
	if err := check(r.Sum()); err != nil {
		return c, "", err
	}
	uid, gid := user(owner)
	return c, r.Sum(), tree.Keep(snapshots.LayerKey(diff, uid, gid))
}

// changesName is the file of a layer's list of changes, next to its tree.
const changesName = "changes"

// user returns the IDs of an owner, or this process's for nil.
func user(owner *proc.Cred) (uid, gid uint32) {
	if owner == nil {
		return uint32(os.Getuid()), uint32(os.Getgid())
	}
	return owner.UID, owner.GID
}

// Unpack makes the tree of an image for its owner, unless it is there. To use it, hold it with
// [snapshots.Store.HoldImage].
func Unpack(ctx context.Context, store *snapshots.Store, m *snapshots.Image, owner *proc.Cred) error {
	uid, gid := user(owner)
	key := snapshots.ImageKey(m.Digest, uid, gid)
	if u, err := store.Unpacked(key); err == nil {
		return u.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var held []*snapshots.Unpacked
	defer func() {
		for _, u := range held {
			u.Close()
		}
	}()
	draft, err := store.NewTree()
	if err != nil {
		return err
	}
	defer draft.Close()
	if owner != nil {
		if err := draft.File.Chown(int(uid), int(gid)); err != nil {
			return err
		}
	}
	if err := draft.File.Chmod(0o755); err != nil {
		return err
	}
	for _, l := range m.Layers {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		u, err := holdLayer(store, l.Layer, owner)
		if err != nil {
			return err
		}
		held = append(held, u)
		if err := merge(draft, u, owner); err != nil {
			return snapshots.Failed(err)
		}
	}
	if err := draft.Keep(key); err != nil {
		return err
	}
	tree, err := store.Unpacked(key)
	if err != nil {
		return err
	}
	held = append(held, tree)
	return store.Durable(held...)
}

func merge(draft *snapshots.Draft, u *snapshots.Unpacked, owner *proc.Cred) error {
	root, err := os.OpenFile(u.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	changes, err := u.Open(changesName)
	if err != nil {
		return err
	}
	defer changes.Close()
	return layers.Merge(draft.File, root, changes, owner)
}

// holdLayer holds the plain tree of a layer, which it unpacks if necessary.
func holdLayer(store *snapshots.Store, l snapshots.Layer, owner *proc.Cred) (*snapshots.Unpacked, error) {
	uid, gid := user(owner)
	key := snapshots.LayerKey(l.SHA256, uid, gid)
	for range 3 { // cleanup may remove it before it is held
		u, err := store.Unpacked(key)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return u, err
		}
		from, err := store.Layer(l)
		if err != nil {
			return nil, err
		}
		_, _, err = unpackLayer(store, from, l.SHA256, owner, layers.Count{Bytes: math.MaxInt64, Entries: snapshots.MaxEntries}, func(sum string) error {
			if sum != l.SHA256 {
				return invalid("layer %.12s has the hash %.12s in the store", l.SHA256, sum)
			}
			return nil
		})
		from.Close()
		if err != nil {
			return nil, snapshots.Failed(err)
		}
	}
	return nil, &result.Error{Code: "busy", Message: "the unpacked layers keep being removed", Hint: "try again"}
}
