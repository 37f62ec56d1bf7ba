package seccomp

import "golang.org/x/sys/unix"

const (
	refused = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	missing = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	foreign = unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)
	ignored = unix.SECCOMP_RET_ERRNO // success without any effect
	// Errors of a kernel without the protocol, option or flag. Libraries have fallbacks for them.
	noType     = unix.SECCOMP_RET_ERRNO | uint32(unix.ESOCKTNOSUPPORT)
	noProtocol = unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)
	noOption   = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOPROTOOPT)
	noUpper    = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOENT)
	noFlag     = unix.SECCOMP_RET_ERRNO | uint32(unix.EOPNOTSUPP)
)

// newest is the last reviewed call, of Linux 7.0. Later calls fail with ENOSYS, as on an older kernel, until they are
// reviewed: see the list of allowed calls in the tests.
const newest = 471

// Columns of the table.
const (
	x86_64 = iota
	i386
	arm64
	arm
	columns
)

// none marks a call that the architecture does not have.
const none = 0

// rule decides the result of a call.
type rule int

const (
	refuse rule = iota // EPERM
	lack               // ENOSYS
	// Calls that set a file's mode: EPERM if it contains S_ISUID or S_ISGID. The number is the index of the mode
	// argument, from 0.
	mode1
	mode2
	// open(2) has a mode only if its flags can create a file; otherwise the argument is undefined. The first number is
	// the index of the flags.
	flags1mode2
	flags2mode3
	socket   // family, type and protocol, arguments 0 to 2: only those in domains
	option   // setsockopt(2), arguments 1 and 2: see options
	send2    // argument 2 has flags of send(2): EOPNOTSUPP with MSG_OOB
	send3    // the same for argument 3
	request  // ioctl(2), argument 1: EPERM for those in ioctls; FIOASYNC, which sets O_ASYNC, is ignored
	control  // fcntl(2), arguments 1 and 2: EPERM for F_SETLEASE, F_SETDELEG, F_SETSIG, and F_SETFL with O_ASYNC
	ofInit   // argument 0 is a PID: EPERM for init's
	priority // setpriority(2), arguments 0 and 1: EPERM for init, and for all processes of a user
	limit    // setrlimit(2), argument 0: RLIMIT_CORE is ignored
	limitOf  // prlimit64(2), arguments 0 to 2: EPERM for init; a new RLIMIT_CORE is ignored
	tracing  // ptrace(2), arguments 0 and 3: EPERM for traceOptions with PTRACE_O_TRACEEXIT
	// Only with Filter.Namespaces:
	refuseSpace // EPERM
	lackSpace   // ENOSYS
	flags0      // clone: EPERM with CLONE_NEWUSER
	rules       // number of rules
)

type row struct {
	name   string
	rule   rule
	number [columns]uint32
}

