// Package files implements --put and --get: it copies files into a sandbox before its command starts, and out of
// it after all its processes have exited.
//
// Files in memory disappear with the sandbox's last mount namespace unless something holds them. The mount that
// contains the matches of a --get is therefore opened before the command starts. At the end no other process
// can reach it, so nothing changes in it. No link in it is followed.
package files

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Files are the files to copy into and out of a sandbox.
type Files struct {
	Put, Got workspace.Transfer
	puts     []put
	gets     []get
	root     *workspace.Root
}

type put struct {
	source *workspace.Source
	dest   string // absolute, in the sandbox
}

type get struct {
	arg     string
	pattern string         // absolute, in the sandbox
	to      *workspace.Dir // on the host
	mount   *workspace.Dir // the mount with the matches
	rest    string         // the pattern below that
	other   string         // another mount among the matches, which is not copied; "" for none
}

// maxBytes bounds all puts together; the caller sets the bounds of Got.
const maxBytes = 1 << 30

// Open opens the sources of puts, SRC[:DST], and the destinations of gets, GLOB[:DIR]. It returns nil if there are
// none. Relative paths in the sandbox start at workdir. Symbolic links in SRC are errors unless follow is set.
func Open(puts, gets []string, follow bool, workdir string, split func(string) []string) (_ *Files, err error) {
	if follow && len(puts) == 0 {
		return nil, usage("--follow-links: goes with --put")
	}
	if len(puts)+len(gets) == 0 {
		return nil, nil
	}
	f := new(Files)
	f.Put.Max.Bytes = maxBytes
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	from, host := workspace.Outside(safeopen.Source(follow)), workspace.Outside(safeopen.For)
	for _, arg := range puts {
		parts := split(arg)
		if len(parts) > 2 || parts[0] == "" {
			return nil, usage("--put %q: want SRC or SRC:DST, with \\: for a colon in a path", arg)
		}
		source, err := from.Source(parts[0])
		if err != nil {
			return nil, of("--put", err)
		}
		dest := cmp.Or(strings.Join(parts[1:], ""), ".")
		f.puts = append(f.puts, put{source, Within(workdir, dest)})
	}
	for _, arg := range gets {
		parts := split(arg)
		if len(parts) > 2 || parts[0] == "" {
			return nil, usage("--get %q: want GLOB or GLOB:DIR, with \\: for a colon in a path", arg)
		}
		if _, err := path.Match(parts[0], ""); err != nil {
			return nil, usage("--get %q: %v", arg, err)
		}
		dir := cmp.Or(strings.Join(parts[1:], ""), ".")
		if err := makeDir(dir); errors.As(err, new(*safeopen.Error)) {
			return nil, of("--get", err)
		} else if err != nil && !errors.Is(err, os.ErrExist) {
			return nil, usage("--get %q: %v", arg, err)
		}
		to, err := host.Dir(dir)
		if err != nil {
			return nil, of("--get", err)
		}
		pattern := path.Clean(Within(workdir, parts[0]))
		f.gets = append(f.gets, get{arg: arg, pattern: pattern, to: to})
	}
	return f, nil
}

func usage(format string, args ...any) error {
	return &result.Error{Code: "usage", Message: fmt.Sprintf(format, args...), Hint: "see sbxrun --help"}
}

// makeDir creates a directory, and those above it, without following links that others could have put there.
func makeDir(name string) error {
	dir, base := path.Split(strings.TrimRight(name, "/")) // not path.Dir, which would resolve ".."
	if base == "" {
		return os.ErrExist // the root
	}
	parent, err := safeopen.Dir(cmp.Or(dir, "."))
	if errors.Is(err, os.ErrNotExist) {
		if err = makeDir(dir); err == nil || errors.Is(err, os.ErrExist) {
			parent, err = safeopen.Dir(dir)
		}
	}
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	return unix.Mkdirat(parent, base, 0o777)
}

