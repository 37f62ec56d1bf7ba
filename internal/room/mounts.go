package room

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/public"
	"github.com/sbxrun/sbxrun/internal/values"
)

// op is a step of bwrap's set-up, in the order of its arguments, and an entry of the [view].
type op struct {
	kind opKind
	dst  string
	src  string // binds: path on the host; symlinks: the target; copies of a host file: its path
	size int64  // tmpfs
	data []byte // contents of a copy
	over bool   // a copy that is mounted over an existing file
	// mount is the user's mount. It is empty for a layer, and nil for the sandbox's own parts.
	mount *Mount
	// from is the open source (O_PATH) of the mount. It stays open until the room is built, so that its inode number is not
	// reused. st is its status.
	from *os.File
	st   *unix.Stat_t
	// base is the bind of the host directory that contains dst, or "". With a place, bwrap mounts there, and the entering
	// process mounts at dst: see [enter.Mount].
	base, place string
	// tree is the directory from whose bind the entering process clones the mount; "" if bwrap binds it.
	tree    string
	file    bool           // not a directory; set only with tree
	layer   bool           // a temporary bind for an overlay
	overlay *enter.Overlay // of an opOverlay or writable opRoot
	staged  bool           // the keeper binds the source, because bwrap could not reach it
	// owner, if not nil, is the owner of the source on disk. The mount is idmapped (mount_setattr(2), Linux 5.12): the
	// owner's files belong to the sandbox's uid inside, and new files belong to the owner on disk.
	owner *proc.Cred
}

// at returns the path where bwrap mounts o.
func (o *op) at() string { return cmp.Or(o.place, o.dst) }

// host reports whether o shows a directory or file of the host.
func (o *op) host() bool {
	return o.kind == opBind || o.kind == opBindRW || o.kind == opOverlay || o.kind == opDevice
}

// owned reports whether the owner of a source that the sandbox cannot write to is mapped.
func (o *op) owned() bool { return o.kind == opRoot || o.mount.Owned }

// bind describes the mount for the entering process.
func (o *op) bind() enter.Bind {
	b := enter.Bind{Place: o.at()}
	if o.st != nil {
		b.Dev, b.Inode = o.st.Dev, o.st.Ino
	}
	return b
}

type opKind int

const (
	opSymlink opKind = iota
	opBind
	opBindRW
	opDevice
	opOverlay // a read-only bind over which the entering process mounts
	opCopy    // a copy of a small file: a bind costs about 0.13 ms, a copy next to nothing
	opTmpfs
	opDir
	opProc
	opDev
	opRoot // the user's root directory, below everything else
)

// toplevel are the directories of the host's system, shown read-only. On a merged-/usr system, all but /usr are symbolic
// links, and the sandbox gets the same links.
var toplevel = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}

// OfSystem reports whether a path belongs to the host's system.
func OfSystem(name string) bool {
	return slices.ContainsFunc(toplevel, func(top string) bool { return values.Within(name, top) })
}

// smallTmpfs is the size of writable directories that programs rarely fill.
const smallTmpfs = 64 << 20

// layout returns all parts of the sandbox's file tree: the default root and the user's mounts, parents before their
// children. root, if not nil, is an open [opRoot].
func layout(p *Policy, c Caller, user User, hostname string, root *op) ([]op, error) {
	var mounts []op
	for _, m := range p.Mounts {
		if m.Dest == "/" {
			continue
		}
		o, skip, err := mountOp(p, m)
		if err != nil {
			return nil, err
		}
		if !skip {
			mounts = append(mounts, o)
		}
	}
	files, err := accountOps(p, user, hostname, root)
	if err != nil {
		return nil, err
	}
	ops := make([]op, 0, 96) // as many as most systems have, because an op is large
	if root != nil {
		ops = append(ops, *root)
	} else {
		ops = systemOps(ops)
	}
	ops = append(append(ops, files...), op{kind: opProc, dst: "/proc"})
	if p.Meminfo != nil {
		// Each command mounts it over the file in its own /proc.
		ops = append(ops, op{kind: opCopy, dst: enter.MeminfoCopy, data: p.Meminfo})
	}
	ops = append(ops,
		op{kind: opDev, dst: "/dev"},
		op{kind: opTmpfs, dst: "/dev/shm", size: smallTmpfs},
		op{kind: opTmpfs, dst: "/tmp", size: p.TmpSize},
		op{kind: opTmpfs, dst: Home, size: p.TmpSize},
		op{kind: opDir, dst: "/run"},
	)
	ops = append(ops, systemData(len(p.Devices) > 0)...)
	if root == nil {
		ops = append(ops, op{kind: opDir, dst: "/var/tmp"})
		ops = systemParts(mounts, ops, p, c)
	}
	// A mount of the user replaces the defaults at and below its destination.
	ops = slices.DeleteFunc(ops, func(o op) bool {
		return slices.ContainsFunc(mounts, func(m op) bool { return values.Within(o.dst, m.dst) })
	})
	ops = append(ops, mounts...)
	slices.SortStableFunc(ops, func(a, b op) int { return depth(a.dst) - depth(b.dst) })
	return ops, nil
}