// table lists the calls that have a rule, with their numbers on each architecture.
var table = [...]row{
	{"socket", socket, [columns]uint32{41, 359, 198, 281}},
	{"socketpair", socket, [columns]uint32{53, 360, 199, 288}},
	// Its arguments are in memory, which a filter cannot read.
	{"socketcall", lack, [columns]uint32{none, 102, none, none}},
	{"setsockopt", option, [columns]uint32{54, 366, 208, 294}},
	// Out-of-band data on Unix sockets had vulnerabilities (CVE-2025-38236), and hardly any program uses it. A filter
	// cannot distinguish it from TCP's, which ftp and telnet clients use to interrupt a transfer.
	{"send", send3, [columns]uint32{none, none, none, 289}},
	{"sendto", send3, [columns]uint32{44, 369, 206, 290}},
	{"sendmsg", send2, [columns]uint32{46, 370, 211, 296}},
	{"sendmmsg", send3, [columns]uint32{307, 345, 269, 374}},
	{"ioctl", request, [columns]uint32{16, 54, 29, 54}},
	// Processes of the host that open a visible file would wait 45 s for the holder of a lease
	// (proc_sys_fs(5), lease-break-time).
	//
	// With O_ASYNC on a terminal that is the command's stdin, the kernel signals the terminal's foreground process group,
	// which contains sbxrun, at each input, and F_SETSIG can make that signal SIGKILL. FIOASYNC succeeds without effect,
	// because nginx cannot start its workers without it.
	{"fcntl", control, [columns]uint32{72, 55, 25, 55}},
	{"fcntl64", control, [columns]uint32{none, 221, none, 221}},
	// prlimit64 only requires the same uid, and RLIMIT_CPU kills init.
	//
	// The command runs with RLIMIT_CORE 1. With 0, a core_pattern that is a pipe makes the kernel feed the core to a
	// program that runs as root on the host (core(5)). Programs that disable core dumps see success.
	{"prlimit64", limitOf, [columns]uint32{302, 340, 261, 369}},
	{"setrlimit", limit, [columns]uint32{160, 75, 164, 75}},
	// These calls only require the same uid as well. Init reaps all processes of its PID namespace
	// (pid_namespaces(7)). With SCHED_IDLE on a busy processor, that takes longer than the proof waits. The autogroup
	// (sched(7)) does not help an exiting process.
	{"setpriority", priority, [columns]uint32{141, 97, 140, 97}},
	{"sched_setparam", ofInit, [columns]uint32{142, 154, 118, 154}},
	{"sched_setscheduler", ofInit, [columns]uint32{144, 156, 119, 156}},
	{"sched_setaffinity", ofInit, [columns]uint32{203, 241, 122, 241}},
	{"sched_setattr", ofInit, [columns]uint32{314, 351, 274, 380}},
	// With PTRACE_O_TRACEEXIT, a killed process stops until its tracer continues it or ends. Two processes that trace
	// each other wait forever, and since Linux 6.1 nothing ends them or frees their memory. strace(1) always sets the
	// option, so it cannot run.
	{"ptrace", tracing, [columns]uint32{101, 26, 117, 26}},
	// A setuid program in a writable bind gives other users of the host the caller's uid. mkdir(2) ignores these bits.
	{"openat", flags2mode3, [columns]uint32{257, 295, 56, 322}},
	{"open", flags1mode2, [columns]uint32{2, 5, none, 5}},
	{"creat", mode1, [columns]uint32{85, 8, none, 8}},
	{"chmod", mode1, [columns]uint32{90, 15, none, 15}},
	{"fchmod", mode1, [columns]uint32{91, 94, 52, 94}},
	{"mknod", mode1, [columns]uint32{133, 14, none, 14}},
	{"fchmodat", mode2, [columns]uint32{268, 306, 53, 333}},
	{"fchmodat2", mode2, [columns]uint32{452, 452, 452, 452}},
	{"mknodat", mode2, [columns]uint32{259, 297, 33, 324}},
	// Its mode is in memory. Programs fall back to openat, as on kernels before 5.6.
	{"openat2", lack, [columns]uint32{437, 437, 437, 437}},
	// The payload shares the caller's session keyring (keyrings(7)).
	{"add_key", refuse, [columns]uint32{248, 286, 217, 309}},
	{"request_key", refuse, [columns]uint32{249, 287, 218, 310}},
	{"keyctl", refuse, [columns]uint32{250, 288, 219, 311}},
	// Large interfaces for monitoring or changing the machine.
	{"bpf", refuse, [columns]uint32{321, 357, 280, 386}},
	{"perf_event_open", refuse, [columns]uint32{298, 336, 241, 364}},
	{"fanotify_init", refuse, [columns]uint32{300, 338, 262, 367}},
	{"lookup_dcookie", refuse, [columns]uint32{212, 253, 18, 249}},
	{"open_by_handle_at", refuse, [columns]uint32{304, 342, 265, 371}},
	// These write out whole file systems of the host, and a waiting process cannot be killed. fsync(2) writes one file.
	{"sync", refuse, [columns]uint32{162, 36, 81, 36}},
	{"syncfs", lack, [columns]uint32{306, 344, 267, 373}},
	{"syslog", refuse, [columns]uint32{103, 103, 116, 103}},
	{"acct", refuse, [columns]uint32{163, 51, 89, 51}},
	{"quotactl", refuse, [columns]uint32{179, 131, 60, 131}},
	{"quotactl_fd", refuse, [columns]uint32{443, 443, 443, 443}},
	{"swapon", refuse, [columns]uint32{167, 87, 224, 87}},
	{"swapoff", refuse, [columns]uint32{168, 115, 225, 115}},
	{"reboot", refuse, [columns]uint32{169, 88, 142, 88}},
	{"kexec_load", refuse, [columns]uint32{246, 283, 104, 347}},
	{"kexec_file_load", refuse, [columns]uint32{320, none, 294, 401}},
	{"init_module", refuse, [columns]uint32{175, 128, 105, 128}},
	{"finit_module", refuse, [columns]uint32{313, 350, 273, 379}},
	{"delete_module", refuse, [columns]uint32{176, 129, 106, 129}},
	{"nfsservctl", refuse, [columns]uint32{180, 169, 42, 169}},
	{"vhangup", refuse, [columns]uint32{153, 111, 58, 111}},
	{"iopl", refuse, [columns]uint32{172, 110, none, none}},
	{"ioperm", refuse, [columns]uint32{173, 101, none, none}},
	// For programs of the 1990s, in 16 bits or as a.out. Kernels can be built without them.
	{"modify_ldt", lack, [columns]uint32{154, 123, none, none}},
	{"vm86", lack, [columns]uint32{none, 166, none, none}},
	{"vm86old", lack, [columns]uint32{none, 113, none, none}},
	{"uselib", lack, [columns]uint32{134, 86, none, 86}},
	// While a memfd_secret(2) file exists, the machine cannot hibernate. cachestat(2) shows which parts of a visible
	// host file other processes have read (CVE-2025-21691). listns(2) lists foreign namespaces.
	{"memfd_secret", lack, [columns]uint32{447, 447, 447, none}},
	{"cachestat", lack, [columns]uint32{451, 451, 451, 451}},
	{"listns", lack, [columns]uint32{470, 470, 470, 470}},
	// Programs have fallbacks for these. userfaultfd can suspend kernel code at a chosen place, and io_uring bypasses
	// seccomp filters.
	{"userfaultfd", lack, [columns]uint32{323, 374, 282, 388}},
	{"io_uring_setup", lack, [columns]uint32{425, 425, 425, 425}},
	{"io_uring_enter", lack, [columns]uint32{426, 426, 426, 426}},
	{"io_uring_register", lack, [columns]uint32{427, 427, 427, 427}},
	// Namespaces.
	{"unshare", refuseSpace, [columns]uint32{272, 310, 97, 337}},
	{"setns", refuseSpace, [columns]uint32{308, 346, 268, 375}},
	{"clone3", lackSpace, [columns]uint32{435, 435, 435, 435}},
	{"clone", flags0, [columns]uint32{56, 120, 220, 120}},
}

