package doctor

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// other returns a machine that has only these files.
func other(files map[string]string) machine {
	const kinds = "/proc/self/ns/"
	return machine{
		uid:   1000,
		gid:   100,
		bwrap: "/usr/bin/bwrap",
		read: func(name string) (string, error) {
			if text, ok := files[name]; ok {
				if text == forbidden {
					return "", os.ErrPermission
				}
				return text, nil
			}
			if strings.HasPrefix(name, kinds) && files["lacks"] != strings.TrimPrefix(name, kinds) {
				return "", unix.EINVAL // as reading one of these links' targets
			}
			return "", os.ErrNotExist
		},
		full:     func() string { return files["full"] },
		sameRoot: func() (same, known bool) { return files["elsewhere"] == "", files["asked by root"] != "" },
	}
}

const forbidden = "for root's eyes only"

const (
	wholeMap   = "         0          0 4294967295\n"
	plainTable = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n24 22 0:21 / /proc rw,relatime - proc proc rw\n" +
		"30 24 0:30 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw\n"
	maskedTable = plainTable + "31 24 0:21 /sys /proc/sys ro,relatime - proc proc rw\n32 24 0:5 /null /proc/kcore rw - tmpfs tmpfs rw\n" +
		"33 24 0:5 /null /proc/keys rw - tmpfs tmpfs rw\n34 24 0:5 /null /proc/timer_list rw - tmpfs tmpfs rw\n"
	// In a chroot whose directory is not a mount point, the mount table has no root.
	chrootTable = "24 22 0:21 / /proc rw,relatime - proc proc rw\n"
	filtered    = "Name:\tsbxrun\nSeccomp:\t2\nSeccomp_filters:\t1\n"
)

// words of bubblewrap 0.8 and 0.11.
const (
	noPermissions = "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged user namespaces. See <https://deb.li/bubblewrap>.\n"
	exceeded      = "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)\n"
	noSupport     = "bwrap: Creating new namespace failed, likely because the kernel does not support user namespaces.  bwrap must be installed setuid on such systems.\n"
)

