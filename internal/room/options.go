package room

import (
	"fmt"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// Descriptors of bwrap next to 0, 1 and 2.
const (
	argsFD    = iota + 3 // its arguments
	infoFD               // its report of the room's PID 1
	readyFD              // the signal of the room's PID 1 that the room is built
	holdFD               // the program of the room's PID 1
	FirstCopy            // the next ones, for a [Plain] bwrap
)

// build creates bwrap's options.
func (p *Plan) build(pol *Policy) error {
	p.hostname, p.noUserns = pol.Hostname, !readOnlySysctl()
	p.words = p.options(false)
	if n := len(p.words); n > maxWords {
		return &result.Error{Code: "too-many-words", Message: fmt.Sprintf("%d words for binds are more than bubblewrap takes", n), Hint: "bind the directory above"}
	}
	switch {
	case pol.NoFilter:
		p.filter = seccomp.Off
	case p.noUserns:
		p.filter = seccomp.Default
	default:
		p.filter = seccomp.Namespaces
	}
	return nil
}

// ownMounts are bwrap's own tmpfs, which have no size limit and become read-only.
var ownMounts = []string{"/dev", "/"}

// options returns bwrap's options for the room. If whole is true, they include the work of the furnishing, for use
// without sbxrun, which requires bubblewrap 0.8, and a plan without overlays and root directory.
func (p *Plan) options(whole bool) (words []string) {
	add := func(args ...string) { words = append(words, args...) }
	more := func(args ...string) {
		if whole {
			words = append(words, args...)
		}
	}
	add("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup")
	if !p.hostNet && (whole || !p.ownNet) {
		add("--unshare-net")
	}
	add("--die-with-parent", "--cap-drop", "ALL")
	if p.noUserns {
		more("--disable-userns")
	}
	add(p.identity...)
	add("--hostname", p.hostname)
	if !whole && (p.places > 0 || len(p.trees) > 1) {
		add("--tmpfs", enter.LayersDir)
	}
	if view(p.ops).rooted() {
		add("--dir", enter.RootDir)
	}
	for _, tree := range p.trees {
		if !whole {
			add("--ro-bind", tree, p.treePlace(tree))
		}
	}
	staged, fd, dir := 0, FirstCopy, "/"
	made := map[string]bool{"/": true}
	for i := range p.ops {
		o := &p.ops[i]
		src, dst := o.src, o.at()
		if (o.kind == opDevice || view(p.ops).rooted()) && o.base == "" && !o.layer {
			// bwrap gives missing parents mode 0700, which would hide the mode of a root directory.
			parents := []string(nil)
			for dir := path.Dir(o.dst); !made[dir]; dir = path.Dir(dir) {
				parents, made[dir] = append(parents, dir), true
			}
			for _, dir := range slices.Backward(parents) {
				add("--dir", dir)
			}
		}
		if whole {
			dst = o.dst
		}
		if o.staged {
			src = path.Join(proc.StageDir, strconv.Itoa(staged))
			staged++
		}
		switch o.kind {
		case opSymlink:
			add("--symlink", src, dst)
		case opOverlay:
			add("--ro-bind", src, dst)
			if o.base == "" {
				add("--dir", o.dst)
			}
		case opBind, opRoot:
			if o.tree == "" || whole {
				add("--ro-bind", src, dst)
			} else if path.Dir(dst) != dir {
				dir = path.Dir(dst)
				add("--dir", dir)
			}
		case opBindRW:
			add("--bind", src, dst)
		case opDevice:
			add("--dev-bind", src, dst)
		case opCopy:
			switch {
			case whole && o.over:
				add("--ro-bind-data", strconv.Itoa(fd), dst) // needs no mode, because it is read-only
				fd++
			case whole:
				add("--perms", octalMode(enter.FileMode), "--file", strconv.Itoa(fd), dst)
				fd++
			case o.base == "" && path.Dir(dst) != dir:
				dir = path.Dir(dst)
				add("--dir", dir)
			}
		case opTmpfs:
			more("--perms", octalMode(tmpfsMode(dst)), "--size", strconv.FormatInt(o.size, 10))
			add("--tmpfs", dst)
		case opDir:
			add("--dir", o.dst)
		case opProc:
			add("--proc", o.dst)
		case opDev:
			add("--dev", o.dst)
		}
	}
	for _, dst := range ownMounts {
		more("--remount-ro", dst)
	}
	return words
}

// octalMode formats a mode for chmod(1).
func octalMode(mode uint32) string { return fmt.Sprintf("%04o", mode) }

// maxWords is slightly below bubblewrap's limit of 9,000 arguments.
const maxWords = 8900

// readOnlySysctl reports whether user.max_user_namespaces cannot be written to disable user namespaces: container
// engines mount /proc/sys read-only.
func readOnlySysctl() bool {
	var st unix.Statfs_t
	err := unix.Statfs("/proc/sys/user/max_user_namespaces", &st)
	return err != nil || st.Flags&unix.ST_RDONLY != 0
}