// traceOptions are the ptrace(2) requests that set options: PTRACE_SETOPTIONS, also by its old number, and
// PTRACE_SEIZE.
var traceOptions = [...]uint32{unix.PTRACE_SETOPTIONS, 21, unix.PTRACE_SEIZE}

// domain is a group of allowed sockets.
type domain struct{ families, types, protocols []uint32 }

// domains are sockets that belong to a network namespace or to the file system, and the AF_NETLINK protocols that
// libraries need. Families without network namespaces, such as AF_VSOCK, reach other sandboxes and the host.
// Other sockets fail with EAFNOSUPPORT, as on a kernel without the family.
//
// For AF_INET the kernel turns SOCK_PACKET into AF_PACKET, and SOCK_SEQPACKET and SOCK_DCCP select protocols
// that the third argument does not name. The kernel loads the module of a protocol when any process asks for it. Protocols
// that are not listed have had many vulnerabilities (MPTCP, UDP-Lite, SCTP, L2TP; of AF_NETLINK XFRM, NETFILTER, AUDIT),
// reach a process outside (CONNECTOR), or hold data that no cgroup counts (messages between NETLINK_USERSOCK sockets).
var domains = [...]domain{
	{[]uint32{unix.AF_UNIX}, []uint32{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_RAW, unix.SOCK_SEQPACKET}, []uint32{0, unix.AF_UNIX}},
	{[]uint32{unix.AF_INET, unix.AF_INET6}, []uint32{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_RAW},
		[]uint32{unix.IPPROTO_IP, unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6}},
	{[]uint32{unix.AF_NETLINK}, []uint32{unix.SOCK_DGRAM, unix.SOCK_RAW}, []uint32{unix.NETLINK_ROUTE, unix.NETLINK_SOCK_DIAG, unix.NETLINK_KOBJECT_UEVENT}},
}

