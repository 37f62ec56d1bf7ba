package room

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

// This file shows devices of the host: see package devices.

// findDevices adds the mounts of the policy's devices to it, except files that the host's system shows anyway, perhaps
// at another path, where its own programs find them, and files with a destination that the user has chosen for another
// mount. root is an open root directory, or nil.
func (p *Plan) findDevices(pol *Policy, root *op) error {
	if len(pol.Devices) == 0 {
		return nil
	}
	set, err := devices.Find(pol.Devices)
	if err != nil {
		return err
	}
	p.devices = set
	users := slices.Clone(pol.Mounts)
	refuse := func(dest string, err error) error {
		return &result.Error{Code: "device", Message: fmt.Sprintf("cannot mount at %q for a device: %v", dest, err), Err: err}
	}
	for _, n := range set.Nodes {
		if _, err := CleanDest(n.Dest); err != nil {
			return refuse(n.Dest, err)
		}
		if slices.ContainsFunc(users, func(m Mount) bool { return m.Dest == n.Dest }) {
			return refuse(n.Dest, errors.New("another mount is there"))
		}
		pol.Mounts = append(pol.Mounts, Mount{Kind: device, Source: n.Source, Dest: n.Dest})
	}
	shown := func(dest string) bool {
		return root == nil && OfSystem(dest)
	}
	place := func(dest string) (string, error) {
		if root != nil && !slices.ContainsFunc(users, func(m Mount) bool { return m.Dest != "/" && values.Within(dest, m.Dest) }) {
			dest = inRoot(root, dest)
		}
		return CleanDest(dest)
	}
	for _, m := range set.Mounts {
		if shown(m.Source) {
			continue
		}
		dest, err := place(m.Dest)
		if err != nil {
			return refuse(m.Dest, err)
		}
		if !slices.ContainsFunc(users, func(m Mount) bool { return m.Dest == dest }) {
			pol.Mounts = append(pol.Mounts, Mount{Kind: ReadOnly, Source: m.Source, Dest: dest})
		}
	}
	set.Links = slices.DeleteFunc(set.Links, func(l devices.Link) bool { return shown(l.Dest) })
	for i, l := range set.Links {
		if set.Links[i].Dest, err = place(l.Dest); err != nil {
			return refuse(l.Dest, err)
		}
	}
	set.Libraries = slices.DeleteFunc(set.Libraries, shown)
	return pol.validate()
}

// inRoot returns the path without symbolic links of a file in a root directory. The file itself, and directories above
// it, may be missing. Without it, a mount in a directory that is a link, such as /lib, would cover the link.
func inRoot(root *op, name string) string {
	for _, own := range []string{"/proc", "/dev", "/sys", "/tmp", "/run", Home} {
		if values.Within(name, own) {
			return name
		}
	}
	top, err := realPath(root.from)
	if err != nil {
		return name
	}
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		fd, err := safeopen.InRoot(proc.Descriptor(root.from), dir, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			continue
		}
		f := os.NewFile(uintptr(fd), dir)
		real, err := realPath(f)
		f.Close()
		if err == nil && values.Within(real, top) {
			return path.Join("/", strings.TrimPrefix(real, top), strings.TrimPrefix(name, dir))
		}
	}
	return name
}

// linkDevices adds the symbolic links of devices, except in directories of the host, where they cannot be made.
func (p *Plan) linkDevices() {
	if p.devices == nil {
		return
	}
	for _, l := range p.devices.Links {
		if o := view(p.ops).mountOf(l.Dest); (o.kind == opRoot || o.src == "") && !view(p.ops).own(l.Dest) {
			p.ops = append(p.ops, op{kind: opSymlink, src: l.Target, dst: l.Dest})
		}
	}
}

