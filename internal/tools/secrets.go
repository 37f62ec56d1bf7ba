package tools

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
)

// secretIn are names that count only in directories of some names.
var secretIn = map[string][]string{"config": {".cargo"}, "config.toml": {".cargo"}, "settings.xml": {".m2", "conf"}}

// secret reports whether a file holds credentials, by its name, or, of a .pem, its content.
func secret(path string) bool {
	name := strings.ToLower(filepath.Base(path))
	switch {
	case hostfiles.SecretFile(name):
		return true
	case slices.Contains(secretIn[name], filepath.Base(filepath.Dir(path))):
		return true
	case strings.HasPrefix(name, "id_") && filepath.Ext(name) != ".pub":
		kind, _, _ := strings.Cut(strings.TrimPrefix(name, "id_"), "_")
		return slices.Contains([]string{"rsa", "dsa", "ecdsa", "ed25519", "xmss"}, strings.TrimSuffix(kind, filepath.Ext(kind)))
	case filepath.Ext(name) == ".pem":
		return strings.Contains(head(path, 1<<20), "PRIVATE KEY")
	}
	return false
}

// head returns the beginning of a regular file, "" if it cannot be read.
func head(path string, most int) string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return ""
	}
	buf := make([]byte, most)
	n := 0
	for n < most {
		m, err := f.Read(buf[n:])
		n += m
		if err != nil {
			break
		}
	}
	return string(buf[:n])
}

// packages are the names of directories with files from packages and documentation, which are not the user's.
var packages = []string{"site-packages", "dist-packages", "node_modules", "gems", "include", "doc", "man", "html", "locale", "terminfo", "zoneinfo"}

// foreign reports whether a directory has only files from packages, so that no credentials are looked for: there are
// many, including private keys for their tests.
func foreign(dir string, above []os.DirEntry) bool {
	name, parent := filepath.Base(dir), filepath.Base(filepath.Dir(dir))
	switch {
	case slices.Contains(packages, name):
		return true
	case parent == "lib" && (strings.HasPrefix(name, "python3.") || strings.HasPrefix(name, "python2.")):
		return true
	case parent == ".cargo" && (name == "registry" || name == "git"):
		return true
	case parent == "pkg" && name == "mod":
		return true
	case name == "src" || name == "test" || name == "pkg" || name == "api": // of Go's own tree
		return slices.ContainsFunc(above, func(e os.DirEntry) bool {
			return e.Name() == "VERSION" && strings.HasPrefix(head(filepath.Join(filepath.Dir(dir), "VERSION"), 2), "go")
		})
	}
	return false
}

// Bounds of the search for credentials: names that are looked at in one directory that is shown, files
// that are covered one by one, and mounts that cover.
const (
	manyEntries = 20_000
	manySecrets = 100
	manyCovers  = 300
)

// cover returns the directories that can be shown, and mounts that hide credentials in them. It covers directories that
// exceed the limits of the search, and omits those that need too many covers.
func (f *finder) cover(dirs []string) (shown []string, covers []room.Mount) {
	c := coverer{tops: dirs, seen: map[string]bool{}}
	for _, top := range dirs {
		c.search(top, f.plain[top])
	}
	for _, top := range dirs {
		if !c.seen[top] {
			shown = append(shown, top)
		}
	}
	slices.SortFunc(c.mounts, func(a, b room.Mount) int { return strings.Compare(a.Dest, b.Dest) })
	covers = slices.DeleteFunc(c.mounts, func(m room.Mount) bool { return slices.Contains(dirs, m.Dest) })
	return shown, covers
}

// coverer searches directories that are to be shown.
type coverer struct {
	tops   []string
	seen   map[string]bool
	files  int
	mounts []room.Mount
}

// hide covers a file or directory. The name may be a link, whose target counts if it is shown.
func (c *coverer) hide(name string) {
	name = real(name)
	at := slices.IndexFunc(c.tops, func(top string) bool { return values.Within(name, top) })
	if name == "" || at < 0 || c.hidden(name) {
		return
	}
	st, err := os.Stat(name)
	if err != nil {
		return
	}
	dir := st.IsDir()
	if !dir {
		c.files++
	}
	switch {
	case len(c.mounts) >= manyCovers:
		name, dir = c.tops[at], true
	case c.files > manySecrets && !dir:
		name, dir = filepath.Dir(name), true
	}
	c.seen[name] = true
	if !dir {
		c.mounts = append(c.mounts, room.Mount{Kind: room.Empty, Dest: name})
		return
	}
	c.mounts = slices.DeleteFunc(c.mounts, func(m room.Mount) bool { return values.Within(m.Dest, name) })
	c.mounts = append(c.mounts, room.Mount{Kind: room.Tmpfs, Dest: name, Size: 4096})
}

// hidden reports whether a directory or one above it is covered.
func (c *coverer) hidden(dir string) bool {
	for ; dir != "/" && dir != "."; dir = filepath.Dir(dir) {
		if c.seen[dir] {
			return true
		}
	}
	return false
}

// search looks at all levels below top, the uppermost first. Of a plain directory, most directories in
// it are hidden.
func (c *coverer) search(top string, plain bool) {
	if foreign(top, nil) {
		return
	}
	left := manyEntries
	for todo := []string{top}; len(todo) > 0; todo = todo[1:] {
		dir := todo[0]
		if c.hidden(dir) {
			continue
		}
		var entries []os.DirEntry
		err := error(unix.E2BIG)
		if left > 0 {
			entries, err = read(dir, left)
			left -= len(entries)
		}
		if err != nil && !os.IsPermission(err) {
			c.hide(dir)
			continue
		}
		for _, e := range entries {
			name := filepath.Join(dir, e.Name())
			switch link := e.Type()&os.ModeSymlink != 0; {
			case (e.IsDir() || link) && hostfiles.PrivateDirs[e.Name()]:
				if st, err := os.Stat(name); err == nil && (st.IsDir() || secret(name)) {
					c.hide(name)
				}
			case e.IsDir() && plain && dir == top && !slices.Contains(code, e.Name()):
				c.hide(name)
			case e.IsDir():
				if !foreign(name, entries) {
					todo = append(todo, name)
				}
			case (link || e.Type().IsRegular()) && secret(name):
				c.hide(name)
			}
		}
	}
}

// openDir opens a directory. An earlier command may have put a named pipe there, which must not block us.
func openDir(dir string) (*os.File, error) {
	return os.OpenFile(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

// read returns the entries of a directory; more than most are an error.
func read(dir string, most int) ([]os.DirEntry, error) {
	d, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(most + 1)
	if len(entries) > most {
		return nil, unix.E2BIG
	}
	if len(entries) == 0 {
		err = nil // it is empty: io.EOF
	}
	return entries, err
}