func depth(p string) int { return strings.Count(p, "/") }

func systemOps(ops []op) []op {
	for _, dir := range toplevel {
		if target, err := os.Readlink(dir); err == nil {
			ops = append(ops, op{kind: opSymlink, src: target, dst: dir})
		} else if errors.Is(err, unix.EINVAL) { // it exists and is no link
			ops = append(ops, op{kind: opBind, src: dir, dst: dir})
		}
	}
	return ops
}

// systemData shows the processors of the machine, for programs that ask how many there are, and the parts of /sys in
// which programs look for devices.
func systemData(devices bool) (ops []op) {
	names := []string{"/sys/devices/system"}
	if devices {
		names, _ = filepath.Glob("/sys/module/nvidia*") // the pattern is valid
		names = append(names, "/sys/bus/pci", "/sys/class/drm", "/sys/dev/char", "/sys/devices")
	}
	for _, name := range names {
		if unix.Access(name, unix.F_OK) == nil {
			ops = append(ops, op{kind: opBind, src: name, dst: name})
		}
	}
	return ops
}

// systemParts are the parts of /etc and /var/lib that the sandbox shows. mounts are the user's, and known are the
// sandbox's own.
func systemParts(mounts, known []op, p *Policy, c Caller) (ops []op) {
	parts := public.Etc(p.Network == NetHost)
	var groups []int
	if c.UID != 0 { // root drops its groups
		groups, _ = unix.Getgroups() // fails only if they change at the same time
		groups = slices.DeleteFunc(groups, func(gid int) bool { return gid == c.GID && c.GID == c.UID })
	}
	dests := make([]string, 0, len(mounts)+len(known)+len(parts))
	for i := range mounts {
		dests = append(dests, mounts[i].dst)
	}
	for i := range known {
		dests = append(dests, known[i].dst)
	}
	for i := range parts {
		dests = append(dests, parts[i].Name)
	}
	for _, part := range append(parts, public.Programs(p.Outside(c).UID, groups, dests)...) {
		o := op{kind: opBind, src: part.Name, dst: part.Name, tree: part.Tree, file: part.File}
		switch {
		case part.Target != "":
			o = op{kind: opSymlink, src: part.Target, dst: part.Name}
		case part.Data != nil:
			o = op{kind: opCopy, src: part.Name, dst: part.Name, data: part.Data}
		}
		known = append(known, o)
	}
	return known
}

// hostsOp returns an /etc/hosts without the host's names.
func hostsOp(hostname string) op {
	return op{kind: opCopy, dst: "/etc/hosts", data: []byte("127.0.0.1 localhost " + hostname + "\n::1 localhost " + hostname + "\n")}
}

// accounts are the contents of passwd and group: the accounts of the sandbox, not of the host.
func accounts(user User) ([]byte, []byte) {
	var passwd, group bytes.Buffer
	if user.UID != 0 {
		fmt.Fprintf(&passwd, "root:x:0:0:root:/root:/bin/sh\n")
	}
	fmt.Fprintf(&passwd, "%s:x:%d:%d:%s:%s:/bin/sh\n", UserName, user.UID, user.GID, UserName, Home)
	if user.GID != 0 {
		fmt.Fprintf(&group, "root:x:0:\n")
	}
	fmt.Fprintf(&group, "%s:x:%d:\n", UserName, user.GID)
	if user.UID != Nobody {
		fmt.Fprintf(&passwd, "nobody:x:%d:%d:nobody:/nonexistent:/bin/false\n", Nobody, Nobody)
	}
	if user.GID != Nobody {
		fmt.Fprintf(&group, "nogroup:x:%d:\n", Nobody)
	}
	return passwd.Bytes(), group.Bytes()
}

