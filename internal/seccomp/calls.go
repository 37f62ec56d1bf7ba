package seccomp

import "golang.org/x/sys/unix"

const (
	refused = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	missing = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	foreign = unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)
	ignored = unix.SECCOMP_RET_ERRNO // nothing is done, and that succeeds
)

// Columns of the table.
const (
	x86_64 = iota
	i386
	arm64
	arm
	columns
)

// none: the architecture has no such call.
const none = 0

// rule is how a call is judged.
type rule int

const (
	refuse rule = iota // EPERM
	lack               // ENOSYS
	// Calls that make or change a file's mode: EPERM if that holds S_ISUID or S_ISGID.
	// The name says which argument is the mode, counted from 0.
	mode1
	mode2
	// open(2) has one only if it can make a file; what is in its place otherwise may be
	// anything. The first number is the argument with the flags.
	flags1mode2
	flags2mode3
	family      // of sockets, argument 0: EAFNOSUPPORT, but for those in families
	multiplexed // socketcall(2): ENOSYS for socketcalls
	option      // setsockopt(2), arguments 1 and 2: as options says
	terminal    // ioctl(2), argument 1: EPERM for those in ioctls
	lease       // fcntl(2), argument 1: EPERM for F_SETLEASE
	ofInit      // argument 0 is a pid: EPERM for that of init
	priority    // setpriority(2), arguments 0 and 1: EPERM for init, and for all of a user
	limit       // setrlimit(2), argument 0: nothing is done for RLIMIT_CORE
	limitOf     // prlimit64(2), arguments 0 to 2: EPERM for init, and nothing is done for a new RLIMIT_CORE
	tracing     // ptrace(2), arguments 0 and 3: EPERM for those of traceOptions with PTRACE_O_TRACEEXIT
	// Only with Filter.Namespaces:
	refuseSpace // EPERM
	lackSpace   // ENOSYS
	flags0      // clone: EPERM with CLONE_NEWUSER
)

type row struct {
	name   string
	rule   rule
	number [columns]uint32
}

