package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/values"
	"golang.org/x/sys/unix"
)

// machine reads properties of this machine, to find the cause of a failure. Tests replace it.
type machine struct {
	read     func(name string) (string, error) // a small file
	sameRoot func() (same, known bool)         // reports whether our root is process 1's
	root     bool                              // sbxrun was started by root
	uid, gid int                               // of a run, outside the sandbox
	bwrap    string                            // path of the program, without links
	full     func() string                     // a cgroup limit that leaves too few tasks for a run, "" for none
}

func readSmall(name string) (string, error) {
	b, err := os.ReadFile(name)
	return string(b), err
}

// sameRootAsInit compares our root directory with that of process 1. Only root can read that, and the comparison is
// valid only within one mount namespace.
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

// facts returns the known properties of this machine by name: the words of the table of remedies that apply, with the
// values for {name}.
func (m machine) facts() map[string]string {
	known := map[string]string{"uid": strconv.Itoa(m.uid), "gid": strconv.Itoa(m.gid), "bwrap": values.ShellQuote(m.bwrap), "profile": printed(m.bwrap), "sudo": "sudo ", "by": "", "host": ""}
	note := func(holds bool, name, value string) {
		if holds {
			known[name] = value
		}
	}
	note(m.root, "sudo", "")

	// Confinement.
	engine := m.engine()
	note(engine != "", "container", "")
	note(engine != "", "engine", engine)
	note(engine != "", "by", ", probably set by "+engine)
	note(engine == unknown, "by", ", probably the container's")
	profile, restricts := m.profile(), m.restrictsUserns()
	note(profile != "" && profile != usernsProfile, "apparmor", profile)
	note(restricts || profile == usernsProfile, "restricted", "")
	note(strings.Contains(m.text("/etc/apparmor.d/sbxrun-bwrap"), " "+m.bwrap+" "), "profiled", "")
	note(restricts, "host", "and on the host: sudo "+unrestrict)
	note(m.text("/sys/fs/selinux/enforce") == "1", "selinux", "")
	limit := m.sysctl("user.max_user_namespaces")
	note(m.seccomp(), "seccomp", "")
	// If the kernel has user namespaces, an error to the contrary comes from a filter.
	note(m.seccomp() && limit != "", "filtered", "")

	// The root directory.
	mounts := m.mounts()
	root := slices.IndexFunc(mounts, func(mt mount) bool { return mt.point == "/" })
	same, sure := m.sameRoot()
	// In a chroot(2) whose directory is not a mount point, the mount table has no root.
	note(len(mounts) > 0 && root < 0 || sure && !same, "chroot", "")
	// pivot_root(2) does not work on the initial root file system.
	note(root >= 0 && mounts[root].fstype == "rootfs", "initramfs", "")
	hidden := masks(mounts)
	note(len(hidden) > 0, "masked", strings.Join(hidden, ", "))
	note(len(hidden) > 3, "masked", strings.Join(hidden[:min(3, len(hidden))], ", ")+", …")
	// The first user namespace maps everything.
	uids, err := m.read("/proc/self/uid_map")
	note(err == nil && !slices.Equal(strings.Fields(uids), []string{"0", "0", "4294967295"}), "nested", "")
	// Both IDs of a process that creates a user namespace must be mapped.
	note(m.unmapped("gid_map", m.gid), "unmapped", "gid "+known["gid"])
	note(m.unmapped("uid_map", m.uid), "unmapped", "uid "+known["uid"])

	note(uint32(m.gid) >= 1<<31, "large-id", "gid "+known["gid"])
	note(uint32(m.uid) >= 1<<31, "large-id", "uid "+known["uid"])
	_, err = m.read("/tmp")
	note(errors.Is(err, fs.ErrNotExist), "no-tmp", "")

	full := m.full()
	note(full != "", "full", full)

	// Namespaces of the kernel.
	note(m.sysctl("kernel.unprivileged_userns_clone") == "0", "clone-off", "")
	note(m.text("/sys/module/user_namespace/parameters/enable") == "N", "switched-off", "")
	known["limit"], known["more"], known["missing"] = limit, "15000", "CONFIG_USER_NS"
	if n, err := strconv.Atoi(limit); err == nil && n < 1<<30 {
		known["more"] = strconv.Itoa(max(15000, 2*n))
	}
	for _, kind := range slices.Backward(namespaceKinds) { // the first counts
		note(m.sysctl(kind.sysctl) == "0", "disallowed", kind.sysctl)
		// Reading a link of an existing namespace fails, too, but not with ENOENT.
		_, err = m.read(path.Join("/proc/self/ns", kind.file))
		note(errors.Is(err, fs.ErrNotExist), "missing", kind.config)
	}
	return known
}

// namespaceKinds are the namespaces that a run creates.
var namespaceKinds = []struct{ file, sysctl, config string }{
	{"user", "user.max_user_namespaces", "CONFIG_USER_NS"},
	{"pid", "user.max_pid_namespaces", "CONFIG_PID_NS"},
	{"mnt", "user.max_mnt_namespaces", "CONFIG_NAMESPACES"},
	{"net", "user.max_net_namespaces", "CONFIG_NET_NS"},
	{"ipc", "user.max_ipc_namespaces", "CONFIG_IPC_NS"},
	{"uts", "user.max_uts_namespaces", "CONFIG_UTS_NS"},
	{"cgroup", "user.max_cgroup_namespaces", "CONFIG_CGROUPS"},
}

// text returns a small file, trimmed; "" if it cannot be read.
func (m machine) text(name string) string {
	text, err := m.read(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(text)
}

// sysctl returns the value of a sysctl, "" if it does not exist.
func (m machine) sysctl(name string) string {
	return m.text("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
}

// seccomp reports whether a seccomp filter is active (proc_pid_status(5)).
func (m machine) seccomp() bool {
	for _, line := range strings.Split(m.text("/proc/self/status"), "\n") { // unreadable: none that we know of
		if value, ok := strings.CutPrefix(line, "Seccomp:"); ok {
			return strings.TrimSpace(value) == "2"
		}
	}
	return false
}

// profile returns the AppArmor profile of this process, "" if it is unconfined.
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

// restrictsUserns reports whether AppArmor takes the capabilities from user namespaces of programs without a suitable
// profile, as in Ubuntu 23.10 and later.
func (m machine) restrictsUserns() bool {
	value, err := m.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
	// On some kernels only root can read it. Then assume the restriction, because this is called only after a failure.
	return strings.TrimSpace(value) == "1" || errors.Is(err, fs.ErrPermission)
}

// usernsProfile is the profile of such namespaces.
const usernsProfile = "unprivileged_userns"

// Container engines with different options.
const (
	docker     = "docker"
	podman     = "podman"
	kubernetes = "kubernetes"
	lxc        = "lxc"
	unknown    = "unknown" // a container of an unknown engine
)

// engine returns the engine of the container that this process runs in, "" if there is no sign of one.
func (m machine) engine() string {
	has := func(name string) bool { _, err := m.read(name); return err == nil }
	ours := "\x00" + m.text("/proc/self/environ")
	// Unreadable files, such as the environment of root's processes, are ignored.
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

// mount is a line of /proc/self/mountinfo (proc_pid_mountinfo(5)). The mount point is escaped.
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

// masks returns the mount points below /proc. Mounts on directories that are always empty hide nothing, and the
// kernel allows them.
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

// unmapped reports whether an ID is certainly not mapped in our user namespace (user_namespaces(7)).
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
