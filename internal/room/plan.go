package room

import (
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
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Plan is a fully prepared sandbox that has not been started. It owns the descriptors for bwrap; Close closes them.
type Plan struct {
	Program Program
	Workdir string // of the payload
	// Found is the program that PATH selects for the command in the sandbox, and Instead the one that it selects on the
	// host, if that is another one, which the sandbox hides.
	Found, Instead string
	// Closed are read-only binds by root that the sandbox cannot read, because only their owner can.
	Closed []string
	// Devices are the names of the sandbox's devices: see [Policy].
	Devices []string
	// LeftOut are the errors of devices' nodes that the sandbox could not open, while it can open others of the device.
	LeftOut []error
	// Bounds apply to the command. The caller sets them.
	Bounds proc.Bounds

	hold    []*os.File // Policy.Hold, and the locks of overlays
	command []string
	path    string // PATH of the payload
	env     []values.Var
	words   []string // bwrap's options, for the room
	ops     []op
	// the policy's overlays, and their mounts for the entering process
	overlays []*Overlay
	mounted  []enter.Overlay
	devices  *devices.Set // nil for none
	places   int          // number of places below enter.LayersDir
	trees    []op         // binds in enter.LayersDir from which parts are cloned
	cred     *proc.Cred
	// identity are bwrap's options for the payload's identity inside.
	identity []string
	hostname string
	noUserns bool // processes in the room cannot create user namespaces
	// mapOwners: the user did not request cred, so written files get the owner of their bind.
	mapOwners bool
	hostNet   bool
	ownNet    bool // the command has its own network namespace, and the room the caller's
	terminal  bool
	filter    *seccomp.Filter // nil for none
}

// Caller describes the calling process.
type Caller struct {
	Path  string // PATH
	Home  string // HOME
	Dir   string // PWD: the path of the current directory, perhaps with links
	Bwrap string // the user's choice of bwrap: [ProgramVariable]
	UID   int    // effective
	GID   int
}

// ThisCaller describes this process.
func ThisCaller() Caller {
	return Caller{Path: os.Getenv("PATH"), Home: os.Getenv("HOME"), Dir: os.Getenv("PWD"), Bwrap: os.Getenv(ProgramVariable), UID: os.Geteuid(), GID: os.Getegid()}
}

// Descriptors of bwrap next to 0, 1 and 2.
const (
	argsFD    = iota + 3 // its arguments
	infoFD               // its report of the room's PID 1
	readyFD              // the signal of the room's PID 1 that the room is built
	holdFD               // the program of the room's PID 1
	FirstCopy            // the next ones, for a [Plain] bwrap
)

// Prepare plans a sandbox. It examines and opens files of the host, and creates and starts nothing.
// Errors are *[result.Error].
func Prepare(p Policy, c Caller) (_ *Plan, err error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if p.TmpSize == 0 {
		p.TmpSize = DefaultTmpSize
	}
	if p.Hostname == "" {
		p.Hostname = DefaultHostname
	}
	plan := &Plan{command: p.Command, Devices: p.Devices, hold: p.Hold, hostNet: p.Network == NetHost, terminal: p.Terminal}
	plan.ownNet = p.Alone && !plan.hostNet && len(p.Command) > 0
	defer func() {
		if err != nil {
			plan.Close()
		}
	}()
	user := plan.identify(&p, c)
	if err := checkIDs(user, p.Outside(c), p.User != nil); err != nil {
		return nil, err
	}
	if p.Tools != "" {
		c.Path = p.Tools
	}
	users := len(p.Mounts)
	if plan.Workdir, err = currentDirectory(&p, c.Home); err != nil {
		return nil, err
	}
	cwd := ""
	if len(p.Mounts) > users {
		cwd = p.Mounts[users].Source
	}
	if plan.Program, err = Find(c, cwd, p.Mounts); err != nil {
		return nil, err
	}
	if err := p.protect(plan.Workdir); err != nil {
		return nil, err
	}
	var root *op
	if m := p.rootMount(); m != nil {
		o, err := rootOp(&p, m)
		if err != nil {
			return nil, err
		}
		if err := plan.open(&o); err != nil {
			return nil, err
		}
		o.place, root = plan.place(), &o
		plan.ops = []op{o} // closed if layout fails
	}
	if err := plan.findDevices(&p, root); err != nil {
		return nil, err
	}
	if plan.ops, err = layout(&p, c, user, p.Hostname, root); err != nil {
		return nil, err
	}
	for i := range plan.ops {
		if err := plan.open(&plan.ops[i]); err != nil {
			return nil, err
		}
	}
	if err := plan.checkDevices(); err != nil {
		return nil, err
	}
	if err := checkDests(plan.ops, plan.ops); err != nil {
		return nil, err
	}
	plan.linkDevices()
	if root == nil {
		plan.linkPath(plan.Workdir)
		if sameDirectory(c.Dir, ".") {
			plan.linkPath(c.Dir)
		}
	}
	v := view(plan.ops)
	plan.placeMounts()
	if err := plan.layOverlays(); err != nil {
		return nil, err
	}
	if plan.cred != nil {
		if err := plan.stage(!p.NoFilter); err != nil {
			return nil, err
		}
	}
	if err := checkWorkdir(v, plan.Workdir, plan.cred); err != nil {
		return nil, err
	}
	sandboxPath, given := p.Env.Lookup("PATH")
	switch {
	case given:
	case v.rooted():
		sandboxPath = defaultPath
	default:
		sandboxPath = sandboxPathOf(v, c.Path)
	}
	if len(p.Command) > 0 {
		found, err := "", error(nil)
		if !p.puts(p.Command[0], plan.Workdir) {
			found, err = checkCommand(v, p.Command[0], plan.Workdir, sandboxPath, c)
		}
		if err != nil {
			return nil, err
		}
		if found != "" && !given && !v.rooted() {
			plan.Found, plan.Instead = found, insteadOf(v, found, sandboxPath, c.Path)
		}
	}
	plan.environment(&p, sandboxPath)
	if err := plan.build(&p); err != nil {
		return nil, err
	}
	return plan, nil
}

// linkPath adds the symbolic links of a path, if it leads to a visible directory of the host: with /home -> /var/home,
// for example, a program may use either path.
func (p *Plan) linkPath(name string) {
	const maxLinks = 40
	v := view(p.ops)
	var links []op
	done, todo := "/", strings.Split(name, "/")
	for n := 0; len(todo) > 0; todo = todo[1:] {
		if todo[0] == ".." {
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, todo[0])
		target, err := os.Readlink(next)
		if err != nil {
			done = next
			continue
		}
		if n++; n > maxLinks {
			return
		}
		if !v.own(next) && v.hostPath(next) == "" {
			links = append(links, op{kind: opSymlink, src: target, dst: next})
		}
		if path.IsAbs(target) {
			done = "/"
		}
		todo = append([]string{""}, append(strings.Split(target, "/"), todo[1:]...)...)
	}
	if v.hostPath(done) != "" {
		p.ops = append(p.ops, links...)
	}
}

// sameDirectory reports whether two paths lead to the same directory; a relative one starts at the current directory.
func sameDirectory(a, b string) bool {
	var x, y unix.Stat_t
	return path.IsAbs(a) && unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev && x.Ino == y.Ino
}

// NoUserns reports whether processes in the room cannot create user namespaces, regardless of the filter.
func (p *Plan) NoUserns() bool { return p.noUserns }

// Alone reports whether the network namespace belongs to the command and not to the room: see [Policy].
func (p *Plan) Alone() bool { return p.ownNet }

// Cred returns the identity of bwrap; nil if it is the same as sbxrun's.
func (p *Plan) Cred() *proc.Cred { return p.cred }

// Fresh returns the writable directories in memory, for [enter.Entry.Fresh]. It returns none if one of them contains a
// mount, which would be hidden.
func (p *Plan) Fresh() (list []enter.Tmpfs) {
	for _, o := range p.ops {
		if o.kind != opTmpfs {
			continue
		}
		for _, other := range p.ops {
			if other.kind != opTmpfs && values.Within(other.dst, o.dst) {
				return nil
			}
		}
		if o.base != "" { // commands may replace directories in its path
			return nil
		}
		list = append(list, o.tmpfs())
	}
	return list
}

// Close closes the plan's descriptors, which are not needed after Start.
func (p *Plan) Close() {
	for _, o := range p.ops {
		o.from.Close() // Close of a nil file only returns an error
	}
	for _, o := range p.overlays {
		o.Close()
	}
	p.ops, p.overlays = nil, nil
}

// staged returns the user's binds, if the keeper has to stage them.
func (p *Plan) staged() []*op { return p.those(func(o *op) bool { return o.staged }) }

func (p *Plan) those(which func(*op) bool) (list []*op) {
	for i := range p.ops {
		if which(&p.ops[i]) {
			list = append(list, &p.ops[i])
		}
	}
	return list
}

// Outside returns the identity of the sandbox's processes and files as seen from outside.
func (p *Policy) Outside(c Caller) User {
	user := User{UID: uint32(c.UID), GID: uint32(c.GID)}
	if c.UID == 0 {
		user = User{UID: Nobody, GID: Nobody}
		if p.User != nil && p.User.UID != 0 {
			user = *p.User
		}
		if user.GID == 0 {
			user.GID = Nobody
		}
	}
	return user
}

// identify decides the payload's identity. If root starts sbxrun, bwrap runs with an unprivileged uid, because a
// payload with uid 0 outside would own all of root's files. Inside, the payload may still have uid 0.
func (p *Plan) identify(pol *Policy, c Caller) (user User) {
	user = pol.Outside(c)
	if c.UID == 0 {
		p.cred = &proc.Cred{UID: user.UID, GID: user.GID}
		p.mapOwners = pol.User == nil || pol.User.UID == 0
	}
	inside := pol.User
	if inside == nil {
		inside = pol.Inside
	}
	if inside != nil && *inside != user {
		user = *inside
		p.identity = []string{"--uid", strconv.Itoa(int(user.UID)), "--gid", strconv.Itoa(int(user.GID))}
	}
	return user
}

// checkIDs rejects IDs that bubblewrap (at least up to 0.12) writes into uid_map as negative numbers.
func checkIDs(inside, outside User, named bool) error {
	for _, id := range []uint32{inside.UID, inside.GID, outside.UID, outside.GID} {
		if id < 1<<31 {
			continue
		}
		e := &result.Error{Code: "user", Message: fmt.Sprintf("bubblewrap cannot set up a sandbox for uid or gid %d: ids must be below %d", id, uint32(1<<31)), Hint: "run sbxrun as another user"}
		if named {
			e.Hint = "name other ids with --user"
		}
		return e
	}
	return nil
}

// environment sets the payload's environment: the defaults and the additions of the policy. bwrap itself runs with an
// empty environment, because a LD_PRELOAD for the payload must not affect bwrap, which runs outside the sandbox.
func (p *Plan) environment(pol *Policy, sandboxPath string) {
	p.path = sandboxPath
	const libraries = "LD_LIBRARY_PATH"
	var set values.Environment
	set.Put(values.Var{Name: "PATH", Value: sandboxPath})
	set.Put(values.Var{Name: "HOME", Value: Home})
	set.Put(values.Var{Name: "USER", Value: UserName})
	set.Put(values.Var{Name: "LOGNAME", Value: UserName})
	for _, v := range pol.Env.Vars() {
		set.Put(v)
	}
	defaults := []values.Var{{Name: "PYTHONUNBUFFERED", Value: "1"}}
	if !pol.Captured {
		defaults = nil
	}
	if !slices.ContainsFunc([]string{"LANG", "LC_ALL", "LC_CTYPE"}, func(name string) bool { _, given := set.Lookup(name); return given }) {
		defaults = append(defaults, values.Var{Name: "LANG", Value: "C.UTF-8"}) // in the C locale, programs print ? instead of non-ASCII characters
	}
	for _, v := range defaults {
		if _, given := set.Lookup(v.Name); !given {
			set.Put(v)
		}
	}
	if p.devices != nil {
		for _, v := range p.devices.Env.Vars() {
			if _, given := set.Lookup(v.Name); !given {
				set.Put(v)
			}
		}
		if len(p.devices.Libraries) > 0 {
			given, _ := set.Lookup(libraries)
			set.Put(values.Var{Name: libraries, Value: p.libraryPath(given)})
		}
	}
	set.Put(values.Var{Name: "PWD", Value: p.Workdir})
	p.env = set.Vars()
}

// build creates bwrap's options.
func (p *Plan) build(pol *Policy) error {
	p.hostname, p.noUserns = pol.Hostname, !readOnlySysctl()
	for i := range p.trees {
		// Without other mounts in it, there is no need for a tmpfs at LayersDir.
		if p.trees[i].dst = enter.LayersDir; p.places > 0 || len(p.trees) > 1 {
			p.trees[i].dst = p.place()
		}
	}
	p.words = p.options(false)
	if n := len(p.words); n > maxWords {
		return &result.Error{Code: "too-many-words", Message: fmt.Sprintf("%d words for binds are more than bubblewrap takes", n), Hint: "bind the directory above"}
	}
	if !pol.NoFilter {
		p.filter = &seccomp.Filter{Namespaces: !p.noUserns}
	}
	return nil
}

// ownMounts are bwrap's own tmpfs, which have no size limit and become read-only.
var ownMounts = []string{"/dev", "/"}

// options returns bwrap's options for the room. If whole is true, they include the work of the furnishing, for use
// without sbxrun, which requires bubblewrap 0.8.
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
	if p.places > 0 && !whole {
		add("--tmpfs", enter.LayersDir)
	}
	if view(p.ops).rooted() && !whole {
		add("--dir", enter.RootDir)
	}
	for _, tree := range p.trees {
		if !whole {
			add("--ro-bind", tree.src, tree.dst)
		}
	}
	staged, fd, dir := 0, FirstCopy, "/"
	made := map[string]bool{"/": true}
	for i := range p.ops {
		o := &p.ops[i]
		src, dst := o.src, o.at()
		if (o.kind == opDevice || view(p.ops).rooted()) && o.base == "" && !o.layer {
			// bwrap gives missing parents mode 0700, which would hide that of a root directory.
			parents := []string(nil)
			for dir := path.Dir(dst); !made[dir]; dir = path.Dir(dir) {
				parents, made[dir] = append(parents, dir), true
			}
			for _, dir := range slices.Backward(parents) {
				add("--dir", dir)
			}
		}
		if whole && !o.layer {
			dst = o.dst
		}
		if o.staged {
			src = path.Join(proc.StageDir, strconv.Itoa(staged))
			staged++
		}
		switch o.kind {
		case opSymlink:
			add("--symlink", src, dst)
		case opBind, opOverlay, opRoot:
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

// furnishing returns the work of the entering process in the new room.
func (p *Plan) furnishing() *enter.Furnishing {
	f := &enter.Furnishing{ReadOnly: ownMounts, NoUserns: p.noUserns, OwnNet: p.ownNet}
	overlays := p.mounted
	for i := range p.ops {
		o := &p.ops[i]
		switch o.kind {
		case opTmpfs:
			t := o.tmpfs()
			t.Dest = o.at()
			f.Tmpfs = append(f.Tmpfs, enter.Mounted{Tmpfs: t, Mode: tmpfsMode(o.dst)})
		case opCopy:
			f.Files = append(f.Files, enter.File{Dest: o.at(), Data: o.data})
		}
		m := enter.Mount{Dest: o.dst, Base: o.base, File: o.kind == opCopy || o.st != nil && o.st.Mode&unix.S_IFMT != unix.S_IFDIR, Bind: o.bind()}
		if o.kind == opOverlay {
			m.Overlay, overlays = &overlays[0], overlays[1:]
		}
		if o.tree != "" {
			f.Clones = append(f.Clones, enter.Clone{Source: p.tree(o) + strings.TrimPrefix(o.src, o.tree), Dest: o.dst, File: o.file})
			continue
		}
		if m.Base != "" || o.host() && o.users && !o.layer {
			f.Mounts = append(f.Mounts, m)
		}
	}
	if f.Root = p.root(); f.Root != nil && f.Root.Overlay != nil {
		f.ReadOnly = []string{"/dev"}
	}
	return f
}

// maxWords is slightly below bubblewrap's limit of 9,000 arguments.
const maxWords = 8900

// tmpfs returns the mount options of an opTmpfs.
func (o *op) tmpfs() enter.Tmpfs {
	return enter.Tmpfs{Dest: o.dst, Options: "mode=" + octalMode(tmpfsMode(o.dst)) + ",size=" + strconv.FormatInt(o.size, 10) + ",nr_inodes=" + enter.Inodes(o.size)}
}

// tmpfsMode returns the mode that programs expect.
func tmpfsMode(dst string) uint32 {
	switch dst {
	case "/tmp", "/var/tmp", "/dev/shm":
		return 0o1777
	case Home:
		return 0o700
	}
	return 0o755
}

// readOnlySysctl reports whether user.max_user_namespaces cannot be written to disable user namespaces: container
// engines mount /proc/sys read-only.
func readOnlySysctl() bool {
	var st unix.Statfs_t
	err := unix.Statfs("/proc/sys/user/max_user_namespaces", &st)
	return err != nil || st.Flags&unix.ST_RDONLY != 0
}

// stage lets the keeper bind the sources of the user's binds if the unprivileged uid cannot reach one of them, or one
// must be idmapped. bwrap resolves the path behind a descriptor (resolve_symlinks_in_ops), so passing descriptors is
// not enough. The keeper binds the sources to reachable paths in a mount namespace that only bwrap uses. It stages all
// of them: the staging directory hides /tmp, and a source that bwrap looked up by its path could become a link into
// that directory.
func (p *Plan) stage(filtered bool) error {
	need := false
	for i := range p.ops {
		if o := &p.ops[i]; o.users {
			var err error
			if o.owner, err = p.ownerToMap(o, filtered); err != nil {
				return err
			}
			need = need || o.owner != nil || !reachable(o.src)
			if o.kind == opBind && !o.layer && !o.owned && closed(o.st, p.cred) {
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
		p.ops[i].staged = p.ops[i].users
	}
	return nil
}

// closed reports whether an identity certainly cannot access a file or directory, because only another owner has
// permissions. Then no ACL grants any, because the group bits are the mask of the ACL (acl(5)).
func closed(st *unix.Stat_t, cred *proc.Cred) bool { return st.Uid != cred.UID && st.Mode&0o077 == 0 }

// open opens the source of one of the user's binds, once: wherever its path leads later, the sandbox gets this file or
// directory, or does not start. For root, it follows no link that others could have created (package links), because an
// earlier payload may have left one in a directory that it could write to.
func (p *Plan) open(o *op) (err error) {
	if !o.users {
		return nil
	}
	if o.from == nil {
		fd, name := -1, cmp.Or(o.here, o.src)
		if p.cred != nil {
			fd, err = safeopen.Open(name)
		} else {
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
	if err == nil && p.cred != nil {
		o.src, err = realPath(o.from)
	}
	if err == nil {
		return nil
	}
	e := &result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: %v", o.src, err), Hint: proc.DescriptorsHint(err), Err: err}
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

// placeMounts decides which mounts bwrap creates below [enter.LayersDir]: those with a destination in a directory of
// the host, and the trees of clones.
func (p *Plan) placeMounts() {
	var hosts []string // parents first
	for i := range p.ops {
		o := &p.ops[i]
		if o.tree != "" && !slices.ContainsFunc(p.trees, func(tree op) bool { return tree.src == o.tree }) {
			p.trees = append(p.trees, op{src: o.tree})
		}
		if o.kind != opSymlink && o.kind != opDir {
			if o.kind == opRoot {
				continue
			}
			if n := slices.IndexFunc(hosts, func(dir string) bool { return values.Within(o.dst, dir) }); n >= 0 {
				o.base, o.place = hosts[n], p.place()
			}
		}
		if o.host() && o.base == "" {
			hosts = append(hosts, o.dst)
		}
	}
}

// tree returns where the tree of a part is bound.
func (p *Plan) tree(o *op) string {
	for _, tree := range p.trees {
		if tree.src == o.tree {
			return tree.dst
		}
	}
	return ""
}

// place returns a new path below [enter.LayersDir].
func (p *Plan) place() string {
	p.places++
	return path.Join(enter.LayersDir, strconv.Itoa(p.places-1))
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

// searchable reports whether the mode of a directory lets an identity without supplementary groups enter it.
func searchable(st fs.FileInfo, cred *proc.Cred) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch perm := st.Mode().Perm(); {
	case ok && sys.Uid == cred.UID:
		return perm&0o100 != 0
	case ok && sys.Gid == cred.GID:
		return perm&0o010 != 0
	default:
		return perm&0o001 != 0
	}
}

// currentDirectory adds a mount of the caller's current directory, or of CwdRoot above it, at the same path, and
// returns the payload's working directory. Unless the policy requests it, nothing is added if a mount shows the
// directory already. It is an error if the directory contains too much, or if the sandbox has its own one.
func currentDirectory(p *Policy, home string) (workdir string, err error) {
	asked := p.Cwd != "" || p.CwdRoot != ""
	switch {
	case p.Cwd == CwdNone && p.Workdir == "":
		return Home, nil
	case p.Cwd == CwdNone, p.Workdir != "" && !asked:
		return p.Workdir, nil
	}
	var st unix.Stat_t
	dir, err := unix.Getwd()
	if err == nil {
		err = unix.Stat(dir, &st)
	}
	if err == nil && unix.Access(".", unix.X_OK) == unix.EACCES {
		return "", cwdError("", "working directory %q cannot be entered by uid %d", dir, os.Geteuid())
	}
	if err != nil || !path.IsAbs(dir) {
		return "", cwdError("", "the current directory cannot be used: it was removed, or cannot be reached")
	}
	if workdir = p.Workdir; workdir == "" {
		workdir = dir
	}
	what, shown := "the current directory", dir
	if p.CwdRoot != "" {
		what = "--cwd-root"
		if shown, err = aboveDirectory(p.CwdRoot, dir); err != nil {
			return "", err
		}
	}
	for _, m := range p.Mounts {
		if values.Within(shown, m.Dest) && !asked && m.Dest != "/" {
			return workdir, nil
		}
	}
	for _, own := range []string{"/proc", "/dev", "/sys", "/run", "/var/run", "/etc"} {
		if values.Within(shown, own) {
			return "", cwdError("", "%s %q is not shown by default", what, shown)
		}
	}
	if p.rootMount() == nil && OfSystem(shown) {
		switch p.Cwd {
		case CwdOverlay:
			return "", cwdError("--overlay DIR shows a writable view anyway", "%s %q belongs to the system, which is read-only in a sandbox", what, shown)
		case CwdReadWrite:
			return "", cwdError("--bind DIR makes it writable anyway", "%s %q belongs to the system, which is read-only in a sandbox", what, shown)
		}
		return workdir, nil // visible anyway
	}
	switch shown {
	case "/tmp", "/var/tmp":
		return "", cwdError("--ro-bind . shows this one", "%s is %s, and the sandbox has its own", what, shown)
	case "/":
		return "", cwdError("--ro-bind NAME shows a file or a directory", "%s is /, which contains the whole host", what)
	}
	if h := hostfiles.HomeWithin(shown, home); h != "" {
		const some = "--ro-bind NAME shows a file or a directory of it"
		if h == shown {
			return "", cwdError(some, "%s %q is a home directory, with its keys and tokens", what, shown)
		}
		return "", cwdError(some, "%s %q holds home directories, such as %q", what, shown, h)
	}
	// The parent directories may have been renamed since the kernel reported the path, so open the directory relative to
	// the current one.
	up := strings.Repeat("../", depth(dir)-depth(shown))
	m := Mount{Kind: ReadOnly, Source: shown, Here: path.Join(".", up), Dest: shown}
	switch p.Cwd {
	case CwdReadWrite:
		m.Kind, m.Git = ReadWrite, p.Git
	case CwdOverlay:
		m.Kind, m.Upper = Overlaid, p.CwdUpper
	}
	for _, other := range p.Mounts {
		if other.Dest == m.Dest {
			return "", &result.Error{Code: "usage", Message: fmt.Sprintf("%s %q has a mount of its own", what, shown), Hint: "leave out --cwd, or that mount"}
		}
	}
	p.Mounts = append(p.Mounts, m)
	return workdir, nil
}

// cwdError is the error for a directory that cannot be shown. Its hint begins with the remedy that always works.
func cwdError(hint, format string, args ...any) error {
	e := &result.Error{Code: "workdir", Message: fmt.Sprintf(format, args...), Hint: "--cwd none starts in an empty directory"}
	if hint != "" {
		e.Hint += "; " + hint
	}
	return e
}

// aboveDirectory returns the real path of root, which may be relative to dir and has to
// be at or above it.
func aboveDirectory(root, dir string) (string, error) {
	if !path.IsAbs(root) {
		root = path.Join(dir, root)
	}
	real, err := filepath.EvalSymlinks(root)
	if err == nil && !values.Within(dir, real) {
		err = fmt.Errorf("the current directory %q is not below it", dir)
	}
	if err != nil {
		return "", &result.Error{Code: "usage", Message: fmt.Sprintf("--cwd-root %q: %v", root, err), Hint: "name a directory above the current one, such as --cwd-root ..", Err: err}
	}
	return real, nil
}

// checkWorkdir checks, as far as possible from outside, that the payload can enter its working directory.
func checkWorkdir(v view, dir string, cred *proc.Cred) error {
	e := &result.Error{Code: "workdir", Hint: "--ro-bind or --bind the directory, or name an existing one with --workdir"}
	host, err := v.resolve(dir)
	opened := v.opened(host)
	switch st, serr := os.Stat(opened); {
	case err != nil:
		e.Message = fmt.Sprintf("working directory %q does not exist in the sandbox", dir)
		e.Err = err
	case host == "" && !v.isCopy(dir):
		return nil // the sandbox's own
	case host == "":
		e.Message = fmt.Sprintf("working directory %q is not a directory", dir)
	case serr != nil:
		e.Message, e.Err = fmt.Sprintf("working directory %q: %v", dir, serr), serr
	case st.Mode()&fs.ModeDir == 0:
		e.Message = fmt.Sprintf("working directory %q is not a directory", dir)
	case cred != nil && !searchable(st, v.identity(host, cred)):
		e.Message = fmt.Sprintf("working directory %q cannot be entered by uid %d, the user of root's sandboxes", dir, cred.UID)
		e.Hint = "-w, or --bind for another directory, gives it the owner's rights, including write access; --cwd none starts in an empty directory"
	case cred == nil && unix.Access(opened, unix.X_OK) == unix.EACCES:
		e.Message, e.Hint = fmt.Sprintf("working directory %q cannot be entered by uid %d", dir, os.Geteuid()), "chmod it; or --cwd none starts in an empty directory"
	default:
		return nil
	}
	return e
}
