package doctor

import (
	"cmp"
	_ "embed"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/values"
)

// remedy is a row of the table: the symptoms, the cause, and the smallest change that helps. Each further line of fix is
// an alternative or a second step.
//
// seen are words that must all apply: the failed step (words.go), the name of the error, and facts about the machine
// (machine.go). EPERM|EACCES means either, !seccomp means not. {name} in cause and fix is replaced by that fact.
type remedy struct {
	seen, cause, fix string
	in               engines // a different fix in containers
}

// engines has a text for each container engine; unknown is for all others.
type engines struct{ docker, podman, kubernetes, lxc, unknown string }

// of returns the text for the current engine, "" outside a container.
func (e engines) of(known map[string]string) string {
	return map[string]string{docker: e.docker, podman: e.podman, kubernetes: e.kubernetes, lxc: e.lxc, unknown: e.unknown}[known["engine"]]
}

// explain returns cause and fix of the first matching row. confined reports that the container causes the failure.
func explain(f failure, m machine) (cause, fix string, confined bool) {
	known := m.facts()
	known[string(f.step)], known["text"] = "", f.text
	if f.errno != 0 {
		known[unix.ErrnoName(f.errno)] = ""
	}
	known["name"], _, _ = strings.Cut(f.text, ": ")
	if f.open != "" {
		known["open"] = values.ShellQuote(f.open)
	}
	i := slices.IndexFunc(remedies, func(r remedy) bool { return holds(r.seen, known) })
	r := remedies[i] // the last row matches everything
	in := r.in.of(known)
	return fill(r.cause, known), fill(cmp.Or(in, r.fix), known), in != ""
}

// start returns a command that starts this container, optionally with writable cgroups.
func (m machine) start(writable bool) string {
	known := m.facts()
	known["writable"], known[", writable"] = "", ""
	if writable {
		known["writable"], known[", writable"] = " --security-opt writable-cgroups=true", ", writable-cgroups=true"
	}
	return fill(started.of(known), known)
}

// holds reports whether all words apply.
func holds(seen string, known map[string]string) bool {
	for _, word := range strings.Fields(seen) {
		if !slices.ContainsFunc(strings.Split(word, "|"), func(either string) bool {
			name, not := strings.CutPrefix(either, "!")
			_, ok := known[name]
			return ok != not
		}) {
			return false
		}
	}
	return true
}

// fill inserts the known facts and drops empty lines.
func fill(text string, known map[string]string) string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(known)) {
		pairs = append(pairs, "{"+name+"}", known[name])
	}
	lines := strings.Split(strings.NewReplacer(pairs...).Replace(text), "\n")
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool { return line == "" }), "\n")
}

// unknownCause precedes bubblewrap's message in the cause of an unexplained failure.
const unknownCause = "bubblewrap failed, for an unknown reason: "

const (
	asUser      = "run sbxrun as an ordinary user"
	mapIDs      = "map uid {uid} and gid {gid} into it: newuidmap(1), /etc/subuid, /etc/subgid"
	leaveChroot = "enter the directory with systemd-nspawn -D DIR or bwrap --bind DIR / --dev /dev --proc /proc instead of chroot"
	kernelLog   = "the kernel's log may name the cause: {sudo}dmesg | tail"
	avc         = "to see denials: {sudo}ausearch -m avc -ts recent"
	restricted  = "AppArmor takes away the capabilities of user namespaces: kernel.apparmor_restrict_unprivileged_userns is on, and no profile exempts {bwrap}"
	unrestrict  = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
	loadProfile = "{sudo}apparmor_parser -r /etc/apparmor.d/sbxrun-bwrap"
	lxcNesting  = "lxc config set NAME security.nesting=true && lxc restart NAME\nor with incus: incus config set NAME security.nesting=true && incus restart NAME"
)

// unfiltered has the settings that let a container's processes make the system calls that a run needs.
var unfiltered = engines{
	docker:     "docker run --security-opt seccomp=unconfined …",
	podman:     "podman run --security-opt seccomp=unconfined …",
	kubernetes: "in the container's securityContext: seccompProfile: {type: Unconfined}",
	lxc:        lxcNesting,
	unknown:    "let the container's seccomp filter pass clone, unshare, setns, mount, umount2, pivot_root and pidfd_open",
}

