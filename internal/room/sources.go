package room

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ownerToMap returns the owner of a writable bind's source, or of the bind that contains it, if the sandbox runs with
// another identity that the user did not request; otherwise nil.
func (p *Plan) ownerToMap(o *op, filtered bool) (*proc.Cred, error) {
	if !p.mapOwners || o.layer || o.kind != opBindRW && o.kind != opOverlay && !o.owned() {
		return nil, nil
	}
	source := o
	if o.mount.In != "" {
		// The sandbox gets the rights of the owner of the whole bind.
		if source = p.outer(o); source == nil {
			return nil, nil
		}
	}
	owner := proc.Cred{UID: source.st.Uid, GID: source.st.Gid}
	if owner.UID == p.cred.UID && owner.GID == p.cred.GID {
		return nil, nil
	}
	if !filtered && !o.owned() {
		return nil, &result.Error{Code: "idmap", Message: fmt.Sprintf("--seccomp off: the command could leave setuid programs of uid %d in %q", owner.UID, o.src),
			Hint: "--user UID:GID runs the sandbox as another user, or leave the filter on"}
	}
	return &owner, nil
}

// detach creates a detached mount of every staged source. It is accessible only by its descriptor and vanishes with it.
func (p *Plan) detach() (mounts []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(mounts)
		}
	}()
	maps := map[proc.Cred]*os.File{} // user namespaces, by owner
	defer func() {
		for _, ns := range maps {
			ns.Close()
		}
	}()
	for _, o := range p.staged() {
		fd, err := unix.OpenTree(proc.Descriptor(o.from), "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			if err == unix.EPERM {
				return mounts, p.notPermitted(o)
			}
			e := &result.Error{Code: "stage", Message: fmt.Sprintf("cannot bind %q: open_tree: %v", o.src, err), Hint: proc.DescriptorsHint(err), Err: err}
			return mounts, e
		}
		mounts = append(mounts, os.NewFile(uintptr(fd), o.src))
		if o.owner == nil {
			continue
		}
		if err := p.mapOwner(fd, o.owner, maps); err != nil {
			return mounts, &result.Error{Code: "idmap", Message: fmt.Sprintf("cannot let the sandbox, which runs as uid %d, write to %q as its owner: %v", p.cred.UID, o.src, idmapReason(fd, err)),
				Hint: cmp.Or(proc.DescriptorsHint(err), p.withoutMap(o)), Err: err}
		}
	}
	return mounts, nil
}

// notPermitted returns the error for root that lacks CAP_SYS_ADMIN, as in a container. It names a source that must be
// staged; the others are staged only because of that one.
func (p *Plan) notPermitted(o *op) error {
	for _, other := range p.staged() {
		if !reachable(other.src) {
			return &result.Error{Code: "stage", Message: fmt.Sprintf("cannot bind %q: only root can reach it, and this root lacks CAP_SYS_ADMIN", other.src), Err: unix.EPERM,
				Hint: "run sbxrun as an ordinary user, or give this container CAP_SYS_ADMIN"}
		}
		if other.owner != nil {
			o = other
		}
	}
	e := &result.Error{Code: "stage", Message: fmt.Sprintf("cannot bind %q: open_tree: %v", o.src, unix.EPERM), Err: unix.EPERM}
	if o.owner != nil {
		e.Hint, _, _ = strings.Cut(p.withoutMap(o), "; or use")
	}
	return e
}

// withoutMap returns a hint for a source that cannot be idmapped.
func (p *Plan) withoutMap(o *op) string {
	if o.owner.UID != 0 {
		return fmt.Sprintf("--user %d:%d runs the sandbox as the owner", o.owner.UID, o.owner.GID)
	}
	// Do not suggest changing the owner of system directories.
	if name := o.src; path.Dir(name) == "/" || slices.ContainsFunc([]string{"/proc", "/sys", "/dev"}, func(kernel string) bool { return values.Within(name, kernel) }) {
		return "name a directory below it that the sandbox is to write to; or show it read-only: --ro-bind"
	}
	return fmt.Sprintf("give it to the sandbox: chown %d:%d %s; or use a directory on another file system", p.cred.UID, p.cred.GID, values.ShellQuote(o.src))
}

