package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
)

// memory is a source in memory.
type memory struct {
	raw   []byte
	blobs map[string][]byte
}

func (m memory) Manifest(context.Context) ([]byte, error) { return m.raw, nil }

func (m memory) Blob(_ context.Context, d Descriptor) (io.ReadCloser, error) {
	data, ok := m.blobs[d.Digest]
	if !ok {
		return nil, errors.New("no such blob")
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

// empty fails if the store has anything, or if there is a file next to it.
func empty(t *testing.T, s *snapshots.Store) {
	t.Helper()
	for _, dir := range []string{"images", "names", "layers", "tmp"} {
		names, err := os.ReadDir(filepath.Join(s.Path(), dir))
		check.That(t, err == nil && len(names) == 0, "%s has %v, %v", dir, names, err)
	}
	names, err := os.ReadDir(filepath.Dir(s.Path()))
	check.That(t, err == nil && len(names) == 1, "next to the store are %v, %v", names, err)
}

// Layers cannot reach outside of their tree. They are refused, or their files are somewhere inside.
func TestHostileLayers(t *testing.T) {
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	check.Must(t, os.WriteFile(secret, []byte("secret"), 0o600))
	up := strings.Repeat("../", 20)
	const refused = "!"
	tests := map[string]struct {
		layers [][]entry
		want   string // the tree, or refused
	}{
		"dotdot":                  {[][]entry{{{name: up + outside + "/f", body: "x"}}}, refused},
		"dotdot inside":           {[][]entry{{{name: "a/b/../f", body: "x"}}}, "\"a\" 40755\n\"a/f\" 100755 \"x\"\n"},
		"absolute":                {[][]entry{{{name: outside + "/f", body: "x"}}}, ""},
		"through a link":          {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}, {name: "l/f", body: "x"}}}, refused},
		"through a relative link": {[][]entry{{{name: "l", link: up + outside, kind: tar.TypeSymlink}, {name: "l/f", body: "x"}}}, refused},
		"through a lower link":    {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}}, {{name: "l/f", body: "x"}}}, "\"l\" 40755\n\"l/f\" 100755 \"x\"\n"},
		"listed over a link":      {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}}, {{name: "l/"}, {name: "l/f", body: "x"}}}, "\"l\" 40755\n\"l/f\" 100755 \"x\"\n"},
		"over a link":             {[][]entry{{{name: "l", link: secret, kind: tar.TypeSymlink}, {name: "l", body: "x"}}}, "\"l\" 100755 \"x\"\n"},
		"over a lower link":       {[][]entry{{{name: "l", link: secret, kind: tar.TypeSymlink}}, {{name: "l", body: "x"}}}, "\"l\" 100755 \"x\"\n"},
		"mode of a link":          {[][]entry{{{name: "l/", mode: 0o711}, {name: "l", link: outside, kind: tar.TypeSymlink}}}, fmt.Sprintf("\"l\" 120777 -> %q\n", outside)},
		"hard link outside":       {[][]entry{{{name: "h", link: up + secret, kind: tar.TypeLink}}}, refused},
		"hard link, absolute":     {[][]entry{{{name: "h", link: secret, kind: tar.TypeLink}}}, ""},
		"hard link to a link":     {[][]entry{{{name: "l", link: secret, kind: tar.TypeSymlink}, {name: "h", link: "l", kind: tar.TypeLink}, {name: "h", body: "x"}}}, fmt.Sprintf("\"h\" 100755 \"x\"\n\"l\" 120777 -> %q\n", secret)},
		"hard link below a link":  {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}, {name: "h", link: "l/secret", kind: tar.TypeLink}}}, fmt.Sprintf("\"l\" 120777 -> %q\n", outside)},
		"link below a lower link": {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}}, {{name: "h", link: "l/secret", kind: tar.TypeLink}}}, fmt.Sprintf("\"l\" 120777 -> %q\n", outside)},
		"hard link to itself":     {[][]entry{{{name: "h", body: "x"}, {name: "h", link: "h", kind: tar.TypeLink}}}, "\"h\" 100755 \"x\"\n"},
		"hard link to directory":  {[][]entry{{{name: "d/"}, {name: "h", link: "d", kind: tar.TypeLink}}}, refused},
		"hard link to the top":    {[][]entry{{{name: "h", link: ".", kind: tar.TypeLink}}}, refused},
		"deletion of dotdot":      {[][]entry{{{name: "a/f", body: "x"}}, {{name: "a/.wh..."}}}, refused},
		"deletion of a dot":       {[][]entry{{{name: "a/f", body: "x"}}, {{name: "a/.wh.."}}}, refused},
		"deletion of nothing":     {[][]entry{{{name: "a/.wh."}}}, refused},
		"deletion through a link": {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}}, {{name: "l/.wh.secret"}}}, fmt.Sprintf("\"l\" 120777 -> %q\n", outside)},
		"opaque through a link":   {[][]entry{{{name: "l", link: outside, kind: tar.TypeSymlink}}, {{name: "l/.wh..wh..opq"}}}, fmt.Sprintf("\"l\" 120777 -> %q\n", outside)},
		"deletion of the top":     {[][]entry{{{name: "f", body: "x"}}, {{name: ".wh..wh..opq"}, {name: "g", body: "y"}}}, "\"g\" 100755 \"y\"\n"},
		"link and deletion":       {[][]entry{{{name: "f", body: "x"}}, {{name: "g", link: "f", kind: tar.TypeLink}, {name: ".wh.f"}}}, "\"g\" 100755 \"x\"\n"},
		"links and deletions":     {[][]entry{{{name: "f", body: "x"}, {name: "d/f", body: "y"}}, {{name: "g", link: "f", kind: tar.TypeLink}, {name: "d/", mode: 0o700}, {name: "d/h", link: "g", kind: tar.TypeLink}, {name: ".wh.f"}, {name: "d/.wh..wh..opq"}}}, "\"d\" 40700\n\"d/h\" 100755 \"x\"\n\"g\" 100755 \"x\"\n"},
		"link over a directory":   {[][]entry{{{name: "f", body: "x"}, {name: "d/f", body: "y"}}, {{name: "d", link: "f", kind: tar.TypeLink}, {name: ".wh.f"}}, {{name: "d/"}}}, "\"d\" 40755\n"},
		"a file as directory":     {[][]entry{{{name: "f", body: "x"}, {name: "f/g", body: "y"}}}, refused},
		"a directory as file":     {[][]entry{{{name: "d/e/f", body: "x"}, {name: "d", body: "y"}, {name: "d/", mode: 0o700}}}, "\"d\" 40700\n"},
		"empty link":              {[][]entry{{{name: "l", kind: tar.TypeSymlink}}}, refused},
		"long link":               {[][]entry{{{name: "l", link: strings.Repeat("x", 5000), kind: tar.TypeSymlink}}}, refused},
		"long name":               {[][]entry{{{name: strings.Repeat("x", 300), body: "x"}}}, refused},
		"long path":               {[][]entry{{{name: strings.Repeat("x/", 2500) + "f", body: "x"}}}, refused},
		"deep":                    {[][]entry{{{name: strings.Repeat("x/", 150) + "f", body: "x"}}}, refused},
		"attributes":              {[][]entry{{{name: "d/", pax: map[string]string{"SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.user.overlay.opaque": "y"}}}}, "\"d\" 40755\n"},
		"devices":                 {[][]entry{{{name: "d", kind: tar.TypeBlock}, {name: "c", kind: tar.TypeChar}, {name: "p", kind: tar.TypeFifo}, {name: "f", body: "x"}}}, "\"f\" 100755 \"x\"\n"},
		"repeated":                {[][]entry{{{name: "d/", mode: 0o711}, {name: "d/f", body: "1"}, {name: "d/", mode: 0o755}, {name: "d/f", body: "2"}}}, "\"d\" 40755\n\"d/f\" 100755 \"2\"\n"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			var tars [][]byte
			for _, l := range tt.layers {
				tars = append(tars, tarOf(t, l...))
			}
			im := newImage(t, imageOptions{}, tars...)
			m, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{})
			switch {
			case tt.want == refused:
				check.That(t, result.CodeOf(err) == "damaged", "%v", err)
				empty(t, s)
			case err != nil:
				t.Error(err)
			case tt.want != "":
				check.Equal(t, listing(t, treeOf(t, s, m)), tt.want, "the tree is\n")
			}
			var st unix.Stat_t
			check.Must(t, unix.Stat(outside, &st))
			names, err := os.ReadDir(outside)
			check.That(t, err == nil && len(names) == 1 && (st.Mode&0o777 == 0o755 || st.Mode&0o777 == 0o700), "outside are %v, mode %o, %v", names, st.Mode, err)
			b, err := os.ReadFile(secret)
			check.That(t, err == nil && string(b) == "secret", "the secret is %q, %v", b, err)
		})
	}
}

