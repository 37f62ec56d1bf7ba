package room

import (
	"errors"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// view maps paths in a planned sandbox to paths on the host. It follows symbolic links as the payload would: the target
// of a link is looked up in the sandbox.
type view []op

var (
	errNotVisible = errors.New("not visible in the sandbox")
	errLoop       = errors.New("too many levels of symbolic links")
)

// hiddenError is [errNotVisible] with the path that the sandbox does not show, after links.
type hiddenError struct{ path string }

func (e *hiddenError) Error() string { return errNotVisible.Error() }
func (e *hiddenError) Unwrap() error { return errNotVisible }

// bwrapRoot stands for bwrap's own empty root.
var bwrapRoot op

// mountOf returns the innermost op that contains a clean path.
func (v view) mountOf(p string) *op {
	best := &bwrapRoot
	for i := range v { // an op is large
		if o := &v[i]; o.kind != opSymlink && len(o.dst) >= len(best.dst) && values.Within(p, o.dst) {
			best = o
		}
	}
	return best
}

// link returns the target of a symbolic link that bwrap creates at p.
func (v view) link(p string) (string, bool) {
	for i := range v {
		if o := &v[i]; o.kind == opSymlink && o.dst == p {
			return o.src, true
		}
	}
	return "", false
}

// hostPath returns the host path of a clean sandbox path that is not a link created by bwrap; "" if it is not from the
// host.
func (v view) hostPath(p string) string {
	if o := v.mountOf(p); o.src != "" {
		return o.below(p)
	}
	return ""
}

// resolve follows every symbolic link of an absolute sandbox path and returns the host path of the final file. It
// returns [errNotVisible], or an error of lstat(2) on the host. An empty host path with a nil error is a directory that
// exists only in the sandbox.
func (v view) resolve(p string) (host string, err error) {
	const maxLinks = 40 // as in path_resolution(7)
	links := 0
	done, todo := "/", strings.Split(p, "/")
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, name)
		target, isLink := v.link(next)
		if !isLink {
			if v.mountOf(next).kind == opRoot {
				if v.own(next) {
					done = next // bwrap's directory covers whatever the root has there
					continue
				}
				if v.own(done) && !v.merged(done) {
					return "", unix.ENOENT
				}
			}
			host = v.hostPath(next)
			if host == "" {
				if !v.own(next) {
					return "", &hiddenError{path.Join(append([]string{next}, todo...)...)}
				}
				done = next
				continue
			}
			var st unix.Stat_t
			if err := unix.Lstat(host, &st); err != nil {
				if v.own(next) {
					done = next // bwrap creates it as the parent of a mount
					continue
				}
				return host, err
			}
			if st.Mode&unix.S_IFMT == unix.S_IFLNK {
				if target, err = os.Readlink(host); err != nil {
					return host, err
				}
				isLink = true
			}
		}
		if !isLink {
			done = next
			continue
		}
		if links++; links > maxLinks {
			return host, errLoop
		}
		if path.IsAbs(target) {
			done = "/"
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	if v.mountOf(done).kind == opRoot && v.own(done) && !v.merged(done) {
		return "", nil
	}
	return v.hostPath(done), nil
}

// merged reports whether one of bwrap's own directories shows the root's files, too. A directory of bwrap covers a
// link in the root, which must not be followed on the host.
func (v view) merged(dir string) bool {
	for ; dir != "/"; dir = path.Dir(dir) {
		var st unix.Stat_t
		if unix.Lstat(v.hostPath(dir), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false
		}
	}
	return true
}

// Hides reports whether a path, with links followed, does not lead to a file that the sandbox shows.
func (p *Plan) Hides(name string) bool {
	_, err := view(p.ops).resolve(name)
	return errors.Is(err, errNotVisible)
}

// ReadOnly reports whether a clean path is in one of the user's binds that is read-only.
func (p *Plan) ReadOnly(name string) bool {
	mount := view(p.ops).mountOf(name)
	return mount.mount != nil && mount.kind == opBind
}

// Overlaid reports whether a clean path is in an overlay.
func (p *Plan) Overlaid(name string) bool {
	return view(p.ops).mountOf(name).kind == opOverlay
}

// opened returns a path to the open source that had this path on the host, because the path may lead
// elsewhere by now. Other paths are returned unchanged.
func (v view) opened(host string) string {
	for _, o := range v {
		if o.mount != nil && o.from != nil && o.src == host {
			return "/proc/self/fd/" + strconv.Itoa(proc.Descriptor(o.from))
		}
	}
	return host
}

// layered reports whether a path may be in a layer of an overlay that was there before: a snapshot's, or one on disk.
func (v view) layered(p string) bool {
	m := v.mountOf(path.Clean(p)).mount
	return m != nil && (len(m.Lower) > 0 || m.Upper != "")
}

// isCopy reports whether a clean path is a file that is copied into the sandbox.
func (v view) isCopy(p string) bool {
	return v.mountOf(path.Clean(p)).kind == opCopy
}

// own reports whether bwrap creates p: as a mount, or as a parent directory of one.
func (v view) own(p string) bool {
	for i := range v {
		if values.Within(v[i].dst, p) {
			return true
		}
	}
	return false
}

// visible reports, judging only by the mounts, whether a clean path could exist.
func (v view) visible(p string) bool {
	for i := 1; i <= len(p); i++ {
		// A link at the top, such as /bin, has a visible target.
		if i < len(p) && p[i] != '/' {
			continue
		}
		if _, ok := v.link(p[:i]); ok {
			return true
		}
	}
	return v.hostPath(p) != ""
}

// identity returns the identity with which a payload of cred accesses a host path: the owner of the mount, if that is
// mapped to cred.
func (v view) identity(host string, cred *proc.Cred) *proc.Cred {
	for _, o := range v {
		if o.owner != nil && values.Within(host, o.src) {
			return o.owner
		}
	}
	return cred
}

// inDir joins dir and name, unless name is absolute. It does not clean the path, because dir/link/.. depends on
// the target of the link.
func inDir(dir, name string) string {
	if path.IsAbs(name) {
		return name
	}
	return dir + "/" + name
}
