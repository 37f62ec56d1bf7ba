package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
)

// advice is the cause of a failure, and what to do: the smallest change in the
// first line of fix, alternatives and further steps in the others.
type advice struct{ cause, fix string }

func fixes(lines ...string) string {
	var kept []string
	for _, line := range lines {
		if line != "" {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "\n")
}

// explain finds out which of the things that can make this step fail it was on
// this machine. It is the one place where an error becomes a remedy.
func explain(f failure, m machine) advice {
	if f.errno == unix.EAGAIN {
		return processLimit(m)
	}
	switch f.step {
	case stepStart:
		return explainStart(f, m)
	case stepIdentity:
		return explainIdentity(f, m)
	case stepCaps:
		return advice{"bubblewrap is started with capabilities, as its file's or as ambient ones, and refuses that",
			fixes(m.sudo()+"setcap -r "+m.bwrap, "if it has none: setpriv --ambient-caps=-all --inh-caps=-all sbxrun …")}
	case stepCreate:
		return explainCreate(f, m)
	case stepIDMap, stepMount, stepCall:
		return refused(f, m)
	case stepPivot:
		if m.initramfs() {
			return advice{"/ is the initial ramfs, which cannot be pivoted away from", "start the system with switch_root, not with chroot"}
		}
		return refused(f, m)
	case stepProc:
		return explainProc(f, m)
	case stepNetlink:
		a := refused(f, m)
		if m.engine() == "" && !m.restrictsUserns() {
			a = advice{"no netlink socket: " + f.text, "in the systemd unit: RestrictAddressFamilies= must have AF_NETLINK"}
		}
		return a
	case stepLoopback, stepHostname:
		return refused(f, m)
	case stepSysctl:
		return explainSysctl(f, m)
	}
	return advice{cause: f.text}
}

func explainStart(f failure, m machine) advice {
	if f.errno == unix.EACCES {
		return advice{fmt.Sprintf("uid %d may not execute %s, or it lies on a file system mounted noexec", m.uid, m.bwrap),
			m.sudo() + "chmod o+x " + m.bwrap + " and the directories above it, or install bubblewrap in /usr/bin"}
	}
	return advice{cause: fmt.Sprintf("%s cannot be executed: %s", m.bwrap, f.text)}
}

func processLimit(m machine) advice {
	return advice{fmt.Sprintf("no more processes: the limit of uid %d (ulimit -u), or pids.max of the cgroup, is reached", m.uid),
		fixes("ulimit -u unlimited", "in a container: --pids-limit=-1; in a systemd unit: TasksMax=infinity")}
}

// explainIdentity: a run that root starts gives up root.
func explainIdentity(f failure, m machine) advice {
	fix := "run sbxrun as an ordinary user"
	switch {
	case m.unmapped() != "":
		return advice{fmt.Sprintf("started by root, a run works under uid %d, and this user namespace does not have %s", m.uid, m.unmapped()),
			fixes(fix, m.mapIDs())}
	case f.errno == unix.EPERM:
		return advice{fmt.Sprintf("started by root, a run works under uid %d, and this root may not change its uid and groups", m.uid),
			fixes(fix, "docker run --cap-add SETUID --cap-add SETGID …")}
	}
	return advice{fmt.Sprintf("started by root, a run works under uid %d: %s", m.uid, f.text), fix}
}

func (m machine) mapIDs() string {
	return fmt.Sprintf("map uid %d and gid %d into it: newuidmap(1), /etc/subuid, /etc/subgid", m.uid, m.gid)
}

// explainCreate: clone(2) with the flags of the namespaces.
func explainCreate(f failure, m machine) advice {
	switch f.errno {
	case unix.ENOSPC, unix.EUSERS:
		return exhausted(m)
	case unix.EINVAL, unix.ENOSYS:
		if m.sysctl("user.max_user_namespaces") != "" && m.seccomp() {
			return refused(f, m) // some filters answer ENOSYS
		}
		missing := m.missingNamespace()
		if missing == "" {
			missing = "CONFIG_USER_NS"
		}
		if text, err := m.read("/sys/module/user_namespace/parameters/enable"); err == nil && strings.TrimSpace(text) == "N" {
			return advice{"the kernel was booted without user namespaces", "boot with user_namespace.enable=1"}
		}
		return advice{"the kernel was built without " + missing, "boot a kernel with " + missing + "=y"}
	case unix.ENOMEM:
		return advice{"the kernel is out of memory, or the cgroup is", "free some memory"}
	}
	return refused(f, m)
}

// exhausted: a limit of user.max_*_namespaces, here or further out, or the depth
// of nesting (32, user_namespaces(7)).
func exhausted(m machine) advice {
	for _, kind := range namespaceKinds() {
		if m.sysctl(kind.sysctl) == "0" {
			return advice{kind.sysctl + " is 0, so that nobody may make this kind of namespace", setSysctl(m, kind.sysctl, "15000")}
		}
	}
	if m.nested() {
		return advice{"this is inside a sandbox that allows none within (bwrap --disable-userns, which sbxrun uses), or is 32 deep, or out of user.max_user_namespaces",
			"run sbxrun outside of it"}
	}
	limit := m.sysctl("user.max_user_namespaces")
	more := 15000
	if n, err := strconv.Atoi(limit); err == nil && n < 1<<30 && 2*n > more {
		more = 2 * n
	}
	return advice{fmt.Sprintf("all the namespaces that the limits user.max_*_namespaces allow to a user are in use (user namespaces: %s)", limit),
		fixes(setSysctl(m, "user.max_user_namespaces", strconv.Itoa(more)), "lsns lists them")}
}

// setSysctl sets it now, and for the next boot.
func setSysctl(m machine, name, value string) string {
	return fixes(
		fmt.Sprintf("%ssysctl -w %s=%s", m.sudo(), name, value),
		fmt.Sprintf("to keep it: echo '%s = %s' | %stee /etc/sysctl.d/60-sbxrun.conf", name, value, m.sudo()))
}

// refused: EPERM, EACCES or ENOSYS for something that every user may do on a
// kernel that nobody has restricted. Who has? In the order in which one hides
// the other.
func refused(f failure, m machine) advice {
	profile, engine := m.profile(), m.engine()
	log := "the kernel's log may name what refuses: " + m.sudo() + "dmesg | tail"
	switch {
	case f.step == stepCreate && m.sysctl("kernel.unprivileged_userns_clone") == "0":
		return advice{"kernel.unprivileged_userns_clone is 0: only root may make user namespaces", setSysctl(m, "kernel.unprivileged_userns_clone", "1")}
	case f.step == stepCreate && f.errno == unix.EPERM && m.chrooted():
		return advice{"this is a chroot, in which the kernel makes no user namespaces", leaveChroot}
	case f.step == stepCreate && f.errno == unix.EPERM && m.unmapped() != "":
		return advice{m.unmapped() + " is not mapped in this user namespace, and may make none itself", m.mapIDs()}
	case f.step == stepCreate && f.errno != unix.EACCES && m.seccomp(), f.step == stepCall && m.seccomp():
		return advice{"a system call filter (seccomp) refuses it" + by(engine), seccompFix(engine)}
	case profile != "" && profile != usernsProfile && !(f.step == stepCreate && f.errno == unix.EPERM):
		return advice{fmt.Sprintf("the AppArmor profile %q refuses it", profile), profileFix(m, engine, profile)}
	case m.restrictsUserns(), profile == usernsProfile:
		return usernsRestriction(m, engine)
	case m.seccomp():
		return advice{"a system call filter (seccomp) refuses it" + by(engine) + ": " + f.text, seccompFix(engine)}
	case m.selinux():
		return advice{"SELinux is enforcing and may be what refuses it: " + f.text, selinuxFix(m, engine)}
	case f.step == stepCall:
		return advice{cause: f.text}
	}
	if f.step == stepCreate {
		return advice{"the kernel refuses it, as it does in a chroot, and no setting here is known that would: " + f.text,
			fixes("if this is a chroot: "+leaveChroot, log)}
	}
	return advice{"the kernel refuses it, and no setting here is known that would: " + f.text, log}
}

const leaveChroot = "enter the directory with systemd-nspawn -D DIR or bwrap --bind DIR / --dev /dev --proc /proc in place of chroot"

func by(engine string) string {
	switch engine {
	case "":
		return ""
	case unknown:
		return ", probably the container's"
	}
	return ", probably that of " + engine
}

// Docker's three are independent, and a user who meets one will meet the next.
const dockerAll = "docker needs all of: --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"

func seccompFix(engine string) string {
	switch engine {
	case docker:
		return fixes("docker run --security-opt seccomp=unconfined …", dockerAll)
	case podman:
		return "podman run --security-opt seccomp=unconfined …"
	case kubernetes:
		return "in the container's securityContext: seccompProfile: {type: Unconfined}"
	case lxc:
		return "lxc config set NAME security.nesting=true (incus config set …), and restart it"
	case unknown:
		return "let the container's seccomp filter pass clone, unshare, setns, mount, umount2, pivot_root and pidfd_open"
	}
	return "in the systemd unit: no RestrictNamespaces=, and no SystemCallFilter= without @mount and @process"
}

func profileFix(m machine, engine, profile string) string {
	host := ""
	if m.restrictsUserns() {
		// Unconfined is what Ubuntu restricts.
		host = "and on the host: sudo sysctl -w " + usernsSysctl + "=0"
	}
	switch engine {
	case docker:
		return fixes("docker run --security-opt apparmor=unconfined …", host, dockerAll)
	case podman:
		return fixes("podman run --security-opt apparmor=unconfined …", host)
	case kubernetes:
		return fixes("in the container's securityContext: appArmorProfile: {type: Unconfined}", host)
	case lxc:
		return fixes("lxc config set NAME security.nesting=true (incus config set …), and restart it", host)
	}
	return fixes("allow userns, mount, pivot_root and capability in that profile", m.sudo()+"dmesg | grep -i apparmor lists what was denied")
}

// cgroupsFix: what engines take to mount cgroups writable. It is safe with cgroup v2
// alone, in a cgroup namespace.
func cgroupsFix(engine string) string {
	const alone = " (cgroup v2)"
	switch engine {
	case docker:
		return "docker run --security-opt writable-cgroups=true …" + alone + ", Docker 28.0 or later"
	case podman:
		return "podman run --security-opt unmask=/sys/fs/cgroup …" + alone
	case kubernetes:
		return "in the runtime's configuration on the node: cgroup_writable = true" + alone + ", containerd 2.1 or later"
	}
	return limits.WritableCgroups
}

// usernsRestriction: Ubuntu's. In a container it is the host's, and a profile
// there would have to name a path in here.
func usernsRestriction(m machine, engine string) advice {
	a := advice{cause: "AppArmor takes away what user namespaces are made for: " + usernsSysctl + " is on, and no profile allows them to " + m.bwrap}
	if engine != "" {
		a.fix = "on the host: sudo sysctl -w " + usernsSysctl + "=0"
		return a
	}
	a.fix = fixes(
		fmt.Sprintf(`printf 'abi <abi/4.0>,\ninclude <tunables/global>\nprofile sbxrun-bwrap %s flags=(unconfined) {\n  userns,\n}\n' | %stee /etc/apparmor.d/sbxrun-bwrap && %sapparmor_parser -r /etc/apparmor.d/sbxrun-bwrap`,
			m.bwrap, m.sudo(), m.sudo()),
		"or, for every program: "+m.sudo()+"sysctl -w "+usernsSysctl+"=0")
	return a
}

func selinuxFix(m machine, engine string) string {
	see := m.sudo() + "ausearch -m avc -ts recent shows what was denied"
	switch engine {
	case docker, podman:
		return fixes(engine+" run --security-opt label=disable …", see)
	case kubernetes:
		return fixes("in the pod's securityContext: seLinuxOptions: {type: spc_t}", see)
	}
	return see
}

// explainProc: the kernel mounts a fresh /proc in a user namespace only where
// a whole one is visible already (mount_too_revealing): otherwise it would show
// what somebody has hidden.
func explainProc(f failure, m machine) advice {
	masks := m.masks()
	if f.errno != unix.EPERM || len(masks) == 0 {
		return refused(f, m)
	}
	cause := "parts of /proc are hidden by other mounts (" + some(masks, 3) + "), so no fresh one may be mounted"
	switch m.engine() {
	case docker:
		return advice{cause, fixes("docker run --security-opt systempaths=unconfined …", dockerAll)}
	case podman:
		return advice{cause, "podman run --security-opt unmask=ALL …"}
	case kubernetes:
		return advice{cause, "in the pod: hostUsers: false; and in the container's securityContext: procMount: Unmasked"}
	case lxc:
		return advice{cause, "lxc config set NAME security.nesting=true (incus config set …), and restart it"}
	}
	return advice{cause, fixes(
		fmt.Sprintf("%[1]smkdir -p /run/proc && %[1]smount -t proc proc /run/proc", m.sudo()),
		"in a systemd unit: no ProtectKernelTunables=, ProtectKernelLogs= or ProtectProc=")}
}

// some lists the first few.
func some(list []string, most int) string {
	if len(list) > most {
		return strings.Join(list[:most], ", ") + ", …"
	}
	return strings.Join(list, ", ")
}

func explainSysctl(f failure, m machine) advice {
	fix := m.sudo() + "mount -o remount,rw /proc/sys"
	switch m.engine() {
	case docker:
		fix = fixes("docker run --security-opt systempaths=unconfined …", dockerAll)
	case podman:
		fix = "podman run --security-opt unmask=ALL …"
	case kubernetes:
		fix = "in the container's securityContext: procMount: Unmasked"
	case lxc:
		fix = "a newer incus or LXD, whose AppArmor profile lets containers write below /proc/sys/user"
	}
	return advice{"user.max_user_namespaces cannot be set within the sandbox: " + f.text, fix}
}
