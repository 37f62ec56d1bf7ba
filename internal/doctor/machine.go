package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/room"
)

// machine is what can be read about this machine, to tell which of the possible
// causes a failure has. Tests put another machine in its place.
type machine struct {
	read     func(name string) (string, error) // a small file
	sameRoot func() (same, known bool)         // is our root that of our mount namespace's first process?
	root     bool                              // sbxrun was started by root
	uid, gid int                               // a run's, outside of the sandbox
	bwrap    string                            // path of the program, without links
	full     func() string                     // the bound of a cgroup that has no room for a run, "" for none
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

// facts are what is known of this machine, by name: words of the table of remedies that
// hold, and what stands for {name} there.
func (m machine) facts() map[string]string {
	known := map[string]string{"uid": strconv.Itoa(m.uid), "gid": strconv.Itoa(m.gid), "bwrap": room.ShellQuote(m.bwrap), "profile": printed(m.bwrap), "sudo": "sudo ", "by": "", "host": ""}
	note := func(holds bool, name, value string) {
		if holds {
			known[name] = value
		}
	}
	note(m.root, "sudo", "")

	// Who confines us.
	engine := m.engine()
	note(engine != "", "container", "")
	note(engine != "", "engine", engine)
	note(engine != "", "by", ", probably that of "+engine)
	note(engine == unknown, "by", ", probably the container's")
	profile, restricts := m.profile(), m.restrictsUserns()
	note(profile != "" && profile != usernsProfile, "apparmor", profile)
	note(restricts || profile == usernsProfile, "restricted", "")
	note(strings.Contains(m.text("/etc/apparmor.d/sbxrun-bwrap"), " "+m.bwrap+" "), "profiled", "")
	note(restricts, "host", "and on the host: sudo "+unrestrict)
	note(m.text("/sys/fs/selinux/enforce") == "1", "selinux", "")
	limit := m.sysctl("user.max_user_namespaces")
	note(m.seccomp(), "seccomp", "")
	// If the kernel has user namespaces, what says that it has none is a filter.
	note(m.seccomp() && limit != "", "filtered", "")

	// Where we are.
	mounts := m.mounts()
	root := slices.IndexFunc(mounts, func(mt mount) bool { return mt.point == "/" })
	same, sure := m.sameRoot()
	// Within a chroot(2) whose directory is no mount point, the table of mounts lacks a root.
	note(len(mounts) > 0 && root < 0 || sure && !same, "chroot", "")
	// The kernel's first file system cannot be pivoted away from (pivot_root(2)).
	note(root >= 0 && mounts[root].fstype == "rootfs", "initramfs", "")
	hidden := masks(mounts)
	note(len(hidden) > 0, "masked", strings.Join(hidden, ", "))
	note(len(hidden) > 3, "masked", strings.Join(hidden[:min(3, len(hidden))], ", ")+", …")
	// The first user namespace maps everything.
	uids, err := m.read("/proc/self/uid_map")
	note(err == nil && !slices.Equal(strings.Fields(uids), []string{"0", "0", "4294967295"}), "nested", "")
	// The kernel wants both ids of a process that makes a user namespace to be mapped.
	note(m.unmapped("gid_map", m.gid), "unmapped", "gid "+known["gid"])
	note(m.unmapped("uid_map", m.uid), "unmapped", "uid "+known["uid"])

	note(uint32(m.gid) >= 1<<31, "large-id", "gid "+known["gid"])
	note(uint32(m.uid) >= 1<<31, "large-id", "uid "+known["uid"])
	_, err = m.read("/tmp")
	note(errors.Is(err, fs.ErrNotExist), "no-tmp", "")

	full := m.full()
	note(full != "", "full", full)

	// What the kernel has of namespaces.
	note(m.sysctl("kernel.unprivileged_userns_clone") == "0", "clone-off", "")
	note(m.text("/sys/module/user_namespace/parameters/enable") == "N", "switched-off", "")
	known["limit"], known["more"], known["missing"] = limit, "15000", "CONFIG_USER_NS"
	if n, err := strconv.Atoi(limit); err == nil && n < 1<<30 {
		known["more"] = strconv.Itoa(max(15000, 2*n))
	}
	for _, kind := range slices.Backward(namespaceKinds) { // the first counts
		note(m.sysctl(kind.sysctl) == "0", "disallowed", kind.sysctl)
		// A directory of links: reading the link's file fails with another error than that
		// it does not exist.
		_, err = m.read(path.Join("/proc/self/ns", kind.file))
		note(errors.Is(err, fs.ErrNotExist), "missing", kind.config)
	}
	return known
}

// namespaceKinds are the ones a run makes.
var namespaceKinds = []struct{ file, sysctl, config string }{
	{"user", "user.max_user_namespaces", "CONFIG_USER_NS"},
	{"pid", "user.max_pid_namespaces", "CONFIG_PID_NS"},
	{"mnt", "user.max_mnt_namespaces", "CONFIG_NAMESPACES"},
	{"net", "user.max_net_namespaces", "CONFIG_NET_NS"},
	{"ipc", "user.max_ipc_namespaces", "CONFIG_IPC_NS"},
	{"uts", "user.max_uts_namespaces", "CONFIG_UTS_NS"},
	{"cgroup", "user.max_cgroup_namespaces", "CONFIG_CGROUPS"},
}

// text is a small file without the blanks around it, "" if it cannot be read.
func (m machine) text(name string) string {
	text, err := m.read(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(text)
}

// sysctl is the value of a setting, "" if this kernel has none of the name.
func (m machine) sysctl(name string) string {
	return m.text("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
}

// seccomp says whether a system call filter is on (proc_pid_status(5)).
func (m machine) seccomp() bool {
	for _, line := range strings.Split(m.text("/proc/self/status"), "\n") { // unreadable: none that we know of
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

// restrictsUserns says whether user namespaces of programs without an AppArmor profile that
// allows them get no capabilities, as in Ubuntu 23.10 and later.
func (m machine) restrictsUserns() bool {
	value, err := m.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
	// Some kernels let only root read it: that it is there must do. It is asked
	// after a failure only.
	return strings.TrimSpace(value) == "1" || errors.Is(err, fs.ErrPermission)
}

// usernsProfile is the profile that such namespaces have.
const usernsProfile = "unprivileged_userns"

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
	ours := "\x00" + m.text("/proc/self/environ")
	// What is unreadable, as root's environment mostly is, is no sign: the others must do.
	cgroup, kind, env := m.text("/proc/1/cgroup"), m.text("/run/systemd/container"), m.text("/proc/1/environ")
	switch {
	case has("/var/run/secrets/kubernetes.io/serviceaccount/namespace"), strings.Contains(cgroup, "kubepods"), strings.Contains(ours, "\x00KUBERNETES_SERVICE_HOST="):
		return kubernetes
	case has("/run/.containerenv"), kind == podman, strings.Contains(env+ours, "container=podman"):
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
	for _, line := range strings.Split(m.text("/proc/self/mountinfo"), "\n") { // unreadable: nothing is known
		before, after, ok := strings.Cut(line, " - ")
		b, a := strings.Fields(before), strings.Fields(after)
		if !ok || len(b) < 6 || len(a) < 1 {
			continue
		}
		list = append(list, mount{point: b[4], fstype: a[0]})
	}
	return list
}

// masks are the places below /proc that something is mounted over. Mounts on
// directories that are empty by design hide nothing, and the kernel allows them.
func masks(mounts []mount) (points []string) {
	for _, mt := range mounts {
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

// unmapped reports whether our user namespace for certain does not have an id
// (user_namespaces(7)). One whose map was never written has none.
func (m machine) unmapped(file string, id int) bool {
	text, err := m.read("/proc/self/" + file)
	for _, line := range strings.Split(text, "\n") {
		f := append(strings.Fields(line), "", "", "")
		inside, err1 := strconv.ParseInt(f[0], 10, 64)
		count, err2 := strconv.ParseInt(f[2], 10, 64)
		if err1 == nil && err2 == nil && int64(id) >= inside && int64(id)-inside < count {
			return false
		}
	}
	return err == nil
}
