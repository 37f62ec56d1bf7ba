package images

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Local is a source on this machine. It must be closed.
type Local interface {
	Source
	io.Closer
}

// Open opens SRC of image import and image references with a kind: oci:DIR[:TAG], oci-archive:FILE[:TAG],
// docker-archive:FILE[:TAG], or the path of a directory or an archive, whose kind Open detects. Archives that cannot be
// read repeatedly, such as standard input ("-") and compressed ones, are copied to the store.
func Open(store *snapshots.Store, ref string, most int64) (Local, error) {
	kind, rest, ok := strings.Cut(ref, ":")
	switch {
	case ref == "-":
		return openArchive(store, os.Stdin, "", "", most)
	case !ok || kind != "oci" && kind != "oci-archive" && kind != "docker-archive":
		kind, rest = "", ref
	case rest == "":
		return nil, &result.Error{Code: "usage", Message: fmt.Sprintf("%q: the path is empty", ref)}
	}
	name, tag, err := splitTag(rest)
	if err != nil {
		return nil, openError(ref, err)
	}
	if kind == "oci" {
		return openLayout(name, tag)
	}
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, openError(ref, err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, openError(ref, err)
	case info.IsDir() && kind == "":
		return openLayout(name, tag)
	case !info.Mode().IsRegular():
		return nil, openError(ref, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")})
	}
	return openArchive(store, f, kind, tag, most)
}

func openError(ref string, err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return &result.Error{Code: "image-source", Message: fmt.Sprintf("cannot open image %.200q: %v", ref, err), Err: err}
}

// splitTag splits PATH[:TAG] at the first colon for which PATH exists. A TAG may contain colons.
func splitTag(rest string) (name, tag string, err error) {
	if _, err = os.Lstat(rest); err == nil {
		return rest, "", nil
	}
	for i := range rest {
		if rest[i] == ':' && i > 0 {
			if _, err := os.Lstat(rest[:i]); err == nil {
				return rest[:i], rest[i+1:], nil
			}
		}
	}
	return rest, "", err
}

// files is a directory or an archive in OCI layout.
type files interface {
	open(name string) (io.ReadCloser, error) // fs.ErrNotExist for a missing file
	io.Closer
}

// layout is a source in OCI layout (image-layout.md).
type layout struct {
	files
	raw []byte // the selected manifest or index
}

func (l *layout) Manifest(context.Context) ([]byte, error) { return l.raw, nil }

func (l *layout) Blob(_ context.Context, d Descriptor) (io.ReadCloser, error) {
	hash, ok := snapshots.Hex(d.Digest)
	if !ok {
		return nil, invalid("digest %.80q; only sha256 is supported", d.Digest)
	}
	r, err := l.open("blobs/sha256/" + hash)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, invalid("blob %.19s is missing", d.Digest)
	}
	return r, err
}

const refName = "org.opencontainers.image.ref.name"

// newLayout selects a manifest or an index of a layout.
func newLayout(in files, tag string) (*layout, error) {
	l := &layout{files: in}
	raw, err := readSmall(in, "index.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, invalid("it has no index.json, so it is not in OCI layout")
	}
	if err != nil {
		return nil, err
	}
	index, err := ParseManifest(raw)
	if err != nil {
		return nil, err
	}
	if !index.index() {
		return nil, invalid("its index.json is not an index")
	}
	var tags []string
	var found []Descriptor
	for _, d := range index.Manifests {
		name := d.Annotations[refName]
		tags = append(tags, name)
		// containerd and docker put the whole name in another annotation.
		if tag == "" || name == tag || d.Annotations["io.containerd.image.name"] == tag || d.Digest == tag {
			found = append(found, d)
		}
	}
	if len(found) == 0 {
		return nil, noTag(tag, tags)
	}
	for _, d := range found[1:] {
		if d.Annotations[refName] != found[0].Annotations[refName] || d.Platform == nil {
			return nil, noTag(tag, tags)
		}
	}
	if len(found) > 1 { // one image for several platforms
		l.raw = raw
		if len(found) < len(index.Manifests) {
			l.raw, err = json.Marshal(Manifest{SchemaVersion: 2, MediaType: MediaTypeIndex, Manifests: found})
		}
		return l, err
	}
	l.raw, err = small(context.Background(), l, found[0], "manifest")
	return l, err
}

func noTag(tag string, tags []string) error {
	e := &result.Error{Code: "no-such-tag", Message: fmt.Sprintf("no image with the tag %.80q", tag)}
	if tag == "" {
		e.Message = "there is no image"
		if len(tags) > 0 {
			e.Message = "there are several images"
		}
	}
	var named []string
	for _, t := range tags[:min(len(tags), 10)] {
		if t != "" {
			named = append(named, fmt.Sprintf("%.80q", t))
		}
	}
	if len(named) > 0 {
		e.Hint = "add one of its tags after a colon: " + strings.Join(named, ", ")
	}
	return e
}