// checkDevices checks the open device nodes, and gives the sandbox of another user the groups that it needs to open
// them. It leaves out nodes that the sandbox could not open, but it is an error if that is true for all nodes of a
// device.
func (p *Plan) checkDevices() error {
	if p.devices == nil {
		return nil
	}
	groups := slices.Clone(p.devices.Groups)
	if p.cred == nil {
		groups = nil // the caller keeps its groups
	}
	own := map[string]bool{} // devices that have nodes other than the common ones
	for _, n := range p.devices.Nodes {
		own[n.Name] = own[n.Name] || !n.Common
	}
	open, closed := map[string]bool{}, map[string]error{} // by device
	for _, n := range p.devices.Nodes {
		counts := !n.Common || !own[n.Name]
		i := slices.IndexFunc(p.ops, func(o op) bool { return o.kind == opDevice && o.dst == n.Dest })
		group, err := p.checkDevice(&p.ops[i], n)
		switch {
		case errors.As(err, new(closedError)):
			if counts {
				closed[n.Name] = err
			}
			p.LeftOut = append(p.LeftOut, err)
			p.ops[i].from.Close() // only a path
			p.ops = slices.Delete(p.ops, i, i+1)
			continue
		case err != nil:
			return err
		}
		open[n.Name] = open[n.Name] || counts
		if group != 0 {
			groups = append(groups, group)
		}
	}
	for name, err := range closed {
		if !open[name] {
			return err
		}
	}
	slices.Sort(groups)
	groups = slices.Compact(groups)
	if p.cred == nil || len(groups) == 0 {
		return nil
	}
	if copy(p.cred.Groups[:], groups) < len(groups) {
		return &result.Error{Code: "device", Message: fmt.Sprintf("the devices need %d groups; a sandbox can have %d", len(groups), len(p.cred.Groups))}
	}
	return nil
}

// checkDevice checks one device node. It does not open the device itself, which could have effects. group is not 0 if
// the sandbox needs it to open the node.
func (p *Plan) checkDevice(o *op, n devices.Node) (group uint32, err error) {
	refuse := func(hint, format string, args ...any) (uint32, error) {
		name := n.Name
		if name != n.Source {
			name += ": " + n.Source
		}
		return 0, &result.Error{Code: "device", Message: fmt.Sprintf("device %q: ", name) + fmt.Sprintf(format, args...), Hint: hint}
	}
	switch o.st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
	case unix.S_IFBLK:
		return refuse("mount its file system and --bind a directory", "it is a block device, and a sandbox may have only character devices")
	default:
		return refuse("--bind shows files and directories", "not a character device")
	}
	if n.Number != 0 && n.Number != o.st.Rdev {
		return refuse("the CDI specification may be out of date; generate it again", "its number is %d:%d, but the specification has %d:%d",
			unix.Major(o.st.Rdev), unix.Minor(o.st.Rdev), unix.Major(n.Number), unix.Minor(n.Number))
	}
	reason, err := devices.Refused(o.st.Rdev)
	if err != nil {
		return 0, err
	}
	if reason != "" {
		return refuse("", "no sandbox may have it: %s", reason)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(proc.Descriptor(o.from), &fs); err == nil && fs.Flags&unix.ST_NODEV != 0 {
		return refuse("name the node in /dev", "it cannot be opened, because its file system is mounted with nodev")
	}
	const read, write = 0o4, 0o2
	mode := o.st.Mode
	switch {
	case p.cred == nil:
		file := fmt.Sprintf("/proc/self/fd/%d", proc.Descriptor(o.from))
		if unix.Access(file, unix.R_OK) == nil || unix.Access(file, unix.W_OK) == nil {
			return 0, nil
		}
	case o.st.Uid == p.cred.UID:
		mode >>= 6
	case o.st.Gid == p.cred.GID:
		mode >>= 3
	case mode&(read|write) < mode>>3&(read|write) && o.st.Gid != 0:
		mode, group = mode>>3, o.st.Gid
	}
	if p.cred != nil && mode&(read|write) != 0 {
		return group, nil
	}
	uid := os.Geteuid()
	if p.cred != nil {
		uid = int(p.cred.UID)
	}
	hint := fmt.Sprintf("it belongs to uid %d and group %d, with mode %04o", o.st.Uid, o.st.Gid, o.st.Mode&0o7777)
	if p.cred == nil && o.st.Mode>>3&(read|write) != 0 && o.st.Gid != 0 {
		hint += fmt.Sprintf("; join the group, and log in again: sudo usermod -aG %d \"$USER\"", o.st.Gid)
	}
	_, err = refuse(hint, "uid %d cannot open it", uid)
	err.(*result.Error).Err = closedError{}
	return 0, err
}

// closedError is the cause if a device is permitted, but the sandbox could not open it.
type closedError struct{}

func (closedError) Error() string { return "permission denied" }

// libraryPath appends the directories of the devices' libraries to a value of LD_LIBRARY_PATH.
func (p *Plan) libraryPath(given string) string {
	dirs := slices.Clone(p.devices.Libraries)
	if given != "" {
		dirs = slices.Insert(dirs, 0, given)
	}
	return strings.Join(dirs, ":")
}
