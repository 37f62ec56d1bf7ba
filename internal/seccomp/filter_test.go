package seccomp

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// judge runs the filter on a call with 32-bit arguments. The upper halves contain garbage, which the filter must ignore.
func judge(t *testing.T, f Filter, audit, number uint32, args ...uint32) uint32 {
	t.Helper()
	var wide []uint64
	for _, arg := range args {
		wide = append(wide, 0xffffffff<<32|uint64(arg))
	}
	return judgeWide(t, f, audit, number, wide...)
}

func judgeWide(t *testing.T, f Filter, audit, number uint32, args ...uint64) uint32 {
	t.Helper()
	var list []bpf.Instruction
	goarch := "amd64"
	if audit == unix.AUDIT_ARCH_AARCH64 || audit == unix.AUDIT_ARCH_ARM {
		goarch = "arm64"
	}
	for _, i := range f.program(goarch) {
		list = append(list, bpf.RawInstruction{Op: i.Code, Jt: i.Jt, Jf: i.Jf, K: i.K}.Disassemble())
	}
	vm, err := bpf.NewVM(list)
	check.Must(t, err)
	// The virtual machine of x/net reads big-endian numbers.
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[numberAt:], number)
	binary.BigEndian.PutUint32(data[archAt:], audit)
	for i, arg := range args {
		binary.BigEndian.PutUint32(data[argsAt+8*i:], uint32(arg))
		binary.BigEndian.PutUint32(data[argsAt+8*i+4:], uint32(arg>>32))
	}
	n, err := vm.Run(data)
	check.Must(t, err)
	return uint32(n)
}