// started shows how to start each kind of container so that all checks pass, because a user who meets one of these
// restrictions will meet the next. {writable} is the option for writable cgroups, if limits are refused.
var started = engines{
	docker: "docker run --init --cgroupns private --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined{writable} …\n" +
		"in a compose file: init: true, cgroup: private, security_opt: [seccomp=unconfined, apparmor=unconfined, systempaths=unconfined{, writable}]",
	podman: "podman run --init --cgroupns private --security-opt seccomp=unconfined --security-opt unmask=ALL …\n" +
		"in a compose file: init: true, cgroup: private, security_opt: [seccomp=unconfined, unmask=ALL]",
	kubernetes: "in the pod: hostUsers: false; and in the container's securityContext: {procMount: Unmasked, seccompProfile: {type: Unconfined}, appArmorProfile: {type: Unconfined}}",
	lxc:        lxcNesting,
}

// profile is the AppArmor profile that lets bwrap create user namespaces. It is installed as
// /etc/apparmor.d/sbxrun-bwrap.
//
//go:embed sbxrun-bwrap
var profile string

// printed returns the profile for a bwrap as an argument of printf(1).
func printed(bwrap string) string {
	var lines []string
	for line := range strings.Lines(profile) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	return strings.ReplaceAll(strings.Join(lines, `\n`)+`\n`, "/usr/bin/bwrap", bwrap)
}

const moreTasks = "in a container: --pids-limit=-1; in a systemd unit: TasksMax=infinity\nor end other processes there, or let commands wait: --on-pressure wait"

const unfilteredUnit = "in the systemd unit: no RestrictNamespaces=, no SystemCallFilter= without @mount and @process, no RestrictSUIDSGID= and no DynamicUser="

