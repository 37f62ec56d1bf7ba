package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is what can be read about this machine, to tell which of the possible
// causes a failure has. Tests put another machine in its place.
type machine struct {
	read     func(name string) (string, error) // a small file
	sameRoot func() (same, known bool)         // is our root that of our mount namespace's first process?
	root     bool                              // sbxrun was started by root
	uid, gid int                               // a run's, outside of the sandbox
	bwrap    string                            // path of the program
}

// thisMachine reads the real thing.
func thisMachine(uid, gid int, root bool, program string) machine {
	return machine{read: readSmall, sameRoot: sameRootAsInit, root: root, uid: uid, gid: gid, bwrap: program}
}

func readSmall(name string) (string, error) {
	b, err := os.ReadFile(name)
	return string(b), err
}

// sameRootAsInit compares our root directory with that of process 1. Only root
// may look at it, and it means something only within one mount namespace.
func sameRootAsInit() (same, known bool) {
	var ours, inits, ourNS, initNS unix.Stat_t
	for _, s := range []struct {
		name string
		st   *unix.Stat_t
	}{{"/", &ours}, {"/proc/1/root/", &inits}, {"/proc/self/ns/mnt", &ourNS}, {"/proc/1/ns/mnt", &initNS}} {
		if unix.Stat(s.name, s.st) != nil {
			return false, false
		}
	}
	if ourNS.Ino != initNS.Ino {
		return false, false
	}
	return ours.Dev == inits.Dev && ours.Ino == inits.Ino, true
}