// Manifests, configurations and blobs that contradict each other, or that are too large, are refused, and leave nothing.
func TestHostileManifests(t *testing.T) {
	layer := tarOf(t, entry{name: "f", body: "x"})
	type parts struct {
		im  *image
		raw []byte
		o   Options
	}
	index := func(list ...Descriptor) []byte {
		b, _ := json.Marshal(Manifest{SchemaVersion: 2, MediaType: MediaTypeIndex, Manifests: list})
		return b
	}
	here := Host()
	tests := map[string]func(p *parts){
		"not JSON":           func(p *parts) { p.raw = []byte("{") },
		"schema 1":           func(p *parts) { p.raw = []byte(`{"schemaVersion":1,"fsLayers":[]}`) },
		"neither":            func(p *parts) { p.raw = []byte(`{"schemaVersion":2}`) },
		"huge":               func(p *parts) { p.raw = bytes.Repeat([]byte(" "), snapshots.MaxImageText+1) },
		"many layers":        func(p *parts) { p.im.manifest.Layers = make([]Descriptor, 1000) },
		"many manifests":     func(p *parts) { p.raw = index(make([]Descriptor, 5000)...) },
		"no configuration":   func(p *parts) { delete(p.im.blobs, p.im.manifest.Config.Digest) },
		"huge configuration": func(p *parts) { p.im.manifest.Config.Size = 1 << 40 },
		"negative size":      func(p *parts) { p.im.manifest.Config.Size = -1 },
		"changed configuration": func(p *parts) {
			p.im.blobs[p.im.manifest.Config.Digest] = bytes.Replace(p.im.config, []byte("linux"), []byte("lunix"), 1)
		},
		"digest with a path": func(p *parts) { p.im.manifest.Layers[0].Digest = "sha256:../../../../etc/passwd" },
		"other hash":         func(p *parts) { p.im.manifest.Layers[0].Digest = "sha512:" + strings.Repeat("0", 128) },
		"more layers":        func(p *parts) { p.im.manifest.Layers = append(p.im.manifest.Layers, p.im.manifest.Layers[0]) },
		"changed layer": func(p *parts) {
			p.im.blobs[p.im.manifest.Layers[0].Digest] = tarOf(t, entry{name: "f", body: "y"})
		},
		"longer layer": func(p *parts) {
			d := p.im.manifest.Layers[0].Digest
			p.im.blobs[d] = append(bytes.Clone(p.im.blobs[d]), 0)
		},
		"shorter layer": func(p *parts) {
			d := p.im.manifest.Layers[0].Digest
			p.im.blobs[d] = p.im.blobs[d][:600]
		},
		"wrong size":   func(p *parts) { p.im.manifest.Layers[0].Size++ },
		"wrong DiffID": func(p *parts) { *p.im = *diffed(t, p.im, Digest([]byte("other"))) },
		"wrong digest": func(p *parts) { p.o.Digest = Digest(nil) },
		"other archive": func(p *parts) {
			p.im.manifest.Layers[0] = p.im.add(MediaTypeLayer, []byte("PK\x03\x04 not a tar"))
			*p.im = *diffed(t, p.im, p.im.manifest.Layers[0].Digest)
		},
		"encrypted": func(p *parts) { p.im.manifest.Layers[0].MediaType += "+encrypted" },
		"nested indexes": func(p *parts) {
			d := Descriptor{MediaType: MediaTypeManifest, Digest: Digest(p.im.raw()), Size: int64(len(p.im.raw())), Platform: &here}
			p.im.blobs[d.Digest] = p.im.raw()
			for range 10 {
				p.raw = index(d)
				d = p.im.add(MediaTypeIndex, p.raw)
				d.Platform = &here
			}
		},
		"index of itself": func(p *parts) {
			p.raw = index(Descriptor{MediaType: MediaTypeIndex, Digest: Digest([]byte("itself")), Size: 6, Platform: &here})
			p.im.blobs[Digest([]byte("itself"))] = p.raw
		},
		"larger than allowed": func(p *parts) { p.o.MaxSize = 1 << 10 },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			p := parts{im: newImage(t, imageOptions{}, layer)}
			change(&p)
			if p.raw == nil {
				p.raw = p.im.raw()
			}
			if m, err := Import(t.Context(), s, memory{p.raw, p.im.blobs}, p.o); err == nil {
				t.Errorf("imported %+v", m)
			} else if strings.ContainsAny(err.Error(), "\n") || len(err.Error()) > 500 {
				t.Errorf("%v", err)
			}
			if name != "larger than allowed" {
				empty(t, s)
			}
		})
	}
}

