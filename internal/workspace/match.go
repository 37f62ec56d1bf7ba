package workspace

import (
	"context"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount opens the mount that contains the matches of a pattern: its root, or the nearest directory to it that
// exists. It returns the rest of the pattern, which is "" if the pattern is the path of a mount. The directory
// stays usable after the sandbox's end.
func (r *Root) Mount(pattern string) (*Dir, string, error) {
	parts := strings.Split(strings.Trim(pattern, "/"), "/")
	n := 0 // parts without wildcards
	for n < len(parts) && parts[n] != "" && !strings.ContainsAny(parts[n], `*?[\`) {
		n++
	}
	var found *Dir
	var on uint64
	at := 0
	for ; n >= 0; n-- {
		name := "/" + strings.Join(parts[:n], "/")
		dir, err := r.dir(name, unix.RESOLVE_NO_SYMLINKS)
		if err != nil && found == nil {
			continue // missing, or a link, which is itself copied or leads nowhere
		}
		if err != nil {
			return found, strings.Join(parts[at:], "/"), nil
		}
		var st unix.Statx_t
		err = unix.Statx(dir.fd(), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
		if err == nil && (found == nil || st.Mnt_id == on) {
			if found != nil {
				found.Close()
			}
			found, on, at = dir, st.Mnt_id, n
			continue
		}
		dir.Close()
		if err != nil && found == nil {
			return nil, "", err
		}
		break
	}
	if found == nil {
		return nil, "", unix.ENOENT
	}
	return found, strings.Join(parts[at:], "/"), nil
}

// Matches copies the matches of a pattern below a mount to a directory, each under its own name. A name that
// begins with a dot needs a pattern that does. No link is followed.
func (t *Transfer) Matches(ctx context.Context, m *Dir, pattern string, to *Dir) error {
	if pattern == "" && m.Name() != "/" {
		source := &Source{Name: m.Name(), dir: m, fd: m.fd()}
		if err := unix.Fstat(source.fd, &source.st); err != nil {
			return about(m.Name(), err)
		}
		return t.into(ctx, source, &directory{side: to, fd: to.fd()}, source.Base())
	}
	w := t.walk(m)
	w.Pattern = strings.Split(pattern, "/")
	return about(m.Name(), t.below(ctx, w.Below(ctx, m.fd(), m.Name()), &directory{side: to, fd: to.fd()}, len(w.Pattern)-1, 0))
}