// sysctl is the value of a setting, "" if this kernel has none of the name.
func (m machine) sysctl(name string) string {
	text, err := m.read("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(text)
}

// sudo is what an ordinary user must put before an administrator's command.
func (m machine) sudo() string {
	if m.root {
		return ""
	}
	return "sudo "
}

// seccomp says whether a system call filter is on (proc_pid_status(5)).
func (m machine) seccomp() bool {
	status, _ := m.read("/proc/self/status") // unreadable: none that we know of
	for _, line := range strings.Split(status, "\n") {
		if value, ok := strings.CutPrefix(line, "Seccomp:"); ok {
			return strings.TrimSpace(value) == "2"
		}
	}
	return false
}

// profile is the AppArmor profile we are confined by, "" if by none.
func (m machine) profile() string {
	for _, name := range []string{"/proc/self/attr/apparmor/current", "/proc/self/attr/current"} {
		text, err := m.read(name)
		if err != nil {
			continue
		}
		name, _, confined := strings.Cut(strings.Trim(text, "\x00\n "), " (")
		if confined && name != "unconfined" {
			return name
		}
		return ""
	}
	return ""
}

// usernsSysctl is on in Ubuntu 23.10 and later: user namespaces of programs
// without an AppArmor profile that allows them get no capabilities.
const usernsSysctl = "kernel.apparmor_restrict_unprivileged_userns"

func (m machine) restrictsUserns() bool {
	value, err := m.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
	// Some kernels let only root read it: that it is there must do. It is asked
	// after a failure only.
	return strings.TrimSpace(value) == "1" || errors.Is(err, fs.ErrPermission)
}

// usernsProfile is the profile that such namespaces have.
const usernsProfile = "unprivileged_userns"

func (m machine) selinux() bool {
	text, err := m.read("/sys/fs/selinux/enforce")
	return err == nil && strings.TrimSpace(text) == "1"
}

// The engines that have a way of their own to say what a container may do.
const (
	docker     = "docker"
	podman     = "podman"
	kubernetes = "kubernetes"
	lxc        = "lxc"
	unknown    = "unknown" // a container, but whose?
)

// engine is what runs the container we are in, "" if we seem to be in none.
func (m machine) engine() string {
	has := func(name string) bool { _, err := m.read(name); return err == nil }
	cgroup, _ := m.read("/proc/1/cgroup") // unreadable: the other signs must do
	kind, _ := m.read("/run/systemd/container")
	env, _ := m.read("/proc/1/environ") // root's, mostly
	switch kind = strings.TrimSpace(kind); {
	case has("/var/run/secrets/kubernetes.io/serviceaccount/namespace"), strings.Contains(cgroup, "kubepods"):
		return kubernetes
	case has("/run/.containerenv"), kind == podman, strings.Contains(env, "container=podman"):
		return podman
	case has("/.dockerenv"), kind == docker, strings.Contains(cgroup, "/docker/"):
		return docker
	case kind == lxc, strings.Contains(env, "container=lxc"), has("/dev/lxd/sock"), has("/dev/incus/sock"):
		return lxc
	case kind != "":
		return unknown
	}
	return ""
}

// mount is one line of /proc/self/mountinfo (proc_pid_mountinfo(5)); point stays
// escaped, fit for printing.
type mount struct{ point, fstype string }

func (m machine) mounts() (list []mount) {
	text, _ := m.read("/proc/self/mountinfo") // unreadable: nothing is known
	for _, line := range strings.Split(text, "\n") {
		before, after, ok := strings.Cut(line, " - ")
		b, a := strings.Fields(before), strings.Fields(after)
		if !ok || len(b) < 6 || len(a) < 1 {
			continue
		}
		list = append(list, mount{point: b[4], fstype: a[0]})
	}
	return list
}

// chrooted says whether we are for certain in a chroot(2). Within one whose
// directory is no mount point, the table of mounts lacks a root.
func (m machine) chrooted() bool {
	list := m.mounts()
	if len(list) > 0 && !slices.ContainsFunc(list, func(mt mount) bool { return mt.point == "/" }) {
		return true
	}
	same, known := m.sameRoot()
	return known && !same
}

// masks are the places below /proc that something is mounted over. Mounts on
// directories that are empty by design hide nothing, and the kernel allows them.
func (m machine) masks() (points []string) {
	for _, mt := range m.mounts() {
		if !strings.HasPrefix(mt.point, "/proc/") || slices.Contains(points, mt.point) {
			continue
		}
		switch mt.point {
		case "/proc/sys/fs/binfmt_misc", "/proc/fs/nfsd", "/proc/xen":
		default:
			points = append(points, mt.point)
		}
	}
	return points
}

// initramfs says whether / is the kernel's first file system, which cannot be
// pivoted away from (pivot_root(2)).
func (m machine) initramfs() bool {
	list := m.mounts()
	i := slices.IndexFunc(list, func(mt mount) bool { return mt.point == "/" })
	return i >= 0 && list[i].fstype == "rootfs"
}

// idMap is a line of what our user namespace knows of ids (user_namespaces(7)).
type idMap struct{ inside, count int64 }

// idMaps are all lines of uid_map or gid_map. A namespace whose map was never
// written has none.
func (m machine) idMaps(file string) (maps []idMap, known bool) {
	text, err := m.read("/proc/self/" + file)
	if err != nil {
		return nil, false
	}
	for _, line := range strings.Split(text, "\n") {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		inside, err1 := strconv.ParseInt(f[0], 10, 64)
		count, err2 := strconv.ParseInt(f[2], 10, 64)
		if err1 == nil && err2 == nil {
			maps = append(maps, idMap{inside, count})
		}
	}
	return maps, true
}

// unmapped names the ids of a run that are for certain unknown here, "" if none
// is. The kernel wants both of them of whoever makes a user namespace.
func (m machine) unmapped() string {
	for _, of := range []struct {
		file, kind string
		id         int
	}{{"uid_map", "uid", m.uid}, {"gid_map", "gid", m.gid}} {
		maps, known := m.idMaps(of.file)
		if known && !slices.ContainsFunc(maps, func(i idMap) bool {
			return int64(of.id) >= i.inside && int64(of.id)-i.inside < i.count
		}) {
			return fmt.Sprintf("%s %d", of.kind, of.id)
		}
	}
	return ""
}

// nested says whether we are for certain in a user namespace of somebody's: the
// first one maps everything.
func (m machine) nested() bool {
	maps, known := m.idMaps("uid_map")
	return known && !slices.Contains(maps, idMap{0, 1<<32 - 1})
}

// missingNamespace is a kind of namespace this kernel was built without, or "".
func (m machine) missingNamespace() string {
	for _, kind := range namespaceKinds() {
		// A directory of links: reading the link's file fails with another
		// error than that it does not exist.
		if _, err := m.read(path.Join("/proc/self/ns", kind.file)); os.IsNotExist(err) {
			return kind.config
		}
	}
	return ""
}

type namespaceKind struct{ file, sysctl, config string }

// namespaceKinds are the ones a run makes.
func namespaceKinds() []namespaceKind {
	return []namespaceKind{
		{"user", "user.max_user_namespaces", "CONFIG_USER_NS"},
		{"pid", "user.max_pid_namespaces", "CONFIG_PID_NS"},
		{"mnt", "user.max_mnt_namespaces", "CONFIG_NAMESPACES"},
		{"net", "user.max_net_namespaces", "CONFIG_NET_NS"},
		{"ipc", "user.max_ipc_namespaces", "CONFIG_IPC_NS"},
		{"uts", "user.max_uts_namespaces", "CONFIG_UTS_NS"},
		{"cgroup", "user.max_cgroup_namespaces", "CONFIG_CGROUPS"},
	}
}