// diffed returns the image with another DiffID.
func diffed(t *testing.T, im *image, diff string) *image {
	t.Helper()
	im.config = bytes.Replace(im.config, []byte(Digest(im.tars[0])), []byte(diff), 1)
	d := im.add(MediaTypeConfig, im.config)
	im.manifest.Config = &d
	return im
}

// zeros reads as many zeros as it is long.
type zeros int64

func (z *zeros) Read(p []byte) (int, error) {
	if *z <= 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), int64(*z))
	clear(p[:n])
	*z -= zeros(n)
	return int(n), nil
}

// A layer of few bytes cannot become one of many, and a file of zeros takes no space.
func TestBomb(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	const size = 64 << 20
	check.Must(t, w.WriteHeader(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Mode: 0o644, Size: size}))
	z := zeros(size)
	_, err := io.Copy(w, &z)
	check.Must(t, err, w.Close())
	for _, kind := range []string{"gzip", "zstd"} {
		im := newImage(t, imageOptions{compression: kind}, b.Bytes())
		s := newStore(t)
		_, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{MaxSize: size / 2})
		check.That(t, result.CodeOf(err) == "too-large", "%s: %v", kind, err)
		empty(t, s)
		m, err := Import(t.Context(), s, memory{im.raw(), im.blobs}, Options{MaxSize: 2 * size})
		check.Must(t, err)
		var st unix.Stat_t
		check.Must(t, unix.Stat(treeOf(t, s, m)+"/zeros", &st))
		check.That(t, st.Size == size && st.Blocks <= 100, "%s: the file has %d bytes in %d blocks", kind, st.Size, st.Blocks)
	}
}