func TestExplain(t *testing.T) {
	tests := []struct {
		name  string
		words string
		seen  failure // if there are no words
		files map[string]string
		root  bool
		cause string   // substring of the cause
		fix   []string // substrings of the fix, in this order
		not   string   // not in the fix
	}{
		{name: "Debian", words: noPermissions,
			files: map[string]string{"/proc/sys/kernel/unprivileged_userns_clone": "0\n", "/proc/self/uid_map": wholeMap},
			cause: "kernel.unprivileged_userns_clone is 0",
			fix:   []string{"sudo sysctl -w kernel.unprivileged_userns_clone=1\n", "/etc/sysctl.d/"}},
		{name: "Debian, asked by root", words: noPermissions, root: true,
			files: map[string]string{"/proc/sys/kernel/unprivileged_userns_clone": "0\n"},
			cause: "kernel.unprivileged_userns_clone is 0",
			fix:   []string{"sysctl -w kernel.unprivileged_userns_clone=1\n"}, not: "sudo"},
		{name: "Ubuntu 24.04: namespaces without capabilities", words: "bwrap: setting up uid map: Permission denied\n",
			files: map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n", "/proc/self/attr/current": "unconfined\n"},
			cause: "AppArmor takes away",
			fix:   []string{"profile sbxrun-bwrap /usr/bin/bwrap", "sudo apparmor_parser", "\nor, for every program: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}},
		{name: "Ubuntu 24.04: loopback", words: "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted\n",
			files: map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
			cause: "AppArmor takes away", fix: []string{"profile sbxrun-bwrap"}},
		{name: "Ubuntu 24.04: creation denied", words: "bwrap: Creating new namespace failed: Permission denied\n",
			files: map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
			cause: "AppArmor takes away", fix: []string{"profile sbxrun-bwrap"}},
		{name: "Ubuntu 23.10: only root may read the setting", words: "bwrap: setting up uid map: Permission denied\n",
			files: map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": forbidden},
			cause: "AppArmor takes away", fix: []string{"profile sbxrun-bwrap"}},
		{name: "Ubuntu: within such a namespace", words: "bwrap: Failed to make / slave: Permission denied\n",
			files: map[string]string{"/proc/self/attr/current": "unprivileged_userns (enforce)\n"},
			cause: "AppArmor takes away", fix: []string{"profile sbxrun-bwrap"}},
		{name: "Ubuntu switched off", words: "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted\n",
			files: map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "0\n"},
			cause: "for an unknown reason: ", fix: []string{"dmesg"}},
		{name: "Docker: seccomp, on an Ubuntu host", words: noPermissions,
			files: map[string]string{"/.dockerenv": "", "/proc/self/status": filtered, "/proc/self/attr/current": "docker-default (enforce)\n",
				"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n", "/proc/sys/kernel/unprivileged_userns_clone": "1\n", "/proc/self/uid_map": wholeMap},
			cause: "system call filter", fix: []string{"docker run --security-opt seccomp=unconfined …"}, not: "sysctl"},
		{name: "Docker: AppArmor", words: "bwrap: Failed to make / slave: Permission denied\n",
			files: map[string]string{"/.dockerenv": "", "/proc/self/attr/current": "docker-default (enforce)\n"},
			cause: `AppArmor profile "docker-default"`, fix: []string{"docker run --security-opt apparmor=unconfined …"}, not: "sysctl"},
		{name: "Docker: AppArmor, on an Ubuntu host", words: "bwrap: Failed to make / slave: Permission denied\n",
			files: map[string]string{"/.dockerenv": "", "/proc/self/attr/apparmor/current": "docker-default (enforce)\n", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
			cause: `AppArmor profile "docker-default"`, fix: []string{"apparmor=unconfined", "on the host: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}},
		{name: "Docker: unconfined, on an Ubuntu host", words: "bwrap: setting up uid map: Permission denied\n",
			files: map[string]string{"/.dockerenv": "", "/proc/self/attr/current": "unconfined\n", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
			cause: "AppArmor takes away", fix: []string{"on the host: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}, not: "apparmor_parser"},
		{name: "Docker: masked /proc", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/.dockerenv": "", "/proc/self/mountinfo": maskedTable},
			cause: "(/proc/sys, /proc/kcore, /proc/keys, …)", fix: []string{"docker run --security-opt systempaths=unconfined …"}},
		{name: "Podman: masked /proc", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/run/.containerenv": "engine=\"podman\"", "/proc/self/mountinfo": maskedTable},
			cause: "hidden by other mounts", fix: []string{"podman run --security-opt unmask=ALL"}},
		{name: "Kubernetes: masked /proc", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/proc/1/cgroup": "0::/kubepods/burstable/pod1/x\n", "/proc/self/mountinfo": maskedTable},
			cause: "hidden by other mounts", fix: []string{"procMount: Unmasked"}},
		{name: "Docker: a filter of one's own, without unshare", words: "bwrap: unshare user ns: Operation not permitted\n",
			files: map[string]string{"/.dockerenv": "", "/proc/self/status": filtered},
			cause: "system call filter (seccomp) refuses it, probably set by docker", fix: []string{"docker run --security-opt seccomp=unconfined"}},
		{name: "Podman: seccomp, which lets namespaces be made", words: "bwrap: Can't set hostname to sandbox: Operation not permitted\n",
			files: map[string]string{"/run/.containerenv": "engine=\"podman\"", "/proc/self/status": filtered},
			cause: "system call filter (seccomp) refuses it, probably set by podman: Can't set hostname", fix: []string{"podman run --security-opt seccomp=unconfined"}},
		{name: "Kubernetes: seccomp", words: noPermissions,
			files: map[string]string{"/var/run/secrets/kubernetes.io/serviceaccount/namespace": "default", "/proc/self/status": filtered},
			cause: "system call filter", fix: []string{"seccompProfile: {type: Unconfined}"}},
		{name: "LXC: masked /proc", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/run/systemd/container": "lxc\n", "/proc/self/mountinfo": maskedTable},
			cause: "hidden by other mounts", fix: []string{"security.nesting=true"}},
		{name: "systemd unit: ProtectKernelTunables", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/proc/self/mountinfo": maskedTable},
			cause: "hidden by other mounts", fix: []string{"sudo mkdir -p /run/proc && sudo mount -t proc proc /run/proc\n", "ProtectKernelTunables"}},
		{name: "systemd unit: RestrictNamespaces", words: noPermissions,
			files: map[string]string{"/proc/self/status": filtered, "/proc/self/uid_map": wholeMap, "/proc/self/mountinfo": plainTable},
			cause: "system call filter", fix: []string{"RestrictNamespaces="}},
		{name: "systemd unit: RestrictAddressFamilies", words: "bwrap: loopback: Failed to create NETLINK_ROUTE socket: Address family not supported by protocol\n",
			files: map[string]string{"/proc/self/status": filtered},
			cause: "no netlink socket", fix: []string{"AF_NETLINK"}},
		{name: "/proc is whole, and mounting one refused", words: "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
			files: map[string]string{"/proc/self/mountinfo": plainTable},
			cause: "bubblewrap failed, for an unknown reason: Can't mount proc", fix: []string{"dmesg"}},
		{name: "chroot", words: noPermissions,
			files: map[string]string{"/proc/self/mountinfo": chrootTable, "/proc/self/uid_map": wholeMap},
			cause: "this is a chroot", fix: []string{"systemd-nspawn -D DIR"}},
		{name: "chroot to a mount point, asked by root", words: noPermissions, root: true,
			files: map[string]string{"/proc/self/mountinfo": plainTable, "asked by root": "yes", "elsewhere": "yes"},
			cause: "this is a chroot", fix: []string{"systemd-nspawn -D DIR"}},
		{name: "chroot that cannot be told for certain", words: noPermissions,
			files: map[string]string{"/proc/self/mountinfo": plainTable, "/proc/self/uid_map": wholeMap, "elsewhere": "yes"},
			cause: "for an unknown reason: No permissions", fix: []string{"if this is a chroot: ", "dmesg"}},
		{name: "initial ramfs", words: "bwrap: pivot_root: Invalid argument\n",
			files: map[string]string{"/proc/self/mountinfo": "1 1 0:2 / / rw - rootfs rootfs rw\n"},
			cause: "initial ramfs", fix: []string{"switch_root"}},
		{name: "switched off by limit", words: exceeded,
			files: map[string]string{"/proc/sys/user/max_user_namespaces": "0\n", "/proc/self/uid_map": wholeMap},
			cause: "user.max_user_namespaces is 0", fix: []string{"sudo sysctl -w user.max_user_namespaces=15000\n"}},
		{name: "another limit", words: exceeded,
			files: map[string]string{"/proc/sys/user/max_user_namespaces": "100\n", "/proc/sys/user/max_net_namespaces": "0\n"},
			cause: "user.max_net_namespaces is 0", fix: []string{"user.max_net_namespaces=15000"}},
		{name: "used up", words: exceeded,
			files: map[string]string{"/proc/sys/user/max_user_namespaces": "10000\n", "/proc/self/uid_map": wholeMap},
			cause: "user namespaces: 10000", fix: []string{"user.max_user_namespaces=20000", "lsns"}},
		{name: "within a sandbox", words: exceeded,
			files: map[string]string{"/proc/sys/user/max_user_namespaces": "96365\n", "/proc/self/uid_map": "      1000       1000          1\n"},
			cause: "--disable-userns", fix: []string{"outside of it"}},
		{name: "uid not mapped", words: noPermissions,
			files: map[string]string{"/proc/self/uid_map": "", "/proc/self/mountinfo": plainTable},
			cause: "uid 1000 is not mapped", fix: []string{"newuidmap"}},
		{name: "gid not mapped", words: noPermissions,
			files: map[string]string{"/proc/self/uid_map": wholeMap, "/proc/self/gid_map": "0 1000 1\n"},
			cause: "gid 100 is not mapped", fix: []string{"gid 100", "/etc/subgid"}},
		{name: "built without", words: noSupport,
			files: map[string]string{"lacks": "user"},
			cause: "built without CONFIG_USER_NS", fix: []string{"CONFIG_USER_NS=y"}},
		{name: "built without another", words: "bwrap: Creating new namespace failed: Invalid argument\n",
			files: map[string]string{"lacks": "net"},
			cause: "built without CONFIG_NET_NS"},
		{name: "booted without", words: noSupport,
			files: map[string]string{"/sys/module/user_namespace/parameters/enable": "N\n"},
			cause: "booted without", fix: []string{"user_namespace.enable=1"}},
		{name: "SELinux", words: "bwrap: Creating new namespace failed: Permission denied\n",
			files: map[string]string{"/sys/fs/selinux/enforce": "1"},
			cause: "SELinux", fix: []string{"sudo ausearch"}},
		{name: "Podman and SELinux", words: "bwrap: Failed to make / slave: Permission denied\n",
			files: map[string]string{"/sys/fs/selinux/enforce": "1", "/run/.containerenv": ""},
			cause: "SELinux", fix: []string{"podman run --security-opt label=disable …\n", "ausearch"}},
		{name: "process limit", words: "bwrap: Can't fork for pid 1: Resource temporarily unavailable\n",
			cause: "no more processes: the limit of uid 1000", fix: []string{"ulimit -u"}},
		{name: "ambient capabilities", words: "bwrap: Unexpected capabilities but not setuid, old file caps config?\n",
			cause: "with capabilities", fix: []string{"sudo setcap -r /usr/bin/bwrap\n", "--ambient-caps"}},
		{name: "read-only /proc/sys", seen: failure{step: stepSysctl, errno: unix.EROFS, text: "/proc/sys is mounted read-only"},
			cause: "cannot be set within the sandbox", fix: []string{"remount,rw /proc/sys"}},
		{name: "something new", words: "bwrap: the moon is full\n",
			cause: "the moon is full"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := other(tt.files)
			m.root = tt.root
			seen := tt.seen
			if tt.words != "" {
				seen = understand(tt.words)
			}
			cause, fix, _ := explain(seen, m)
			check.That(t, strings.Contains(cause, tt.cause), "cause %q, want a part %q", cause, tt.cause)
			rest := fix
			for _, part := range tt.fix {
				_, after, ok := strings.Cut(rest, part)
				check.Require(t, ok, "fix %q, want a part %q", fix, part)
				rest = after
			}
			check.That(t, tt.not == "" || !strings.Contains(fix, tt.not), "fix %q, must not say %q", fix, tt.not)
			check.That(t, !strings.ContainsAny(cause, "\n"), "cause %q has more than one line", cause)
		})
	}
}

// The transcript in docs/reference/doctor.md contains the actual cause and fix.
func TestExplainedInDocs(t *testing.T) {
	doc := harness.ReadFile(t, "../../docs/reference/doctor.md")
	m := other(map[string]string{"/proc/sys/kernel/unprivileged_userns_clone": "0\n", "/proc/self/uid_map": wholeMap})
	cause, fix, _ := explain(understand(noPermissions), m)
	for _, line := range append(strings.Split(fix, "\n"), "sbxrun does not work here: user namespace: "+cause) {
		check.That(t, strings.Contains(string(doc), line+"\n"), "docs/reference/doctor.md lacks %q", line)
	}
}

func TestExplainStart(t *testing.T) {
	tests := []struct {
		name       string
		f          failure
		files      map[string]string
		cause, fix string
	}{
		{"no CAP_SETUID", failure{step: stepIdentity, errno: unix.EPERM}, map[string]string{"/proc/self/uid_map": wholeMap}, "may not change its uid", "ordinary user"},
		{"not mapped", failure{step: stepIdentity, errno: unix.EINVAL}, map[string]string{"/proc/self/uid_map": "0 1000 1\n"}, "does not have", "newuidmap"},
		{"out of reach", failure{step: stepStart, errno: unix.EACCES}, nil, "uid 1000 may not execute /usr/bin/bwrap", "chmod o+x"},
		{"too many", failure{step: stepStart, errno: unix.EAGAIN}, nil, "no more processes", "ulimit"},
		{"another architecture", failure{step: stepStart, errno: unix.ENOEXEC, text: "exec format error"}, nil, "exec format error", ""},
		{"no lists of children", failure{step: stepChildren, errno: unix.ENOENT}, nil, "CONFIG_PROC_CHILDREN", "boot a kernel"},
		{"lists of children forbidden", failure{step: stepChildren, errno: unix.EACCES}, nil, "/proc cannot be read", ""},
		{"no /proc/sys", failure{step: stepProcSys, errno: unix.ENOENT}, nil, "subset=pid", "ProcSubset=all\nelse: sudo mount"},
		{"old", failure{step: stepKernel, text: "Linux 4.18"}, nil, "older than 5.11", "newer kernel"},
		{"pidfd_open unknown", failure{step: stepCall, errno: unix.ENOSYS, text: "pidfd_open: function not implemented"}, nil, "not in this kernel: pidfd_open", "Linux 5.11"},
		{"pidfd_open filtered", failure{step: stepCall, errno: unix.ENOSYS, text: "pidfd_open: function not implemented"}, map[string]string{"/proc/self/status": filtered}, "system call filter", "SystemCallFilter="},
		{"no open_tree", failure{step: stepStaged, errno: unix.EPERM, text: "x: not permitted"}, nil, "x: not permitted", "ordinary user\nor make such"},
		{"no open_tree in a container", failure{step: stepStaged, errno: unix.EPERM}, map[string]string{"/.dockerenv": ""}, "", "SYS_ADMIN\nor make such"},
		{"no server", failure{step: stepServer, errno: unix.ENOENT, text: "/usr/bin/sbxrund: no such file or directory"}, nil, "mcp do not work: /usr/bin/sbxrund: no such", "install sbxrund next to sbxrun"},
		{"no server to execute", failure{step: stepServer, errno: unix.EACCES, text: "/usr/bin/sbxrund: permission denied"}, nil, "/usr/bin/sbxrund: permission", ""},
		{"no directory", failure{step: stepServerDir, errno: unix.EACCES, text: "/run/sbxrund cannot be created"}, nil, "/run/sbxrund cannot", "state_dir"},
		{"few tasks", failure{step: stepServerTasks, text: "90 of 100 tasks"}, nil, "90 of 100 tasks", "TasksMax="},
		{"few tasks in a container", failure{step: stepServerTasks, text: "90 of 100 tasks"}, map[string]string{"/.dockerenv": ""}, "90 of 100 tasks", "--pids-limit"},
		{"few descriptors", failure{step: stepServerFiles, text: "at most 1024 open files"}, nil, "1024", "LimitNOFILE="},
		{"few descriptors in a container", failure{step: stepServerFiles, text: "at most 1024 open files"}, map[string]string{"/.dockerenv": ""}, "1024", "--ulimit"},
		{"no bound run", failure{step: stepStaged, text: "the run ended"}, nil, "the run ended", ""},
		{"pidfd_open forbidden", failure{step: stepCall, errno: unix.EPERM}, map[string]string{"/proc/self/status": filtered, "/run/systemd/container": "systemd-nspawn"}, "probably the container's", "pidfd_open"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cause, fix, _ := explain(tt.f, other(tt.files))
			check.That(t, strings.Contains(cause, tt.cause) && strings.Contains(fix, tt.fix), "%q, %q\nwant cause %q, fix %q", cause, fix, tt.cause, tt.fix)
		})
	}
}

func TestUnderstand(t *testing.T) {
	tests := []struct {
		words string
		want  failure
	}{
		{"", failure{step: stepOther}},
		{"bwrap: execvp true: No such file or directory\n", failure{step: stepPayload, errno: unix.ENOENT, text: "execvp true: No such file or directory"}},
		{"a wrapper's own words\nbwrap: setting up uid map: Permission denied\n", failure{step: stepSetup, errno: unix.EACCES, text: "setting up uid map: Permission denied"}},
		{"bwrap: error: Failed to mount tmpfs: no space left on device", failure{step: stepSetup, errno: unix.ENOSPC, text: "Failed to mount tmpfs: no space left on device"}},
		{"bwrap: Creating new namespace failed: Cannot allocate memory", failure{step: stepCreate, errno: unix.ENOMEM, text: "Creating new namespace failed: Cannot allocate memory"}},
	}
	for _, tt := range tests {
		check.Equal(t, understand(tt.words), tt.want, "understand(%q)", tt.words)
	}
}

func FuzzUnderstand(f *testing.F) {
	f.Add(noPermissions)
	f.Add(exceeded)
	f.Add("bwrap: \xff: " + strings.Repeat("é", 400))
	f.Fuzz(func(t *testing.T, words string) {
		cause, _, _ := explain(understand(words), other(nil))
		check.That(t, !strings.Contains(cause, "\n") && len(cause) <= 1000, "cause %q", cause)
	})
}

func FuzzMachine(f *testing.F) {
	f.Add(maskedTable, wholeMap, filtered)
	f.Add("1 2 0:1 / /a\\040b rw - - -", "x y z", "Seccomp:")
	f.Fuzz(func(t *testing.T, table, ids, status string) {
		m := other(map[string]string{"/proc/self/mountinfo": table, "/proc/self/uid_map": ids, "/proc/self/status": status})
		for _, words := range []string{noPermissions, exceeded, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"} {
			cause, fix, _ := explain(understand(words), m)
			check.That(t, cause != "" && fix != "", "%q, %q", cause, fix)
		}
	})
}

func TestKernel(t *testing.T) {
	for release, want := range map[string]Verdict{
		"6.18.44-fc-v669": OK, "5.11.0": OK, "5.10.0-30-amd64": Warning, "4.18.0-553.el8": Warning, "7.0-rc1": OK, "strange": Warning, "": Warning,
	} {
		check.Equal(t, newExam(t.Context(), room.Caller{}).finding(checkKernel(release)).Verdict, want, "%q", release)
	}
}

// The remedy for read-only cgroups is an option of the container engine.
func TestReadOnlyCgroups(t *testing.T) {
	for file, want := range map[string]string{
		"/.dockerenv":        "docker run --security-opt writable-cgroups=true",
		"/run/.containerenv": "podman run --security-opt unmask=/sys/fs/cgroup",
		"/var/run/secrets/kubernetes.io/serviceaccount/namespace": "cgroup_writable = true",
		"/nothing": limits.WritableCgroups,
	} {
		const refused = "limit memory cannot be enforced here"
		cause, fix, _ := explain(failure{step: stepCgroups, text: refused}, other(map[string]string{file: ""}))
		check.That(t, cause == refused && strings.Contains(fix, want), "%s: %q, %q", file, cause, fix)
	}
}

// The report shows how to start the container if, and only if, the container is the cause.
func TestStart(t *testing.T) {
	const option = " --security-opt writable-cgroups=true"
	for _, tt := range []struct{ name, file, text, want string }{
		{"docker", "/.dockerenv", "", "docker run --init --cgroupns private --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined …\n" +
			"in a compose file: init: true, cgroup: private, security_opt: [seccomp=unconfined, apparmor=unconfined, systempaths=unconfined]"},
		{"podman", "/run/.containerenv", "", "podman run --init --cgroupns private --security-opt seccomp=unconfined --security-opt unmask=ALL …\nin a compose file: "},
		{"podman by its variable", "/proc/self/environ", "A=1\x00container=podman\x00", "podman run "},
		{"kubernetes", "/var/run/secrets/kubernetes.io/serviceaccount/namespace", "", "in the pod: hostUsers: false; and in the container's securityContext: {procMount: Unmasked, "},
		{"kubernetes without its account", "/proc/self/environ", "A=1\x00KUBERNETES_SERVICE_HOST=10.0.0.1\x00", "in the pod: hostUsers: false; "},
		{"lxc", "/dev/incus/sock", "", "lxc config set NAME security.nesting=true"},
		{"a variable of another name", "/proc/self/environ", "NO_KUBERNETES_SERVICE_HOST=1\x00", ""},
		{"no container", "/nothing", "", ""},
	} {
		m := other(map[string]string{tt.file: tt.text, "/proc/self/mountinfo": maskedTable})
		for _, f := range []failure{{step: stepProc, errno: unix.EPERM}, {step: stepSysctl, errno: unix.EROFS}} {
			_, fix, confined := explain(f, m)
			check.That(t, confined == (tt.want != ""), "%s: the container confines: %v; fix %q", tt.name, confined, fix)
		}
		_, _, confined := explain(failure{step: stepStart, errno: unix.EACCES}, m)
		check.That(t, !confined, "%s: bwrap that cannot be executed is the container's", tt.name)
		got := m.start(false)
		check.That(t, strings.HasPrefix(got, tt.want) && (tt.want != "" || got == "") && !strings.Contains(got, "{writable"), "%s: %q, want %q", tt.name, got, tt.want)
		with := m.start(true)
		check.That(t, strings.Replace(strings.Replace(with, option, "", 1), ", writable-cgroups=true", "", 1) == got && strings.Contains(with, option) == (tt.name == "docker"),
			"%s: with cgroups: %q", tt.name, with)
	}
}

// The suggested command prints the packaged profile with the path of the bwrap in use. If the profile is installed, the
// fix only loads it.
func TestProfile(t *testing.T) {
	files := map[string]string{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"}
	m := other(files)
	m.bwrap = "/opt/bwrap"
	f := failure{step: stepNetlink, errno: unix.EPERM}
	_, fix, _ := explain(f, m)
	command, _, _ := strings.Cut(fix, " | ")
	out, err := exec.Command("sh", "-c", command).Output()
	check.Require(t, err == nil, "%s: %v", command, err)
	file := harness.ReadFile(t, "sbxrun-bwrap")
	want := strings.ReplaceAll(regexp.MustCompile("(?m)^#.*\n").ReplaceAllString(string(file), ""), "/usr/bin/bwrap", "/opt/bwrap")
	check.That(t, string(out) == want && strings.Contains(want, "profile sbxrun-bwrap /opt/bwrap flags=(unconfined) {\n  userns,\n}\n"), "printed:\n%s\nwant:\n%s", out, want)
	files["/etc/apparmor.d/sbxrun-bwrap"] = want
	_, fix, _ = explain(f, m)
	want = "sudo apparmor_parser -r /etc/apparmor.d/sbxrun-bwrap\nor, for every program: sudo " + unrestrict
	check.That(t, fix == want, "installed: fix %q, want %q", fix, want)
}

// TestTable checks that every fact in the table is a known fact about machines, and that the last row matches
// everything.
func TestTable(t *testing.T) {
	machine := other(map[string]string{
		"/proc/self/status": filtered, "/proc/self/attr/current": "docker-default (enforce)", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
		"/sys/fs/selinux/enforce": "1", "/run/systemd/container": "lxc", "/etc/apparmor.d/sbxrun-bwrap": "profile sbxrun-bwrap /usr/bin/bwrap flags=(unconfined) {", "/proc/self/mountinfo": strings.Replace(maskedTable, "ext4", "rootfs", 1), "elsewhere": "y", "full": "y", "asked by root": "y",
		"/proc/self/uid_map": "", "/proc/sys/kernel/unprivileged_userns_clone": "0", "/proc/sys/user/max_user_namespaces": "0", "/sys/module/user_namespace/parameters/enable": "N",
	})
	machine.uid = 1 << 31
	full := machine.facts()
	known := map[string]bool{"text": true, "name": true, "open": true}
	for name := range full {
		known[name] = true
	}
	steps := []step{stepOther, stepStart, stepIdentity, stepCaps, stepCreate, stepSetup, stepPivot, stepProc, stepNetlink, stepSysctl, stepPayload, stepKernel, stepChildren, stepProcSys, stepCall, stepStaged, stepMapped, stepCgroups, stepTasks, stepStateDir, stepServer, stepServerDir, stepServerTasks, stepServerFiles}
	for _, s := range steps {
		check.That(t, !known[string(s)], "%q is a step, and known of every machine", s)
		known[string(s)] = true
	}
	for i, r := range remedies {
		for _, word := range strings.FieldsFunc(r.seen, func(c rune) bool { return c == ' ' || c == '|' || c == '!' }) {
			check.That(t, known[word] || unix.SignalNum(word) != 0 || strings.HasPrefix(word, "E"), "row %d, %q: what is %q?", i, r.seen, word)
		}
		for _, m := range regexp.MustCompile(`{([a-z-]+)}`).FindAllStringSubmatch(fmt.Sprint(r), -1) {
			check.That(t, known[m[1]], "row %d, %q: what is %s?", i, r.seen, m[0])
		}
		check.That(t, r.cause != "" && (r.seen != "" || i >= len(remedies)-1), "row %d, %q: cause %q", i, r.seen, r.cause)
	}
	check.Equal(t, remedies[len(remedies)-1].seen, "", "the last row is for")
}