func readSmall(in files, name string) ([]byte, error) {
	r, err := in.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, snapshots.MaxImageText+1))
	if err == nil && len(data) > snapshots.MaxImageText {
		err = invalid("%s has more than %d bytes", name, snapshots.MaxImageText)
	}
	return data, err
}

// directory is an OCI layout in a directory. Links cannot lead outside.
type directory struct{ *os.Root }

func openLayout(name, tag string) (Local, error) {
	root, err := os.OpenRoot(name + "/.") // a pipe is an error, instead of waiting for its writer
	if err != nil {
		return nil, openError("oci:"+name, err)
	}
	l, err := newLayout(directory{root}, tag)
	if err != nil {
		root.Close()
		return nil, err
	}
	return l, nil
}

func (d directory) open(name string) (io.ReadCloser, error) {
	f, err := d.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		if !errors.As(err, new(unix.Errno)) {
			return nil, invalid("a link leads %s out of the directory", name) // os.Root's error
		}
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, invalid("%s is not a regular file", name)
	}
	return f, nil
}

// archive is the index of a tar.
type archive struct {
	f     *os.File
	close io.Closer
	files map[string]member
}

type member struct {
	at, size int64
	link     string // another member
}

// Bounds of an archive.
const (
	maxMembers    = 100_000
	maxMemberName = 512
)

// indexArchive lists the files of a tar.
func indexArchive(f *os.File) (*archive, error) {
	a := &archive{f: f, files: map[string]member{}}
	in := &position{f: f}
	r := tar.NewReader(in)
	for n := 0; ; n++ {
		h, err := r.Next()
		if err == io.EOF {
			return a, nil
		}
		if err != nil {
			return nil, invalid("it is not a tar: %v", err)
		}
		if n >= maxMembers {
			return nil, invalid("more than %d files in the archive", maxMembers)
		}
		name := path.Clean(h.Name)
		if len(name) > maxMemberName {
			continue // nothing that an image refers to
		}
		switch h.Typeflag {
		case tar.TypeReg:
			a.files[name] = member{at: in.at, size: h.Size}
		case tar.TypeSymlink: // docker save's equal layers
			a.files[name] = member{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			a.files[name] = member{link: path.Clean(h.Linkname)}
		}
	}
}

// position is a reader that knows its position. package tar seeks over contents.
type position struct {
	f  *os.File
	at int64
}

func (p *position) Read(b []byte) (int, error) {
	n, err := p.f.ReadAt(b, p.at)
	p.at += int64(n)
	return n, err
}

func (p *position) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += p.at
	case io.SeekEnd:
		info, err := p.f.Stat()
		if err != nil {
			return 0, err
		}
		offset += info.Size()
	}
	if offset < 0 {
		return 0, fs.ErrInvalid
	}
	p.at = offset
	return offset, nil
}

func (a *archive) find(name string) (member, error) {
	name = path.Clean(name)
	for range 8 {
		m, ok := a.files[name]
		if !ok {
			return m, fs.ErrNotExist
		}
		if m.link == "" {
			return m, nil
		}
		name = m.link
	}
	return member{}, invalid("%.80q is a link to itself", name)
}

func (a *archive) open(name string) (io.ReadCloser, error) {
	m, err := a.find(name)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(io.NewSectionReader(a.f, m.at, m.size)), nil
}

func (a *archive) Close() error { return a.close.Close() }

// openArchive opens an archive of the kind, or of either kind. It takes a copy of the descriptor of a file.
func openArchive(store *snapshots.Store, f *os.File, kind, tag string, most int64) (l Local, err error) {
	a, err := seekable(store, f, most)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.Close()
		}
	}()
	_, isLayout := a.files["index.json"]
	_, isDocker := a.files["manifest.json"]
	if kind == "docker-archive" || kind == "" && isDocker && !isLayout {
		return newDocker(a, tag, most)
	}
	return newLayout(a, tag)
}

// source is a file whose read errors name it, so that they are not taken for errors of the store.
type source struct{ f *os.File }

func (s source) Read(b []byte) (int, error) {
	n, err := s.f.Read(b)
	if err != nil && err != io.EOF {
		err = openError(s.f.Name(), err)
	}
	return n, err
}

// seekable returns the index of an archive. It copies a compressed one, or one that cannot be read repeatedly, to the store.
func seekable(store *snapshots.Store, f *os.File, most int64) (*archive, error) {
	var begin [4]byte
	n, err := f.ReadAt(begin[:], 0)
	if err == nil && layers.Compression(begin[:n]) == "" {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		own := os.NewFile(uintptr(fd), f.Name())
		a, err := indexArchive(own)
		if err != nil {
			own.Close()
			return nil, err
		}
		a.close = own
		return a, nil
	}
	draft, err := store.NewFile()
	if err != nil {
		return nil, err
	}
	r, err := layers.NewReader(source{f})
	if err == nil {
		_, err = io.Copy(layers.Bounded(draft.File, most), r)
		r.Close()
	}
	var a *archive
	if err == nil {
		a, err = indexArchive(draft.File)
	}
	if err != nil {
		draft.Close()
		return nil, snapshots.Failed(err)
	}
	a.close = draft
	return a, nil
}