// Within returns a path in the sandbox. It does not use path.Join, which would remove a trailing slash, and with
// ".." the name of a link.
func Within(workdir, name string) string {
	if path.IsAbs(name) {
		return name
	}
	return workdir + "/" + name
}

// Held copies the puts to a sandbox whose command is held, and opens the mounts of gets. room is the sandbox's
// PID 1.
func (f *Files) Held(ctx context.Context, room *proc.Process, user *proc.Cred) error {
	fd, err := room.OpenRoot()
	if err != nil {
		return err
	}
	if f.root, err = workspace.Inside(fd, user); err != nil {
		return err
	}
	for _, p := range f.puts {
		if err := f.put(ctx, p); err != nil {
			return err
		}
	}
	mounts, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", room.PID)) // without it there is no warning
	for i := range f.gets {
		g := &f.gets[i]
		if g.mount, g.rest, err = f.root.Mount(g.pattern); err != nil {
			return of("--get "+g.arg, err)
		}
		g.other = other(string(mounts), g.pattern, g.mount.Name())
	}
	if len(f.gets) == 0 {
		f.Close() // otherwise it would hold the sandbox's memory
	}
	return nil
}

func (f *Files) put(ctx context.Context, p put) error {
	dir, name, err := f.root.Target(p.dest, p.source, false)
	if err == nil {
		err = f.Put.Copy(ctx, p.source, dir, name)
		dir.Close()
	}
	if err == nil && f.Put.LeftOut.Denied.Count > 0 {
		err = f.Put.LeftOut.Denied.First
	}
	err = of("--put", err)
	var e *result.Error
	if errors.Is(err, unix.EROFS) && errors.As(err, &e) {
		e.Hint = "name a place that the sandbox can write to: --put SRC:/tmp; or start in an empty home: --cwd none"
	}
	return err
}

// of prefixes an error with the flag.
func of(flag string, err error) error {
	var e *result.Error
	if !errors.As(err, &e) {
		if err != nil {
			err = fmt.Errorf("%s: %w", flag, err)
		}
		return err
	}
	told := *e
	told.Message = flag + ": " + e.Message
	return &told
}

// Collect copies the gets from a sandbox whose processes have all exited. It returns the arguments without a match.
// When ctx is done it returns the cause; completed files stay.
func (f *Files) Collect(ctx context.Context) (unmatched []string, err error) {
	for _, g := range f.gets {
		if g.mount == nil {
			continue // Held was not called
		}
		_, before := f.Got.Done()
		if err := f.Got.Matches(ctx, g.mount, g.rest, g.to); err != nil {
			return unmatched, fmt.Errorf("--get %s: %w", g.arg, err)
		}
		if _, now := f.Got.Done(); now == before {
			unmatched = append(unmatched, g.arg)
		}
		if g.other != "" {
			f.Got.LeftOut.Special.Add(usage("%q is another mount, so name it or files in it", g.other))
		}
	}
	return unmatched, nil
}

// Report counts the copied files; nil for nil.
func (f *Files) Report() *result.ReportCopied {
	if f == nil {
		return nil
	}
	carried := func(t *workspace.Transfer) result.ReportCarried {
		bytes, entries := t.Done()
		left := t.LeftOut.Count()
		return result.ReportCarried{Entries: entries - int64(left), Bytes: bytes, Links: t.Links, LeftOut: left}
	}
	return &result.ReportCopied{Put: carried(&f.Put), Got: carried(&f.Got)}
}

// Close releases everything.
func (f *Files) Close() {
	if f == nil {
		return
	}
	for _, p := range f.puts {
		p.source.Close()
	}
	for _, g := range f.gets {
		g.to.Close()
		if g.mount != nil {
			g.mount.Close()
		}
	}
	f.puts, f.gets = nil, nil
	if f.root != nil {
		f.root.Close()
		f.root = nil
	}
}