// remedies is the table. The first row whose words all apply wins.
var remedies = []remedy{
	{seen: "EAGAIN full", cause: "no more processes: {full}", fix: moreTasks},
	{seen: "tasks", cause: "{text}", fix: moreTasks},
	{seen: "EAGAIN", cause: "no more processes: the limit of uid {uid} (ulimit -u), or pids.max of the cgroup, is reached",
		fix: "ulimit -u unlimited\nin a container: --pids-limit=-1; in a systemd unit: TasksMax=infinity"},

	// Failures that do not concern a sandbox.
	{seen: "kernel", cause: "older than 5.11: pidfd_open is of 5.3, setns with a pidfd of 5.8, close_range of 5.9",
		fix: "boot a newer kernel if one of the checks below fails"},
	{seen: "children ENOENT", cause: "the kernel was built without CONFIG_PROC_CHILDREN", fix: "boot a kernel with CONFIG_PROC_CHILDREN=y"},
	{seen: "children", cause: "/proc cannot be read"},
	{seen: "proc-sys", cause: "/proc has no /proc/sys: it is mounted with subset=pid, or something hides it",
		fix: "in the systemd unit: ProcSubset=all\nelse: {sudo}mount -t proc proc /proc"},
	{seen: "call ENOSYS !seccomp", cause: "not in this kernel: {name}", fix: "boot Linux 5.11 or later"},
	{seen: "cgroups", cause: "{text}", fix: limits.WritableCgroups, in: engines{ // safe with cgroup v2 alone, in a cgroup namespace
		docker:     "with cgroup v2 and Docker 28.0 or later: docker run --security-opt writable-cgroups=true …",
		podman:     "with cgroup v2: podman run --security-opt unmask=/sys/fs/cgroup …",
		kubernetes: "in the runtime's configuration on the node: cgroup_writable = true (cgroup v2), containerd 2.1 or later",
	}},
	{seen: "state-dir open", cause: "sbxrun start and --max-parallel do not work: {text}", fix: "if only sbxrun uses it: chmod 700 {open}\nor set SBXRUN_STATE_DIR to a directory of your own"},
	{seen: "state-dir", cause: "sbxrun start and --max-parallel do not work: {text}", fix: "set SBXRUN_STATE_DIR to a directory of your own"},
	{seen: "server ENOENT", cause: "sbxrun serve and sbxrun mcp do not work: {text}", fix: "install sbxrund next to sbxrun: packages and archives contain both\nin a checkout: ./setup.sh build"},
	{seen: "server", cause: "sbxrun serve and sbxrun mcp do not work: {text}"},
	{seen: "server-dir", cause: "{text}", fix: "name another one as state_dir in the configuration of sbxrun serve"},
	{seen: "server-tasks", cause: "{text}", fix: "in the systemd unit of the server: TasksMax=2048; in a container: --pids-limit=2048\nor set fewer places and rooms in the configuration of sbxrun serve"},
	{seen: "server-files", cause: "{text}", fix: "in the systemd unit of the server: LimitNOFILE=16384; in a container: --ulimit nofile=16384:16384\nor set fewer connections in the configuration of sbxrun serve"},
	{seen: "staged EPERM container", cause: "{text}",
		fix: asUser + "\nor give the container CAP_SYS_ADMIN: --cap-add SYS_ADMIN\nor make such paths reachable for others, with mode o+x of their directories"},
	{seen: "staged EPERM", cause: "{text}", fix: asUser + "\nor make such paths reachable for others, with mode o+x of their directories"},
	{seen: "mapped ENOSYS !seccomp", cause: "{text}", fix: asUser + "\nor boot Linux 5.12 or later"},
	{seen: "mapped EPERM container", cause: "{text}", fix: asUser + "\nor give the container CAP_SYS_ADMIN: --cap-add SYS_ADMIN"},
	{seen: "mapped EPERM", cause: "{text}", fix: asUser},

	// bwrap fails before it creates anything.
	{seen: "start EACCES", cause: "uid {uid} may not execute {bwrap}, or it lies on a file system mounted noexec",
		fix: "{sudo}chmod o+x {bwrap}\nlikewise the directories above it; or install bubblewrap in /usr/bin"},
	{seen: "start", cause: "{bwrap} cannot be executed: {text}"},
	{seen: "identity unmapped", cause: "started by root, a run works under uid {uid}, and this user namespace does not have {unmapped}", fix: asUser + "\n" + mapIDs},
	{seen: "identity EPERM", cause: "started by root, a run works under uid {uid}, and this root may not change its uid and groups, or may not kill processes of another uid",
		fix: asUser + "\ndocker run --cap-add SETUID --cap-add SETGID --cap-add KILL …"},
	{seen: "identity", cause: "started by root, a run works under uid {uid}: {text}", fix: asUser},
	{seen: "capabilities", cause: "bubblewrap starts with capabilities, from its file or ambient ones, and refuses that",
		fix: "{sudo}setcap -r {bwrap}\nif it has none: setpriv --ambient-caps=-all --inh-caps=-all sbxrun …"},

	// The kernel cannot create a namespace because of a limit of this or an outer namespace, the nesting depth (32,
	// user_namespaces(7)), or its build configuration.
	{seen: "create ENOSPC|EUSERS disallowed", cause: "{disallowed} is 0, so no one may create this kind of namespace",
		fix: "{sudo}sysctl -w {disallowed}=15000\nto keep it: echo '{disallowed} = 15000' | {sudo}tee /etc/sysctl.d/60-sbxrun.conf"},
	{seen: "create ENOSPC|EUSERS nested", cause: "this is inside a sandbox (of sbxrun, or of bwrap --disable-userns) that allows no namespaces in it, or namespaces are nested 32 deep, or user.max_user_namespaces is reached",
		fix: "run sbxrun outside of it"},
	{seen: "create ENOSPC|EUSERS", cause: "all namespaces that the limits user.max_*_namespaces allow a user are in use (user namespaces: {limit})",
		fix: "{sudo}sysctl -w user.max_user_namespaces={more}\nto keep it: echo 'user.max_user_namespaces = {more}' | {sudo}tee /etc/sysctl.d/60-sbxrun.conf\nto list them: lsns"},
	{seen: "create ENOMEM", cause: "the kernel or the cgroup is out of memory", fix: "free some memory"},
	{seen: "create EINVAL|ENOSYS !filtered switched-off", cause: "the kernel was booted without user namespaces", fix: "boot with user_namespace.enable=1"},
	{seen: "create EINVAL|ENOSYS !filtered", cause: "the kernel was built without {missing}", fix: "boot a kernel with {missing}=y"},

	// Causes that are specific to one step.
	{seen: "setup EINVAL large-id", cause: "bubblewrap cannot handle {large-id}: ids must be below 2147483648: {text}", fix: "run sbxrun as another user"},
	{seen: "setup ENOENT no-tmp", cause: "bubblewrap needs a directory /tmp: {text}", fix: "{sudo}mkdir -m 1777 /tmp"},
	{seen: "pivot initramfs", cause: "/ is the initial ramfs, which cannot be pivoted away from", fix: "start the system with switch_root, not with chroot"},
	// In a user namespace, the kernel mounts a new /proc only if a complete one is already visible
	// (mount_too_revealing), because the new one would reveal the hidden parts.
	{seen: "proc EPERM masked", cause: "parts of /proc are hidden by other mounts ({masked}), so no fresh one may be mounted",
		fix: "{sudo}mkdir -p /run/proc && {sudo}mount -t proc proc /run/proc\nin a systemd unit: no ProtectKernelTunables=, ProtectKernelLogs= or ProtectProc=",
		in: engines{
			docker:     "docker run --security-opt systempaths=unconfined …",
			podman:     "podman run --security-opt unmask=ALL …",
			kubernetes: "in the pod: hostUsers: false; and in the container's securityContext: procMount: Unmasked",
			lxc:        lxcNesting,
		}},
	{seen: "netlink !container !restricted", cause: "no netlink socket: {text}", fix: "in the systemd unit: RestrictAddressFamilies= must have AF_NETLINK"},
	{seen: "sysctl", cause: "user.max_user_namespaces cannot be set within the sandbox: {text}",
		fix: "{sudo}mount -o remount,rw /proc/sys",
		in: engines{
			docker:     "docker run --security-opt systempaths=unconfined …",
			podman:     "podman run --security-opt unmask=ALL …",
			kubernetes: "in the container's securityContext: procMount: Unmasked",
			lxc:        "a newer incus or LXD, whose AppArmor profile lets containers write below /proc/sys/user",
		}},
	{seen: "other|payload|staged", cause: "{text}"},

	// An operation is refused that an unrestricted kernel allows for every user. These rows find the restriction. If one
	// restriction hides another, its row comes first.
	{seen: "create clone-off", cause: "kernel.unprivileged_userns_clone is 0: only root may make user namespaces",
		fix: "{sudo}sysctl -w kernel.unprivileged_userns_clone=1\nto keep it: echo 'kernel.unprivileged_userns_clone = 1' | {sudo}tee /etc/sysctl.d/60-sbxrun.conf"},
	{seen: "create EPERM chroot", cause: "this is a chroot, in which the kernel makes no user namespaces", fix: leaveChroot},
	{seen: "create EPERM unmapped", cause: "{unmapped} is not mapped in this user namespace, and may not create one", fix: mapIDs},
	{seen: "create|call seccomp !EACCES", cause: "a system call filter (seccomp) refuses it{by}", fix: unfilteredUnit, in: unfiltered},
	{seen: "apparmor !create|!EPERM", cause: `the AppArmor profile "{apparmor}" refuses it`,
		fix: "allow userns, mount, pivot_root and capability in that profile\nto see denials: {sudo}dmesg | grep -i apparmor",
		in: engines{ // Ubuntu's kernel restricts unconfined programs; {host} lifts that
			docker:     "docker run --security-opt apparmor=unconfined …\n{host}",
			podman:     "podman run --security-opt apparmor=unconfined …\n{host}",
			kubernetes: "in the container's securityContext: appArmorProfile: {type: Unconfined}\n{host}",
			lxc:        lxcNesting + "\n{host}",
		}},
	// An AppArmor profile on the host would have to name a path inside the container.
	{seen: "restricted container", cause: restricted, fix: "on the host: sudo " + unrestrict},
	{seen: "restricted profiled", cause: restricted, fix: loadProfile + "\nor, for every program: {sudo}" + unrestrict},
	{seen: "restricted", cause: restricted,
		fix: "printf '{profile}' | {sudo}tee /etc/apparmor.d/sbxrun-bwrap && " + loadProfile + "\nor, for every program: {sudo}" + unrestrict},
	{seen: "seccomp", cause: "a system call filter (seccomp) refuses it{by}: {text}", fix: unfilteredUnit, in: unfiltered},
	{seen: "selinux", cause: "SELinux is enforcing and may be the cause: {text}", fix: avc, in: engines{
		docker:     "docker run --security-opt label=disable …\n" + avc,
		podman:     "podman run --security-opt label=disable …\n" + avc,
		kubernetes: "in the pod's securityContext: seLinuxOptions: {type: spc_t}\n" + avc,
	}},
	{seen: "call", cause: "{text}"},
	{seen: "create", cause: unknownCause + "{text}", fix: "if this is a chroot: " + leaveChroot + "\n" + kernelLog},
	{cause: unknownCause + "{text}", fix: kernelLog},
}