// mountOp checks one of the user's mounts against the host.
func mountOp(p *Policy, m Mount) (o op, skip bool, err error) {
	if m.Kind == Tmpfs {
		return op{kind: opTmpfs, dst: m.Dest, size: cmp.Or(m.Size, p.TmpSize)}, false, nil
	}
	if m.Kind == Empty {
		return op{kind: opCopy, dst: m.Dest, data: []byte("\n"), over: true}, false, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(cmp.Or(m.Here, m.Source), &st); err != nil { // triggers an automount, which opening with O_PATH does not
		if m.Try && (err == unix.ENOENT || err == unix.ENOTDIR) {
			return op{}, true, nil
		}
		e := &result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: %v", m.Source, err), Err: err}
		switch {
		case m.Kind == device:
			e.Code, e.Message = "device", fmt.Sprintf("cannot show device %q: %v", m.Source, err)
		case m.Kind == Overlaid:
			e.Message, e.Hint = fmt.Sprintf("cannot lay an overlay over %q: %v", m.Source, err), "name an existing directory"
		case err == unix.ENOENT:
			e.Hint = "create it, or use --ro-bind-try or --bind-try to leave it out when it is missing"
		}
		return op{}, false, e
	}
	o = op{kind: opBind, src: m.Source, dst: m.Dest, mount: &m}
	switch m.Kind {
	case ReadWrite:
		o.kind = opBindRW
	case device:
		o.kind = opDevice
	case Overlaid:
		o.kind, o.size = opOverlay, cmp.Or(m.Size, p.TmpSize)
	}
	return o, false, nil
}

// checkDests rejects a destination in another mount if it does not exist and cannot be created, because the directory
// is read-only, or if it is reached by a symbolic link. Both may change until the entering process mounts there. That
// checks again, but its message is less specific.
func checkDests(ops []op, v view) error {
	for i := range ops {
		o := &ops[i]
		if o.kind == opSymlink || o.kind == opCopy && !o.over || o.kind == opDir || o.kind == opRoot || o.tree != "" {
			continue
		}
		refuse := func(format string, args ...any) error {
			return &result.Error{Code: "bind-destination", Message: fmt.Sprintf("cannot mount at %q: ", o.dst) + fmt.Sprintf(format, args...),
				Hint: "mount it at another place, such as " + path.Join("/mnt", path.Base(o.dst))}
		}
		for dir := o.dst; dir != "/"; dir = path.Dir(dir) {
			if _, isLink := v.link(dir); isLink {
				return refuse("%s is a symbolic link in the sandbox", dir)
			}
		}
		parent := v.mountOf(path.Dir(o.dst))
		if parent.kind == opRoot { // bwrap's own directories cover the root's
			continue
		}
		if parent.kind == opCopy {
			return refuse("%s is a file", parent.dst)
		}
		if parent.src == "" {
			continue
		}
		host := parent.src
		for _, name := range strings.Split(strings.TrimPrefix(o.dst, parent.dst+"/"), "/") {
			host = path.Join(host, name)
			st, err := os.Lstat(host)
			switch {
			case err == nil && st.Mode()&fs.ModeSymlink != 0:
				return refuse("%q is a symbolic link", host)
			case err != nil && (parent.kind == opBind || parent.kind == opOverlay):
				return refuse("it does not exist in the read-only %s", parent.dst)
			}
		}
	}
	return nil
}

// mountError explains a failed mount of the entering process. It returns other errors unchanged.
func (p *Plan) mountError(err error, mounts []enter.Mount) error {
	step, ok := errors.AsType[*proc.StartError](err)
	if ok && step.Mount == len(mounts)+1 {
		return p.rootError(step)
	}
	if !ok || step.Mount < 1 || step.Mount > len(mounts) {
		return err
	}
	dest := mounts[step.Mount-1].Dest
	switch step.Step {
	case enter.StepSource:
		src := dest
		if i := slices.IndexFunc(p.ops, func(o op) bool { return o.dst == dest }); i >= 0 {
			src = p.ops[i].src
		}
		return &result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: it was replaced while the sandbox was set up", src),
			Hint: "try again when no other program moves or replaces it", Err: err}
	case enter.StepMount:
		cause := step.Err.Error()
		switch step.Err {
		case unix.ELOOP:
			cause = "a symbolic link is in the path"
		case unix.ESTALE, unix.ENOENT:
			cause = "a directory in the path was moved while the sandbox was set up"
		}
		return &result.Error{Code: "bind-destination", Message: fmt.Sprintf("cannot mount at %q: %s", dest, cause),
			Hint: "mount it at another place, such as " + path.Join("/mnt", path.Base(dest)), Err: err}
	}
	return err
}

// placeMounts decides which mounts bwrap creates below [enter.LayersDir]: overlays, those with a destination in a
// directory of the host, and the trees of clones.
func (p *Plan) placeMounts() {
	var hosts []string // parents first
	for i := range p.ops {
		o := &p.ops[i]
		if o.tree != "" && !slices.Contains(p.trees, o.tree) {
			p.trees = append(p.trees, o.tree)
		}
		if o.kind != opSymlink && o.kind != opDir && o.kind != opRoot {
			if n := slices.IndexFunc(hosts, func(dir string) bool { return values.Within(o.dst, dir) }); n >= 0 {
				o.base, o.place = hosts[n], p.place()
			} else if o.kind == opOverlay {
				o.place = p.place()
			}
		}
		if o.host() && o.base == "" {
			hosts = append(hosts, o.dst)
		}
	}
}

// treePlace returns where bwrap binds a tree. A single one needs no tmpfs at LayersDir.
func (p *Plan) treePlace(tree string) string {
	if p.places == 0 && len(p.trees) == 1 {
		return enter.LayersDir
	}
	return path.Join(enter.LayersDir, "tree"+strconv.Itoa(slices.Index(p.trees, tree)))
}

// place returns a new path below [enter.LayersDir].
func (p *Plan) place() string {
	p.places++
	return path.Join(enter.LayersDir, strconv.Itoa(p.places-1))
}
