package room

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/public"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

// This file implements root directories: a [Mount] at / that replaces the host's system. bwrap builds the usual file
// tree without the system's directories, and the entering process lays it over the root directory: see [enter.Root].

// Rootfs returns the directory that replaces the host's system, or "".
func (p *Policy) Rootfs() string {
	if m := p.rootMount(); m != nil {
		return m.Source
	}
	return ""
}

// rootMount returns the mount that replaces the host's system, or nil.
func (p *Policy) rootMount() *Mount {
	if i := slices.IndexFunc(p.Mounts, func(m Mount) bool { return m.Dest == "/" }); i >= 0 {
		return &p.Mounts[i]
	}
	return nil
}

// rootOp returns the op for a root directory.
func rootOp(p *Policy, m *Mount, home string) (op, error) {
	o := op{kind: opRoot, src: m.Source, dst: "/", mount: m}
	if m.Kind == Overlaid {
		o.size = cmp.Or(m.Size, p.TmpSize)
	}
	var st unix.Stat_t
	err := unix.Stat(o.source(), &st) // also triggers an automount
	switch {
	case err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR:
		err = unix.ENOTDIR
	case err == nil:
		var host unix.Stat_t
		if unix.Stat("/", &host) == nil && host.Dev == st.Dev && host.Ino == st.Ino {
			return o, &result.Error{Code: "rootfs", Message: o.title() + " is the host's", Hint: "leave out --rootfs: a sandbox shows the host's system by default"}
		}
		if real, err := filepath.EvalSymlinks(m.Source); m.Image == "" && err == nil {
			if h := hostfiles.HomeWithin(real, home); h != "" {
				return o, &result.Error{Code: "rootfs", Message: fmt.Sprintf("%s holds the home directory %q, with its keys and tokens", o.title(), h), Hint: "name a directory with a system in it"}
			}
		}
		return o, nil
	}
	return o, &result.Error{Code: "rootfs", Message: fmt.Sprintf("%s: %v", o.title(), err), Hint: "name a directory with a system in it, such as one made by debootstrap", Err: err}
}

// accountOps are the sandbox's own accounts and host names. In an open root directory they are added to its accounts. With
// the host's network, the sandbox sees the host's names.
func accountOps(p *Policy, user User, hostname string, root *op) (ops []op, err error) {
	passwd, group := accounts(user)
	for _, f := range []struct {
		name string
		own  []byte
	}{{"/etc/passwd", passwd}, {"/etc/group", group}} {
		data := f.own
		if root != nil {
			theirs, err := readIn(root.from, f.name)
			switch {
			case err != nil:
				return nil, &result.Error{Code: "rootfs", Message: fmt.Sprintf("%s: %s: %v", root.title(), f.name, err), Err: err}
			case user.UID == 0: // the root directory's own name for it, which package managers expect
				data = merge(theirs, f.own)
			default:
				data = merge(f.own, theirs)
			}
		}
		ops = append(ops, op{kind: opCopy, dst: f.name, data: data})
	}
	switch {
	case p.Network != NetHost:
		ops = append(ops, hostsOp(hostname))
	case root != nil: // otherwise they are among the files of the host
		for _, name := range []string{"/etc/hosts", "/etc/resolv.conf"} {
			if data, ok := public.Copy(name); ok {
				ops = append(ops, op{kind: opCopy, src: name, dst: name, data: data})
			}
		}
	}
	return ops, nil
}

// merge returns the accounts of first, followed by the accounts of second whose names are not in first. A lookup by ID
// finds the first match.
func merge(first, second []byte) []byte {
	var out []byte
	names := map[string]bool{}
	for _, list := range [][]byte{first, second} {
		added := map[string]bool{}
		for line := range bytes.Lines(list) {
			name, _, _ := bytes.Cut(line, []byte(":"))
			if !names[string(name)] {
				out = append(append(out, bytes.TrimSuffix(line, []byte("\n"))...), '\n')
			}
			added[string(name)] = true
		}
		maps.Copy(names, added)
	}
	return out
}

// maxAccounts limits the size of a root directory's passwd and group.
const maxAccounts = 4 << 20

// readIn reads a small regular file of a root directory. Symbolic links are resolved within that directory. It returns
// nil if there is no such file.
func readIn(root *os.File, name string) ([]byte, error) {
	fd, err := safeopen.InRoot(proc.Descriptor(root), name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.EACCES, unix.ELOOP:
		return nil, nil
	default:
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxAccounts+1))
	if err == nil && len(data) > maxAccounts {
		err = fmt.Errorf("larger than %d MiB", maxAccounts>>20)
	}
	return data, err
}

// root returns the plan's root directory for the entering process; nil if the room shows the host's system.
func (p *Plan) root() *enter.Root {
	var r *enter.Root
	for i := range p.ops {
		switch o := &p.ops[i]; {
		case o.kind == opRoot:
			r = &enter.Root{Overlay: enter.Overlay{Lower: []enter.Bind{o.bind()}}}
			if o.overlay != nil {
				r.Overlay = *o.overlay
			}
		case r == nil, o.layer, o.base != "": // the root comes first; the others are not mounts in bwrap's root
		case o.kind == opSymlink, o.kind == opDir, o.kind == opCopy:
		case !slices.ContainsFunc(r.Moved, func(above string) bool { return values.Within(o.dst, above) }):
			r.Moved = append(r.Moved, o.dst)
		}
	}
	return r
}

// rooted reports whether the user's root directory replaces the host's system.
func (v view) rooted() bool { return len(v) > 0 && v[0].kind == opRoot }

// inRoot reports whether a path on the host belongs to the root directory.
func (v view) inRoot(host string) bool { return v.rooted() && values.Within(host, v[0].src) }

// below returns the path on the host of a sandbox path whose innermost mount is o.
func (o *op) below(p string) string {
	return path.Join(o.src, strings.TrimPrefix(strings.TrimPrefix(p, o.dst), "/"))
}

// rootError explains why the root directory could not be mounted.
func (p *Plan) rootError(step *proc.StartError) error {
	title := p.ops[0].title()
	e := &result.Error{Code: "rootfs", Message: fmt.Sprintf("cannot mount %s: %v", title, step), Err: step}
	switch {
	case step.Step == enter.StepSource:
		e.Message = fmt.Sprintf("cannot mount %s: it was replaced while the sandbox was set up", title)
	case step.Step == enter.StepLayer && step.Err == unix.EINVAL:
		e.Message = fmt.Sprintf("cannot mount %s: another file system is mounted within it", title)
	case step.Step == enter.StepXattr:
		if o := overlayError(step); o.Hint != "" {
			e.Message, e.Hint = strings.Replace(o.Message, "the overlay", title, 1), o.Hint
		}
	case step.Step == enter.StepOverlay && step.Err == unix.ENODEV:
		e.Hint = "this kernel has no overlayfs: modprobe overlay"
	case step.Step == enter.StepOverlay && (step.Err == unix.EPERM || step.Err == unix.ENOSYS):
		e.Hint = "root directories of ordinary users need Linux 5.11"
	}
	return e
}

// title returns the name of a root for messages. A user of a server may not know the path of an image.
func (o *op) title() string {
	if o.mount.Image != "" {
		return fmt.Sprintf("image %.19s", o.mount.Image)
	}
	return fmt.Sprintf("root directory %q", o.src)
}

// source returns the path for opening the source of o.
func (o *op) source() string { return cmp.Or(o.mount.Here, o.src) }