// options are the refused or ignored socket options, by level and name.
//
// With SO_LINGER, closing a TCP socket blocks the process that closes it last. That can be a process outside that
// received the socket and drops it in read(2), or, for a Unix socket in a reference cycle, the kernel worker that closes
// files for the whole machine one after the other (delayed_fput). The option is ignored silently, because written data
// is sent anyway. Buffer sizes stay at the default, because no cgroup counts all data in the buffers; programs accept
// other sizes.
//
// The kernel compiles socket filters into memory that is limited for the whole machine.
//
// A flow label outlives its socket, up to its linger time. It carries 16 bytes that the next call in a warm room can
// read (/proc/net/ip6_flowlabel). IPsec policies, IPV6_ADDRFORM, and protocols within TCP (TCP_ULP: TLS, IPsec) and UDP
// (UDP_ENCAP: IPsec, L2TP) had vulnerabilities. No cgroup counts the data of a corked UDP socket. Only BGP daemons
// authenticate TCP segments with keys (TCP_AO_ADD_KEY). IPV6_2292PKTOPTIONS belongs to RFC 2292, which was replaced in
// 2003; exploits have used its kernel memory.
//
// The other options of Linux 6.18 were reviewed: they need a capability that no command has (SO_MARK, TCP_REPAIR,
// netfilter, multicast routing), affect only the socket or its network namespace, or use charged memory
// (SO_RESERVE_MEM, SO_ZEROCOPY).
var options = [...]struct {
	level, answer uint32
	names         []uint32
}{
	{unix.SOL_SOCKET, ignored, []uint32{unix.SO_LINGER, unix.SO_SNDBUF, unix.SO_RCVBUF, unix.SO_SNDBUFFORCE, unix.SO_RCVBUFFORCE}},
	{unix.SOL_SOCKET, refused, []uint32{unix.SO_ATTACH_FILTER, unix.SO_ATTACH_BPF, unix.SO_ATTACH_REUSEPORT_CBPF, unix.SO_ATTACH_REUSEPORT_EBPF}},
	{unix.IPPROTO_IP, refused, []uint32{unix.IP_IPSEC_POLICY, unix.IP_XFRM_POLICY}},
	{unix.IPPROTO_IPV6, refused, []uint32{flowLabel, unix.IPV6_ADDRFORM, unix.IPV6_IPSEC_POLICY, unix.IPV6_XFRM_POLICY, unix.IPV6_2292PKTOPTIONS}},
	{unix.IPPROTO_TCP, noUpper, []uint32{unix.TCP_ULP}},
	{unix.IPPROTO_TCP, noOption, []uint32{tcpAOAddKey}},
	{unix.IPPROTO_UDP, noOption, []uint32{udpCork, udpEncap}},
}

// Package unix lacks these names.
const (
	flowLabel   = 32  // IPV6_FLOWLABEL_MGR
	udpCork     = 1   // UDP_CORK
	udpEncap    = 100 // UDP_ENCAP
	tcpAOAddKey = 38  // TCP_AO_ADD_KEY
)

// ioctls reach beyond the command or outlast it. The numbers are the same on all architectures with a filter; the
// kernel takes them as 32 bits.
var ioctls = [...]uint32{
	// These change a terminal that the command shares with the caller (ioctl_tty(2)): they stop others from opening
	// it, change its line discipline, stop its output, or type into the caller's shell. The kernel refuses TIOCSTI
	// and TIOCLINUX to a session that the terminal does not control; they are listed in case it does not.
	unix.TIOCEXCL, unix.TIOCSETD, unix.TIOCSTI, tiocLinux, unix.TCXONC,
	// A key that is added to a file system outlives the sandbox, and the calls use the kernel's keyrings. Encryption
	// policies of directories need such a key. fs-verity makes a file read-only for good.
	unix.FS_IOC_ADD_ENCRYPTION_KEY, unix.FS_IOC_REMOVE_ENCRYPTION_KEY, unix.FS_IOC_REMOVE_ENCRYPTION_KEY_ALL_USERS, unix.FS_IOC_SET_ENCRYPTION_POLICY,
	unix.FS_IOC_ENABLE_VERITY,
	// They write out the whole file system, as sync(2) does.
	btrfsSync, btrfsStartSync, btrfsWaitSync,
	// The kernel loads a module, bridge or 8021q, before it looks at the caller's capabilities.
	siocGIfBridge, siocSIfBridge, unix.SIOCBRADDBR, unix.SIOCBRDELBR, siocGIfVLAN, siocSIfVLAN,
}

// Package unix lacks these names.
const (
	tiocLinux      = 0x541c     // TIOCLINUX
	fioAsync       = 0x5452     // FIOASYNC
	btrfsSync      = 0x9408     // BTRFS_IOC_SYNC
	btrfsStartSync = 0x80089418 // BTRFS_IOC_START_SYNC
	btrfsWaitSync  = 0x40089416 // BTRFS_IOC_WAIT_SYNC
	siocGIfBridge  = 0x8940     // SIOCGIFBR
	siocSIfBridge  = 0x8941     // SIOCSIFBR
	siocGIfVLAN    = 0x8982     // SIOCGIFVLAN
	siocSIfVLAN    = 0x8983     // SIOCSIFVLAN
)