func TestJudge(t *testing.T) {
	all := slices.Concat(architectures("amd64"), architectures("arm64"))
	const allow = uint32(unix.SECCOMP_RET_ALLOW)
	const dir = 0xffffff9c // AT_FDCWD
	type judged struct {
		args []uint32
		want uint32
	}
	opened := func(first ...uint32) (list []judged) {
		for _, j := range []judged{
			{[]uint32{unix.O_CREAT, 0o644}, allow}, {[]uint32{unix.O_CREAT, 0o1777}, allow}, {[]uint32{unix.O_RDONLY, 0o6755}, allow}, {[]uint32{unix.O_DIRECTORY, 0xffffffff}, allow},
			{[]uint32{unix.O_CREAT | unix.O_WRONLY, 0o4755}, refused}, {[]uint32{unix.O_CREAT, 0o2644}, refused}, {[]uint32{unix.O_TMPFILE | unix.O_RDWR, 0o6755}, refused}, {[]uint32{unix.O_TMPFILE | unix.O_RDWR, 0o600}, allow},
		} {
			list = append(list, judged{append(append([]uint32(nil), first...), j.args...), j.want})
		}
		return list
	}
	cases := map[rule][]judged{
		refuse:      {{nil, refused}},
		lack:        {{nil, missing}},
		mode1:       {{[]uint32{0o6777, 0o755, 0o6777}, allow}, {[]uint32{0, 0o100644 | unix.S_ISVTX}, allow}, {[]uint32{0, 0o4755}, refused}, {[]uint32{0, 0o102755}, refused}, {[]uint32{0, 0o6000}, refused}},
		mode2:       {{[]uint32{dir, 0o6777, 0o755, 0o6777}, allow}, {[]uint32{dir, 0, 0o4755}, refused}, {[]uint32{dir, 0, 0o2000}, refused}},
		flags1mode2: opened(0),
		flags2mode3: opened(dir, 0),
		socket: {{[]uint32{unix.AF_UNIX, unix.SOCK_SEQPACKET | unix.SOCK_CLOEXEC}, allow}, {[]uint32{unix.AF_UNIX, unix.SOCK_STREAM, unix.AF_UNIX}, allow},
			{[]uint32{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_NONBLOCK}, allow}, {[]uint32{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP}, allow}, {[]uint32{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP}, allow},
			{[]uint32{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDP}, allow}, {[]uint32{unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6}, allow},
			{[]uint32{unix.AF_NETLINK, unix.SOCK_RAW | unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE}, allow}, {[]uint32{unix.AF_NETLINK, unix.SOCK_DGRAM, unix.NETLINK_SOCK_DIAG}, allow}, {[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT}, allow},
			{[]uint32{unix.AF_UNSPEC}, foreign}, {[]uint32{unix.AF_PACKET}, foreign}, {[]uint32{unix.AF_KEY}, foreign}, {[]uint32{unix.AF_ALG}, foreign}, {[]uint32{unix.AF_VSOCK}, foreign}, {[]uint32{unix.AF_TIPC}, foreign}, {[]uint32{0xffffffff}, foreign},
			{[]uint32{unix.AF_INET, unix.SOCK_PACKET}, noType}, {[]uint32{unix.AF_INET, unix.SOCK_SEQPACKET}, noType}, {[]uint32{unix.AF_INET6, unix.SOCK_DCCP | unix.SOCK_CLOEXEC}, noType}, {[]uint32{unix.AF_NETLINK, unix.SOCK_STREAM}, noType},
			{[]uint32{unix.AF_UNIX, unix.SOCK_STREAM, 2}, noProtocol}, {[]uint32{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, noProtocol}, {[]uint32{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE}, noProtocol},
			{[]uint32{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, noProtocol}, {[]uint32{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW}, noProtocol}, {[]uint32{unix.AF_INET, unix.SOCK_DGRAM, 115}, noProtocol},
			{[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_USERSOCK}, noProtocol}, {[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM}, noProtocol}, {[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, noProtocol},
			{[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, noProtocol}, {[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_CONNECTOR}, noProtocol}, {[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC}, noProtocol},
			{[]uint32{unix.AF_NETLINK, unix.SOCK_RAW, 0xffffffff}, noProtocol}},
		send2: {{[]uint32{0, unix.MSG_OOB, unix.MSG_NOSIGNAL | unix.MSG_MORE, unix.MSG_OOB}, allow}, {[]uint32{0, 0, unix.MSG_OOB | unix.MSG_DONTWAIT}, noFlag}},
		send3: {{[]uint32{0, unix.MSG_OOB, unix.MSG_OOB, unix.MSG_NOSIGNAL}, allow}, {[]uint32{0, 0, 0, unix.MSG_OOB | unix.MSG_DONTWAIT}, noFlag}},
		request: {{[]uint32{0, unix.FS_IOC_GETFLAGS}, allow}, {[]uint32{0, 0xc0506617}, refused}, {[]uint32{0, 0xc0406618}, refused}, {[]uint32{0, 0x9408}, refused}, {[]uint32{0, unix.SIOCBRADDBR}, refused}, {[]uint32{0, unix.SIOCGIFCONF}, allow},
			{[]uint32{0, unix.TCGETS}, allow}, {[]uint32{0, unix.TIOCSWINSZ}, allow}, {[]uint32{unix.TIOCSTI, unix.TCSETS}, allow}, {[]uint32{0, unix.TIOCSTI}, refused}, {[]uint32{0, unix.TIOCEXCL}, refused}, {[]uint32{0, unix.TIOCSETD}, refused}, {[]uint32{0, tiocLinux}, refused}, {[]uint32{0, unix.TCXONC}, refused}, {[]uint32{0, fioAsync}, ignored}},
		option: {{[]uint32{0, unix.SOL_SOCKET, unix.SO_LINGER}, ignored}, {[]uint32{unix.SOL_SOCKET, unix.SO_LINGER, 0}, allow}, {[]uint32{0, unix.SOL_SOCKET, unix.SO_REUSEADDR}, allow}, {[]uint32{0, unix.IPPROTO_TCP, unix.SO_LINGER}, allow},
			{[]uint32{0, unix.SOL_SOCKET, unix.SO_RCVBUF}, ignored}, {[]uint32{0, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE}, ignored}, {[]uint32{0, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER}, refused}, {[]uint32{0, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF}, refused},
			{[]uint32{0, unix.IPPROTO_UDP, udpCork}, noOption}, {[]uint32{0, unix.IPPROTO_UDP, udpEncap}, noOption}, {[]uint32{0, unix.IPPROTO_UDP, unix.UDP_SEGMENT}, allow}, {[]uint32{0, unix.IPPROTO_TCP, unix.TCP_ULP}, noUpper},
			{[]uint32{0, unix.IPPROTO_TCP, unix.TCP_NODELAY}, allow}, {[]uint32{0, unix.IPPROTO_TCP, tcpAOAddKey}, noOption}, {[]uint32{0, unix.IPPROTO_IPV6, unix.IPV6_2292PKTOPTIONS}, refused}, {[]uint32{0, unix.IPPROTO_IP, unix.IP_XFRM_POLICY}, refused}, {[]uint32{0, unix.IPPROTO_IP, unix.IP_TOS}, allow}, {[]uint32{0, unix.IPPROTO_IPV6, unix.IPV6_ADDRFORM}, refused},
			{[]uint32{0, unix.IPPROTO_IPV6, flowLabel}, refused}, {[]uint32{0, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY}, allow}, {[]uint32{0, unix.IPPROTO_TCP, flowLabel}, allow}},
		control: {{[]uint32{0, unix.F_GETFD}, allow}, {[]uint32{unix.F_SETLEASE, unix.F_GETLEASE}, allow}, {[]uint32{0, unix.F_SETLEASE}, refused}, {[]uint32{0, unix.F_SETDELEG}, refused},
			{[]uint32{0, unix.F_SETFL, unix.O_NONBLOCK | unix.O_APPEND}, allow}, {[]uint32{0, unix.F_GETFL, unix.O_ASYNC}, allow}, {[]uint32{0, unix.F_SETOWN, unix.O_ASYNC}, allow},
			{[]uint32{0, unix.F_SETFL, unix.O_ASYNC | unix.O_NONBLOCK}, refused}, {[]uint32{0, unix.F_SETSIG, uint32(unix.SIGKILL)}, refused}},
		ofInit: {{[]uint32{0}, allow}, {[]uint32{2, 1}, allow}, {[]uint32{1}, refused}},
		priority: {{[]uint32{unix.PRIO_PROCESS, 0, 19}, allow}, {[]uint32{unix.PRIO_PROCESS, 2, 1}, allow}, {[]uint32{unix.PRIO_PGRP, 0, 1}, allow},
			{[]uint32{unix.PRIO_PROCESS, 1, 19}, refused}, {[]uint32{unix.PRIO_USER, 0, 19}, refused}, {[]uint32{unix.PRIO_USER, 1000, 19}, refused}},
		limit: {{[]uint32{unix.RLIMIT_CORE}, ignored}, {[]uint32{unix.RLIMIT_NOFILE, unix.RLIMIT_CORE}, allow}},
		limitOf: {{[]uint32{0, unix.RLIMIT_NOFILE, 1}, allow}, {[]uint32{2, 1, unix.RLIMIT_CORE}, allow}, {[]uint32{1, unix.RLIMIT_NOFILE, 1}, refused}, {[]uint32{1, unix.RLIMIT_CORE}, refused},
			{[]uint32{0, unix.RLIMIT_CORE, 1}, ignored}, {[]uint32{2, unix.RLIMIT_CORE, 0}, ignored}},
		tracing: {{[]uint32{unix.PTRACE_TRACEME}, allow}, {[]uint32{unix.PTRACE_ATTACH, 2, 0, unix.PTRACE_O_TRACEEXIT}, allow}, {[]uint32{unix.PTRACE_CONT, 2, 0, unix.PTRACE_O_TRACEEXIT}, allow},
			{[]uint32{unix.PTRACE_SEIZE, 2, unix.PTRACE_O_TRACEEXIT, unix.PTRACE_O_TRACEFORK}, allow}, {[]uint32{unix.PTRACE_SETOPTIONS, 2, 0, 0x1000bf}, allow},
			{[]uint32{unix.PTRACE_SEIZE, 2, 0, unix.PTRACE_O_TRACEEXIT}, refused}, {[]uint32{unix.PTRACE_SETOPTIONS, 2, 0, 0x51}, refused}, {[]uint32{21, 2, 0, 0xffffffff}, refused}},
		refuseSpace: {{nil, refused}},
		lackSpace:   {{nil, missing}},
		flags0:      {{[]uint32{unix.CLONE_NEWUSER | unix.CLONE_NEWNS}, refused}, {[]uint32{unix.CLONE_VM | unix.CLONE_THREAD}, allow}},
	}
	for _, a := range all {
		for _, f := range []Filter{Default, Namespaces} {
			seen := map[uint32]bool{}
			for _, r := range table {
				number := r.number[a.column]
				if number == none {
					continue
				}
				seen[number] = true
				for _, j := range cases[r.rule] {
					want := j.want
					if r.rule >= refuseSpace && f != Namespaces {
						want = allow
					}
					check.Equal(t, judge(t, f, a.audit, number, j.args...), want, "%+v, %s%#o of %#x", f, r.name, j.args, a.audit)
				}
			}
			for number := range uint32(600) {
				want := allow
				if number > newest {
					want = missing
				}
				got := judge(t, f, a.audit, number, 0o6000, 0o6000, 0o6000, 0o6000)
				check.That(t, seen[number] || got == want, "%+v, %d of %#x: %#x", f, number, a.audit, got)
			}
		}
	}
	check.Equal(t, judge(t, Default, unix.AUDIT_ARCH_MIPS, 0), missing, "a call of another machine")
	const x32 = 0x40000000 // marks the numbers of another ABI of x86-64
	check.Equal(t, judge(t, Default, unix.AUDIT_ARCH_X86_64, x32|1), missing, "x32")
	for number, want := range map[uint32]uint32{armPrivate - 1: missing, armPrivate + 5: allow, armPrivate + 0x100: missing} {
		check.Equal(t, judge(t, Default, unix.AUDIT_ARCH_ARM, number), want, "%#x of ARM", number)
	}
}

// A call without a new limit is allowed. A new limit is ignored, whatever its address.
func TestCoreLimit(t *testing.T) {
	const core = unix.RLIMIT_CORE
	for _, a := range architectures(runtime.GOARCH) {
		for _, r := range table {
			if r.rule != limitOf {
				continue
			}
			for address, want := range map[uint64]uint32{0: unix.SECCOMP_RET_ALLOW, 16: ignored, 1 << 32: ignored} {
				check.Equal(t, judgeWide(t, Default, a.audit, r.number[a.column], 0, core, address, 16), want, "%s of %#x at %#x", r.name, a.audit, address)
			}
		}
	}
}

// A filter that is not known refuses as much as possible.
func TestUnknown(t *testing.T) {
	for _, f := range []Filter{"", "none"} {
		check.That(t, slices.Equal(f.Program(), Namespaces.Program()), "%q is less strict", f)
	}
	check.That(t, Off.Program() == nil, "off refuses calls")
}

// TestSize bounds the filter: the kernel compiles it for every payload.
func TestSize(t *testing.T) {
	for _, f := range []Filter{Default, Namespaces} {
		if n := len(f.Program()); n > 430 {
			t.Errorf("%+v: %d instructions", f, n)
		} else {
			t.Logf("%+v: %d instructions", f, n)
		}
	}
}

// TestTable lists the expected rule of each call. The other tests take the calls from the table, so they would not
// notice a missing call or a wrong rule.
func TestTable(t *testing.T) {
	want := map[string]rule{}
	for r, names := range map[rule]string{
		refuse: "add_key request_key keyctl bpf perf_event_open fanotify_init lookup_dcookie open_by_handle_at sync syslog acct quotactl quotactl_fd " +
			"swapon swapoff reboot kexec_load kexec_file_load init_module finit_module delete_module nfsservctl vhangup iopl ioperm",
		lack: "openat2 syncfs userfaultfd io_uring_setup io_uring_enter io_uring_register socketcall modify_ldt vm86 vm86old uselib " +
			"memfd_secret cachestat listns",
		mode1:       "creat chmod fchmod mknod",
		mode2:       "fchmodat fchmodat2 mknodat",
		flags1mode2: "open",
		flags2mode3: "openat",
		socket:      "socket socketpair",
		send2:       "sendmsg",
		send3:       "send sendto sendmmsg",
		option:      "setsockopt",
		request:     "ioctl",
		control:     "fcntl fcntl64",
		ofInit:      "sched_setparam sched_setscheduler sched_setaffinity sched_setattr",
		priority:    "setpriority",
		limit:       "setrlimit",
		limitOf:     "prlimit64",
		tracing:     "ptrace",
		refuseSpace: "unshare setns",
		lackSpace:   "clone3",
		flags0:      "clone",
	} {
		for name := range strings.FieldsSeq(names) {
			want[name] = r
		}
	}
	got := map[string]rule{}
	for _, r := range table {
		got[r.name] = r.rule
	}
	check.NoDiff(t, cmp.Diff(want, got), "(-want +got)")
}

// TestNumbers compares the table with the numbers in package unix, for every architecture. Each call has a rule or is
// allowed.
func TestNumbers(t *testing.T) {
	dir := moduleDir(t)
	if _, err := os.Stat(dir); err != nil {
		// Another user compiled this test, with modules that this user does not have, and has run the comparison.
		t.Logf("%v", err)
		return
	}
	decided := map[string]bool{}
	for _, r := range table {
		decided[r.name] = true
	}
	for _, names := range allowed {
		for name := range strings.FieldsSeq(names) {
			check.That(t, !decided[name], "%s is decided twice", name)
			decided[name] = true
		}
	}
	for column, goarch := range map[int]string{x86_64: "amd64", i386: "386", arm64: "arm64", arm: "arm"} {
		data, err := os.ReadFile(filepath.Join(dir, "zsysnum_linux_"+goarch+".go"))
		check.Must(t, err)
		numbers := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^\s*SYS_(\w+)\s*=\s*(\d+)`).FindAllStringSubmatch(string(data), -1) {
			name := strings.ToLower(m[1])
			numbers[name] = m[2]
			check.That(t, decided[name], "%s is neither in the table nor allowed", name)
			n, _ := strconv.Atoi(m[2])
			check.That(t, n <= newest, "%s of %s is %d, and newest is %d", name, goarch, n, newest)
		}
		for _, r := range table {
			got := uint32(0)
			for _, c := range numbers[r.name] {
				got = got*10 + uint32(c-'0')
			}
			check.That(t, got == r.number[column], "%s of %s is %d, not %d", r.name, goarch, got, r.number[column])
		}
	}
}

// moduleDir returns the source directory of package unix, as recorded by the compiler.
func moduleDir(t *testing.T) string {
	t.Helper()
	file, _ := runtime.FuncForPC(funcPC()).FileLine(funcPC())
	if !filepath.IsAbs(file) { // because of -trimpath
		cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
		check.Must(t, err)
		file = filepath.Join(strings.TrimSpace(string(cache)), file)
	}
	return filepath.Dir(file)
}

func funcPC() uintptr {
	f := unix.Getpgrp
	return **(**uintptr)(unsafe.Pointer(&f))
}

// TestKernel loads the filter for one thread and checks that the kernel applies it.
func TestKernel(t *testing.T) {
	program := Namespaces.Program()
	errs := make(chan error)
	go func() {
		defer close(errs)
		runtime.LockOSThread() // never unlocked, so the thread exits with its filter
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			errs <- err
			return
		}
		fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
		if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog))); errno != 0 {
			errs <- errno
			return
		}
		_, _, keys := unix.RawSyscall(unix.SYS_KEYCTL, 0, 0, 0)
		_, _, spaces := unix.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWUSER, 0, 0)
		_, _, ring := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 1, 0, 0)
		check.That(t, keys == unix.EPERM && spaces == unix.EPERM && ring == unix.ENOSYS && unix.Getpid() == os.Getpid(), "keyctl %v, unshare %v, io_uring_setup %v", keys, spaces, ring)
	}()
	for err := range errs {
		t.Error(err)
	}
}