// idmapReason explains an error of mount_setattr(2) or of creating a user namespace.
func idmapReason(fd int, err error) string {
	switch {
	case errors.Is(err, unix.ENOSYS):
		return "idmapped mounts need Linux 5.12"
	case errors.Is(err, unix.EPERM):
		return "idmapped mounts need CAP_SYS_ADMIN on the file system: " + err.Error()
	case errors.Is(err, unix.EINVAL):
		return "its file system, or one that is mounted below it, cannot be idmapped" + fileSystem(fd)
	}
	return err.Error()
}

// fileSystem names common file systems, for a message.
func fileSystem(fd int) string {
	names := map[int64]string{unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs", unix.FUSE_SUPER_MAGIC: "fuse", unix.V9FS_MAGIC: "9p",
		unix.TMPFS_MAGIC: "tmpfs, which can from Linux 6.3 on", unix.SYSFS_MAGIC: "sysfs", unix.PROC_SUPER_MAGIC: "proc"}
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) == nil && names[int64(st.Type)] != "" {
		return " (" + names[int64(st.Type)] + ")"
	}
	return ""
}

// mapOwner exchanges the owner and the sandbox's identity in a detached mount. All other IDs map to themselves, because
// files of unmapped IDs cannot be opened.
func (p *Plan) mapOwner(mount int, owner *proc.Cred, maps map[proc.Cred]*os.File) (err error) {
	ns := maps[*owner]
	if ns == nil {
		if ns, err = userNamespace(swap(owner.UID, p.cred.UID), swap(owner.GID, p.cred.GID)); err != nil {
			return fmt.Errorf("make a user namespace: %w", err)
		}
		maps[*owner] = ns
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(proc.Descriptor(ns))}
	if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return nil
}

// swap returns the map of a user namespace in which a and b are exchanged.
func swap(a, b uint32) []syscall.SysProcIDMap {
	const all = 1<<32 - 1 // number of IDs; the last number is not an ID
	a, b = min(a, b), max(a, b)
	if a == b {
		return []syscall.SysProcIDMap{{Size: all}}
	}
	var list []syscall.SysProcIDMap
	add := func(from, to, size int) {
		if size > 0 {
			list = append(list, syscall.SysProcIDMap{ContainerID: from, HostID: to, Size: size})
		}
	}
	low, high := int(a), int(b)
	add(0, 0, low)
	add(low, high, 1)
	add(low+1, low+1, high-low-1)
	add(high, low, 1)
	add(high+1, high+1, all-high-1)
	return list
}

// userNamespace returns a descriptor of a new user namespace with these maps. It is created with a process that
// executes the waiting program and is killed before userNamespace returns.
func userNamespace(uids, gids []syscall.SysProcIDMap) (*os.File, error) {
	hold, err := helper.HoldFile()
	if err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	// Descriptor 3 of the process is the program.
	attr := &os.ProcAttr{Env: []string{}, Files: []*os.File{null, null, null, hold}, Sys: &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: uids, GidMappings: gids, Pdeathsig: unix.SIGKILL,
	}}
	// Pdeathsig follows the thread that forked (prctl(2)).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	child, err := os.StartProcess("/proc/self/fd/3", []string{"sbxrun-room"}, attr)
	if err != nil {
		var call *os.PathError
		if errors.As(err, &call) {
			err = call.Err
		}
		return nil, err
	}
	defer func() {
		_ = child.Kill() // it waits forever
		_, _ = child.Wait()
	}()
	return os.Open("/proc/" + strconv.Itoa(child.Pid) + "/ns/user")
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// idmap describes the maps for an owner as extents of mount(8).
func (p *Plan) idmap(owner *proc.Cred) string {
	var words []string
	for i, extents := range [][]syscall.SysProcIDMap{swap(owner.UID, p.cred.UID), swap(owner.GID, p.cred.GID)} {
		for _, e := range extents {
			words = append(words, fmt.Sprintf("%c:%d:%d:%d", "ug"[i], e.ContainerID, e.HostID, e.Size))
		}
	}
	return strings.Join(words, " ")
}

// staged returns the user's binds, if the keeper has to stage them.
func (p *Plan) staged() []*op { return p.those(func(o *op) bool { return o.staged }) }

