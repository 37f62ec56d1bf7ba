package overlay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

func within(name, dir string) bool {
	return dir == "." || name == dir || strings.HasPrefix(name, dir+"/")
}

// Select returns the changes at and below these paths, with the directories that they need. Without
// paths it returns all.
func Select(list []Change, paths []string) (out []Change) {
	if len(paths) == 0 {
		return list
	}
	needed := map[string]bool{}
	for _, c := range list {
		for _, p := range paths {
			if within(c.Path, p) {
				for dir := path.Dir(c.Path); dir != "."; dir = path.Dir(dir) {
					needed[dir] = true
				}
				needed[c.Path] = true
			}
		}
	}
	for _, c := range list {
		if needed[c.Path] && (c.Kind != Mode || slices.ContainsFunc(paths, func(p string) bool { return within(c.Path, p) })) {
			out = append(out, c)
		}
	}
	return out
}

// Exclude returns the changes that no pattern matches. A pattern without a slash matches a name at any
// depth, any other a path; both match everything below as well. A pattern also excludes the deletion of a
// directory that it may match something in. The error is [path.ErrBadPattern].
func Exclude(list []Change, patterns []string) (out []Change, err error) {
	for _, c := range list {
		excluded := false
		for _, p := range patterns {
			ok, err := matches(p, &c)
			if err != nil {
				return nil, err
			}
			excluded = excluded || ok
		}
		if !excluded {
			out = append(out, c)
		}
	}
	return out, nil
}