// table is the calls that are judged, with the numbers of each architecture.
var table = [...]row{
	// A socket of a family that has no network namespaces, such as AF_VSOCK, reaches other
	// sandboxes and the host. A kernel without a family says EAFNOSUPPORT, too, and
	// programs try another, or do without.
	{"socket", family, [columns]uint32{41, 359, 198, 281}},
	{"socketpair", family, [columns]uint32{53, 360, 199, 288}},
	// Its arguments are in memory, which a filter cannot read.
	{"socketcall", multiplexed, [columns]uint32{none, 102, none, none}},
	{"setsockopt", option, [columns]uint32{54, 366, 208, 294}},
	{"ioctl", terminal, [columns]uint32{16, 54, 29, 54}},
	// Whoever opens a file of the caller's that is shown, read-only or not, would wait
	// for the holder of a lease, 45 s each time (proc_sys_fs(5), lease-break-time).
	{"fcntl", lease, [columns]uint32{72, 55, 25, 55}},
	{"fcntl64", lease, [columns]uint32{none, 221, none, 221}},
	// The uid is all that it asks for, and RLIMIT_CPU kills.
	//
	// The command's own RLIMIT_CORE is 1: at 0, to which everybody may lower it, a core_pattern that is a
	// pipe gives the host's program of root's a core to read (core(5)). Programs that switch their cores off
	// are told that they have.
	{"prlimit64", limitOf, [columns]uint32{302, 340, 261, 369}},
	{"setrlimit", limit, [columns]uint32{160, 75, 164, 75}},
	// Nor do these ask for more. The kernel has init reap all that was in its PID namespace
	// (pid_namespaces(7)): on a busy processor one with SCHED_IDLE takes longer for that than
	// the proof waits. An exiting process has no autogroup (sched(7)) that would help it.
	{"setpriority", priority, [columns]uint32{141, 97, 140, 97}},
	{"sched_setparam", ofInit, [columns]uint32{142, 154, 118, 154}},
	{"sched_setscheduler", ofInit, [columns]uint32{144, 156, 119, 156}},
	{"sched_setaffinity", ofInit, [columns]uint32{203, 241, 122, 241}},
	{"sched_setattr", ofInit, [columns]uint32{314, 351, 274, 380}},
	// With PTRACE_O_TRACEEXIT a process that was killed stops once more, until its tracer lets it go on or
	// ends. Two that trace each other so wait for each other, and since Linux 6.1 nothing ends them, with all
	// that they have in memory, before the machine does. So there is no way to do without the option, which
	// strace(1) always asks for.
	{"ptrace", tracing, [columns]uint32{101, 26, 117, 26}},
	// A program with S_ISUID in a writable bind gives others on the host the caller's uid.
	// mkdir is not among them: it ignores these bits (mkdir(2)).
	{"openat", flags2mode3, [columns]uint32{257, 295, 56, 322}},
	{"open", flags1mode2, [columns]uint32{2, 5, none, 5}},
	{"creat", mode1, [columns]uint32{85, 8, none, 8}},
	{"chmod", mode1, [columns]uint32{90, 15, none, 15}},
	{"fchmod", mode1, [columns]uint32{91, 94, 52, 94}},
	{"mknod", mode1, [columns]uint32{133, 14, none, 14}},
	{"fchmodat", mode2, [columns]uint32{268, 306, 53, 333}},
	{"fchmodat2", mode2, [columns]uint32{452, 452, 452, 452}},
	{"mknodat", mode2, [columns]uint32{259, 297, 33, 324}},
	// Its mode is in memory. Who uses it takes openat where the kernel is older than 5.6.
	{"openat2", lack, [columns]uint32{437, 437, 437, 437}},
	// The kernel's keyrings: the caller's session keyring is the payload's as well
	// (keyrings(7)).
	{"add_key", refuse, [columns]uint32{248, 286, 217, 309}},
	{"request_key", refuse, [columns]uint32{249, 287, 218, 310}},
	{"keyctl", refuse, [columns]uint32{250, 288, 219, 311}},
	// Large, and for who watches or changes the machine.
	{"bpf", refuse, [columns]uint32{321, 357, 280, 386}},
	{"perf_event_open", refuse, [columns]uint32{298, 336, 241, 364}},
	{"fanotify_init", refuse, [columns]uint32{300, 338, 262, 367}},
	{"lookup_dcookie", refuse, [columns]uint32{212, 253, 18, 249}},
	{"open_by_handle_at", refuse, [columns]uint32{304, 342, 265, 371}},
	// All that the host has not written yet, for any file of it that is shown; and nobody can
	// kill who waits for that. fsync(2) is about one file.
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
	// What programs can do without, and do on older kernels: userfaultfd holds kernel
	// code up at a chosen place, io_uring goes around everything that looks at calls.
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

// traceOptions are the requests of ptrace(2) that bring options: PTRACE_SETOPTIONS, by its old number as
// well, and PTRACE_SEIZE.
var traceOptions = [...]uint32{unix.PTRACE_SETOPTIONS, 21, unix.PTRACE_SEIZE}

// families are those of sockets that a payload can have: they belong to a network
// namespace, or to the file system, or, AF_NETLINK, are what libraries ask the kernel by.
var families = [...]uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

// options are those of sockets, by level and name, that are not for a payload, and the answer.
//
// With SO_LINGER the close of a TCP socket waits for as long as it says, and that is whoever closes it last:
// a process outside that was sent the socket and reads by read(2) has it closed in there, and of a
// unix socket's that is in a cycle with itself the kernel's own worker does it, which closes files for
// all of the machine, one after the other (delayed_fput). Without it a close does not wait, and what was
// written is sent all the same, so programs are not told.
//
// A flow label stays when its socket is closed, for as long as it says; with 16 bytes of the payload's it can be
// read by all in the network namespace (/proc/net/ip6_flowlabel), which of a warm room is the next call.
var options = [...]struct{ level, name, answer uint32 }{
	{unix.SOL_SOCKET, unix.SO_LINGER, ignored},
	{unix.IPPROTO_IPV6, flowLabel, refused},
}

const flowLabel = 32 // IPV6_FLOWLABEL_MGR: package unix has it not

// ioctls are those that outlast the command on a terminal that it shares with the caller
// (ioctl_tty(2)): nobody else can open that any more, it has another line discipline, its output
// is stopped, or what was put into its input is typed into the caller's shell. The kernel refuses
// TIOCSTI and TIOCLINUX to a session that the terminal does not control; they
// are here as well because all else depends on that. The numbers are those of all
// architectures that there is a filter for.
var ioctls = [...]uint32{unix.TIOCEXCL, unix.TIOCSETD, unix.TIOCSTI, tiocLinux, unix.TCXONC}

const tiocLinux = 0x541c // TIOCLINUX: package unix has it not

// socketcalls are the calls of socketcall(2) that are judged: SYS_SOCKET, SYS_SOCKETPAIR, SYS_SETSOCKOPT.
var socketcalls = [...]uint32{1, 8, 14}