// stage lets the keeper bind the sources of the user's binds if the unprivileged uid cannot reach one of them, or one
// must be idmapped. bwrap resolves the path behind a descriptor (resolve_symlinks_in_ops), so passing descriptors is
// not enough. The keeper binds the sources to reachable paths in a mount namespace that only bwrap uses. It stages all
// of them: the staging directory hides /tmp, and a source that bwrap looked up by its path could become a link into
// that directory.
func (p *Plan) stage(filtered bool) error {
	need := false
	for i := range p.ops {
		if o := &p.ops[i]; o.mount != nil {
			var err error
			if o.owner, err = p.ownerToMap(o, filtered); err != nil {
				return err
			}
			need = need || o.owner != nil || !reachable(o.src)
			if o.kind == opBind && !o.layer && !o.owned() && closed(o.st, p.cred) {
				p.Closed = append(p.Closed, o.src)
			}
		}
	}
	if !need {
		return nil
	}
	if values.Within(p.Program.Path, proc.StageDir) {
		return &result.Error{Code: "bwrap-unusable", Message: fmt.Sprintf("%s: bubblewrap must not lie below %s, where root's own paths are bound", p.Program.Path, proc.StageDir),
			Hint: "install it elsewhere"}
	}
	for i := range p.ops {
		p.ops[i].staged = p.ops[i].mount != nil
	}
	return nil
}

// closed reports whether an identity certainly cannot access a file or directory, because only another owner has
// permissions. Then no ACL grants any, because the group bits are the mask of the ACL (acl(5)).
func closed(st *unix.Stat_t, cred *proc.Cred) bool { return st.Uid != cred.UID && st.Mode&0o077 == 0 }

// outer returns the open bind that contains the source of o ([Mount.In]), or nil.
func (p *Plan) outer(o *op) *op {
	if i := slices.IndexFunc(p.ops, func(other op) bool { return other.dst == o.mount.In && other.st != nil }); i >= 0 {
		return &p.ops[i]
	}
	return nil
}

// open opens the source of one of the user's binds, once: wherever its path leads later, the sandbox gets this file
// or directory, or does not start. For root, it follows no link that others could have created (package safeopen),
// because an earlier payload may have left one in a directory that it could write to.
//
// The user did not name a source within another bind. It is opened beneath that bind, without following links, because
// another sandbox with the same bind may replace it with a link at any time.
func (p *Plan) open(o *op) (err error) {
	if o.mount == nil {
		return nil
	}
	if o.from == nil {
		fd, name := -1, o.source()
		switch in := p.outer(o); {
		case o.mount.In != "" && in == nil:
			err = unix.ENOENT
		case in != nil:
			fd, err = safeopen.Beneath(proc.Descriptor(in.from), strings.TrimPrefix(strings.TrimPrefix(o.dst, in.dst), "/"), unix.O_PATH, 0, 0)
		case p.cred != nil:
			fd, err = safeopen.Open(name)
		default:
			fd, err = unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
		}
		if err == nil {
			o.from = os.NewFile(uintptr(fd), o.src)
		}
	}
	if err == nil {
		o.st = new(unix.Stat_t)
		err = unix.Fstat(proc.Descriptor(o.from), o.st)
	}
	if err == nil && o.st.Mode&unix.S_IFMT == unix.S_IFLNK { // O_PATH opens a link itself
		err = unix.ELOOP
	}
	if err == nil && p.cred != nil {
		o.src, err = realPath(o.from)
	}
	if err == nil {
		return nil
	}
	e := &result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: %v", o.src, err), Hint: proc.DescriptorsHint(err), Err: err}
	if o.mount.In != "" && err == unix.ELOOP {
		e.Message = fmt.Sprintf("cannot bind %q: a symbolic link is in the path", o.src)
	}
	if o.kind == opDevice {
		e.Code, e.Message = "device", fmt.Sprintf("cannot show device %q: %v", o.src, err)
	}
	if errors.As(err, new(*safeopen.Error)) {
		e.Hint = safeopen.Hint
	}
	return e
}

// realPath returns the path of an open file, without links.
func realPath(f *os.File) (string, error) {
	return os.Readlink("/proc/self/fd/" + strconv.Itoa(proc.Descriptor(f)))
}

// reachable reports whether everybody can search all directories of a path. It ignores groups and ACLs, because false
// is always a safe answer.
func reachable(name string) bool {
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return false
	}
	for dir := path.Dir(real); ; dir = path.Dir(dir) {
		st, err := os.Stat(dir)
		if err != nil || st.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == "/" {
			return true
		}
	}
}