func matches(pattern string, c *Change) (bool, error) {
	anywhere := !strings.Contains(strings.TrimRight(pattern, "/"), "/")
	pattern = path.Clean(pattern)
	parts := strings.Split(c.Path, "/")
	if anywhere {
		for _, part := range parts {
			if ok, err := path.Match(pattern, part); ok || err != nil {
				return ok, err
			}
		}
		return false, nil
	}
	levels := strings.Split(pattern, "/")
	n := min(len(levels), len(parts))
	if _, err := path.Match(pattern, ""); err != nil {
		return false, err
	}
	if n < len(levels) && !c.Removes() {
		return false, nil
	}
	for i := range n {
		if ok, err := path.Match(levels[i], parts[i]); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// GitData summarises changes of data in git repositories (.git), such as objects and refs, that are not
// held back.
type GitData struct {
	Dir     string // path of the repository
	Changes int
}

// Summarise leaves out of the list the changes of git's data and returns their numbers. A directory of a
// path in named is not summarised, because the caller asked for it.
func Summarise(list []Change, named []string) (rest []Change, repositories []GitData) {
	for _, c := range list {
		dir := hostfiles.GitDir(c.Path)
		if dir == "" || c.Held || c.Executable || c.Outside || slices.ContainsFunc(named, func(p string) bool { return within(p, dir) }) {
			rest = append(rest, c)
			continue
		}
		i := slices.IndexFunc(repositories, func(r GitData) bool { return r.Dir == dir })
		if i < 0 {
			i = len(repositories)
			repositories = append(repositories, GitData{Dir: dir})
		}
		repositories[i].Changes++
	}
	return rest, repositories
}

// Release clears Change.Held at and below a path that the caller has named, if the path itself is held
// back.
func (t *Tree) Release(list []Change, name string) {
	for i := range list {
		if c := &list[i]; c.Held && within(c.Path, name) && (c.Path == name || hostfiles.Trusted(path.Join(t.top, name), hostfiles.Directory)) {
			c.Held = false
		}
	}
}

// Top returns the changes that are not below another one in the list.
func Top(list []Change) (top []Change) {
	for _, c := range list {
		if n := len(top); n == 0 || !within(c.Path, top[n-1].Path) {
			top = append(top, c)
		}
	}
	return top
}

// Mark sets Change.Executable. It reads the first bytes of the files.
func (t *Tree) Mark(ctx context.Context, list []Change) {
	for i := range list {
		c := &list[i]
		if ctx.Err() != nil || c.Type != File || c.Kind == Deleted {
			continue
		}
		if c.mode&0o111 != 0 || script(t.Layers[c.layer], c.Path) {
			var was unix.Stat_t
			before := unix.Fstatat(proc.Descriptor(t.Source), c.Path, &was, unix.AT_SYMLINK_NOFOLLOW) == nil && was.Mode&0o111 != 0 || script(t.Source, c.Path)
			c.Executable = c.Kind == Added || c.Was != "" || !before
		}
	}
}

// script reports whether a file begins with "#!".
func script(root *os.File, name string) bool {
	fd, _, err := tree.OpenFile(proc.Descriptor(root), name)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var begin [2]byte
	n, _ := unix.Pread(fd, begin[:], 0)
	return string(begin[:n]) == "#!"
}

// Sum counts changes, and the bytes of added and changed files.
func Sum(list []Change) (n result.ReportChanges) {
	for _, c := range list {
		n.Count++
		if c.Type == File && c.Kind != Deleted && c.Same == "" {
			n.Bytes += c.Size
		}
	}
	return n
}

// maxPatch is the maximum size of a file whose text a patch shows.
const maxPatch = 1 << 20

// Patch writes the changes as a patch in the format of git(1). For binary and large files it says only
// that they differ.
func (t *Tree) Patch(to io.Writer, list []Change) error {
	for _, c := range list {
		if err := t.patch(to, &c); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tree) patch(to io.Writer, c *Change) error {
	switch {
	case c.Type == Other:
		return nil // never applied
	case c.Was != "":
		// A patch cannot change a file's type: it deletes the old one and adds the new one.
		was, now := *c, *c
		was.Kind, was.Type, was.Was = Deleted, c.Was, ""
		now.Kind, now.Was = Added, ""
		if err := t.patch(to, &was); err != nil {
			return err
		}
		return t.patch(to, &now)
	case c.Kind == Deleted && c.Type == Directory:
		return t.patchBelow(to, c)
	case c.Type == Directory:
		return nil // git(1) does not track directories
	}
	a, b := "a/"+c.Path, "b/"+c.Path
	headline := fmt.Sprintf("diff --git %s %s\n", quoted(a), quoted(b))
	mode, wasMode := gitMode(c.Type, c.Mode), gitMode(c.Type, c.WasMode)
	var what bytes.Buffer
	switch {
	case c.Kind == Added:
		fmt.Fprintf(&what, "new file mode %s\n", mode)
		a = "/dev/null"
	case c.Kind == Deleted:
		fmt.Fprintf(&what, "deleted file mode %s\n", wasMode)
		b = "/dev/null"
	case c.WasMode != "" && wasMode != mode: // git(1) tracks only this permission
		fmt.Fprintf(&what, "old mode %s\nnew mode %s\n", wasMode, mode)
	}
	if c.Kind != Mode {
		before, after := text(t.Source, c.Path, c.Kind == Added), text(t.Layers[c.layer], c.Path, c.Kind == Deleted)
		switch {
		case before == nil || after == nil:
			fmt.Fprintf(&what, "Binary files %s and %s differ\n", quoted(a), quoted(b))
		case string(before) != string(after):
			_, lines, _ := bytes.Cut(diff.Diff(named(a), before, named(b), after), []byte("\n")) // without its own header
			what.Write(lines)
		}
	}
	if what.Len() == 0 {
		return nil
	}
	if c.Held {
		headline = "# held back: programs on the host execute or trust this file\n" + headline // ignored by git apply
	}
	_, err := io.WriteString(to, headline+what.String())
	return err
}

// patchBelow shows the files of a deleted directory.
func (t *Tree) patchBelow(to io.Writer, c *Change) error {
	fd, err := tree.Open(proc.Descriptor(t.Source), c.Path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil // removed since
	}
	defer unix.Close(fd)
	w := t.comparison(context.Background())
	for e, err := range w.walk.Below(w.ctx, fd, c.Path) {
		if err != nil {
			return err
		}
		if kind := typeOf(&e.Stat); kind == File || kind == Link {
			if err := t.patch(to, &Change{Path: e.Path, Kind: Deleted, Type: kind, WasMode: octal(permissions(&e.Stat))}); err != nil {
				return err
			}
		}
	}
	return nil
}

// gitMode returns a mode in git(1)'s form, which keeps only the owner's execute permission.
func gitMode(t Type, mode string) string {
	bits, _ := strconv.ParseUint(mode, 8, 32)
	switch {
	case t == Link:
		return "120000"
	case bits&0o100 != 0:
		return "100755"
	}
	return "100644"
}

// text returns the content of a file or the target of a link, or nil if that is binary or too large. It
// returns an empty text if nothing is set.
func text(root *os.File, name string, nothing bool) []byte {
	if nothing {
		return []byte{}
	}
	fd, _, err := tree.OpenFile(proc.Descriptor(root), name)
	if err == unix.ELOOP {
		target, err := tree.Readlink(proc.Descriptor(root), name)
		if err != nil {
			return nil
		}
		return []byte(target)
	}
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxPatch+1))
	if err != nil || len(b) > maxPatch || bytes.ContainsFunc(b, func(r rune) bool { return r < ' ' && !strings.ContainsRune("\t\n\v\f\r\b\x1b", r) }) {
		return nil
	}
	return b // not nil for an empty file (io.ReadAll)
}

// named returns a name for the header lines of a patch. Like git(1), it ends a name with spaces with a tab,
// so that a reader does not take what follows a space for a time.
func named(name string) string {
	if strings.Contains(name, " ") {
		return quoted(name) + "\t"
	}
	return quoted(name)
}

// quoted quotes a name as git(1) does: control characters, other bytes than ASCII, and quotes in octal or
// with a backslash.
func quoted(name string) string {
	var b strings.Builder
	plain := true
	for i := range len(name) {
		switch c := name[i]; {
		case c == '"' || c == '\\':
			plain = false
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < ' ' || c >= 0x7f:
			plain = false
			fmt.Fprintf(&b, "\\%03o", c)
		default:
			b.WriteByte(c)
		}
	}
	if plain {
		return name
	}
	return `"` + b.String() + `"`
}

// maxTar bounds the files in a tar: a sparse file of the layer can be larger than any disk.
const maxTar = 64 << 30

// Tar writes the changes as the archive of a layer. All files belong to user 0.
func (t *Tree) Tar(to io.Writer, list []Change) error {
	a := tree.NewLayer(to, maxTar)
	for _, c := range list {
		if err := t.tar(a, &c); err != nil {
			return err
		}
	}
	return a.Close()
}

func (t *Tree) tar(a *tree.Archive, c *Change) error {
	st := unix.Stat_t{Mode: c.mode}
	switch {
	case c.Kind == Deleted:
		return a.Deleted(c.Path)
	case c.Type == Directory:
		return a.Dir(c.Path, &st)
	case c.Type == Link:
		return a.Link(c.Path, c.Target, &st)
	case c.Type == Other:
		return nil
	}
	fd, st, err := tree.OpenFile(proc.Descriptor(t.Layers[c.layer]), c.Path)
	if tree.Gone(err) {
		return nil // removed by the running sandbox
	}
	if err != nil {
		return fmt.Errorf("%.200q: %w", c.Path, err)
	}
	defer unix.Close(fd)
	return a.File(c.Path, fd, &st)
}
