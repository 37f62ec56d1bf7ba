package tests

import (
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The same filter for the command of a run, of a sandbox and of an exec, and for what they
// start. A user namespace is refused by it, or has no room.
func TestSeccomp(t *testing.T) {
	t.Parallel()
	command := []string{"sh", "-c", `python3 -c "$1"`, "sh", harness.SystemCalls}
	r := harness.Run(t, harness.Options{}, command...)
	r.Expect(t, 0, "exited")
	harness.Filtered(t, "run", string(r.Stdout))
	b := harness.NewState(t).Sandbox(harness.Options{})
	x := b.Exec(harness.Options{}, nil, command...)
	x.Expect(t, 0, "exited")
	harness.Filtered(t, "exec", string(x.Stdout))

	// And none if that is asked for; the kernel's own answer then.
	r = harness.Run(t, harness.Options{}, append([]string{"--seccomp", "off"}, "grep", "Seccomp:", "/proc/self/status")...)
	if r.Expect(t, 0, "exited"); string(r.Stdout) != "Seccomp:\t0\n" {
		t.Errorf("off: %q", r.Stdout)
	}
	b = harness.NewState(t).Sandbox(harness.Options{}, "--seccomp", "off")
	x = b.Exec(harness.Options{}, nil, "grep", "Seccomp:", "/proc/self/status")
	if x.Expect(t, 0, "exited"); string(x.Stdout) != "Seccomp:\t0\n" {
		t.Errorf("exec, off: %q", x.Stdout)
	}
	if r = harness.Run(t, harness.Options{}, "--seccomp", "strict", "true"); r.ExitCode != 125 {
		t.Errorf("strict: exit code %d", r.ExitCode)
	}
}

// modes tries every call that can give a file S_ISUID or S_ISGID, and prints those that do
// not fail as they should; then that ordinary modes can still be given.
const modes = `import ctypes, errno, os, platform, stat
x86 = platform.machine() == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
os.umask(0)
os.chdir("/out")
here = -100
open("file", "w").close()
how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o4755, 0)
mknodat, fchmod, fchmodat, openat = (259, 91, 268, 257) if x86 else (33, 52, 53, 56)
tried = [("fchmodat2", "EPERM ENOSYS", 452, here, b"file", 0o2755, 0), ("openat2", "ENOSYS", 437, here, b"new", how, 24)]
for bits in (0o4755, 0o2755, 0o6700):
    tried += [
        ("fchmod", "EPERM", fchmod, os.open("file", os.O_RDONLY), bits),
        ("fchmodat", "EPERM", fchmodat, here, b"file", bits),
        ("mknodat", "EPERM", mknodat, here, b"new", stat.S_IFREG | bits, 0),
        ("openat", "EPERM", openat, here, b"new", os.O_CREAT | os.O_WRONLY, bits),
        ("tmpfile", "EPERM", openat, here, b".", os.O_TMPFILE | os.O_WRONLY, bits),
    ]
    if x86:
        tried += [
            ("chmod", "EPERM", 90, b"file", bits),
            ("mknod", "EPERM", 133, b"new", stat.S_IFREG | bits, 0),
            ("open", "EPERM", 2, b"new", os.O_CREAT | os.O_WRONLY, bits),
            ("creat", "EPERM", 85, b"new", bits),
        ]
for name, want, *args in tried:
    said = "success" if libc.syscall(*args) >= 0 else errno.errorcode[ctypes.get_errno()]
    if said not in want.split():
        print(name, [a for a in args if isinstance(a, int)], said)
for name in os.listdir("."):
    if os.stat(name).st_mode & 0o6000:
        print("made:", name)
os.chmod("file", 0o1755)
os.close(os.open("other", os.O_CREAT | os.O_WRONLY, 0o777))
os.mkdir("dir", 0o2755)
if libc.syscall(openat, here, b"file", os.O_RDONLY, 0o6755) < 0:
    print("a mode without O_CREAT counts")
print("end")
`

// A file that runs with the caller's uid cannot be left in a writable bind.
func TestSeccompSetID(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	harness.Must(t, os.Mkdir(dir+"/inherit", 0o777))
	harness.Must(t, os.Chmod(dir+"/inherit", 0o777|os.ModeSetgid))
	r := harness.Run(t, harness.Options{}, "--bind", dir+":/out", "python3", "-c", modes)
	if r.Expect(t, 0, "exited"); strings.Replace(string(r.Stdout), "made: inherit\n", "", 1) != "end\n" {
		t.Errorf("%s", r.Stdout)
	}
	// What a directory hands down is the host's choice, and stays.
	r = harness.Run(t, harness.Options{}, "--bind", dir+":/out", "sh", "-c", "mkdir /out/inherit/sub && stat -c %A /out/inherit/sub")
	if r.Expect(t, 0, "exited"); len(r.Stdout) < 7 || r.Stdout[6] != 's' {
		t.Errorf("in a directory with S_ISGID: %q", r.Stdout)
	}
}

// sockets tries each family by socket(2) and socketpair(2), and, on x86-64, by the calls
// of 32-bit programs as well.
const sockets = `import ctypes, errno, mmap, os, platform, signal
libc = ctypes.CDLL(None, use_errno=True)
def said(result):
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
for family in range(0, 64):
    one = said(libc.socket(family, 2, 0))
    pair = said(libc.socketpair(family, 2, 0, (ctypes.c_int * 2)()))
    if family not in (1, 2, 10, 16):
        if (one, pair) != ("EAFNOSUPPORT", "EAFNOSUPPORT"):
            print(family, one, pair)
    elif "ok" not in (one, "ok" if family == 10 and one == "EAFNOSUPPORT" else ""): # IPv6 may be off
        print(family, one, pair)
if platform.machine() == "x86_64":
    # push %rbx; mov %edi,%eax; mov %esi,%ebx; mov %edx,%ecx; xor %edx,%edx; int $0x80; pop %rbx; ret
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("5389f889f389d131d2cd805bc3"))
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * 3)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    def answers():
        found = [call(359, 40, 1), call(360, 40, 1), call(359, 2, 6), call(102, 1, 0), call(102, 8, 0), call(102, 11, 0), call(123, 0, 0)]
        return found if found not in ([-97, -97, -94, -38, -38, -38, -38], [-38] * 7) else "" # or there are no 32-bit programs here
    # Some hypervisors let nobody make such a call: it ends in SIGSEGV.
    child = os.fork()
    if child == 0:
        print(answers(), end="", flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status not in (0, signal.SIGSEGV):
        print("a 32-bit program's call ends with", status)
print("end")
`

func TestSeccompSockets(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"none", "host"} {
		r := harness.Run(t, harness.Options{}, "--net", network, "python3", "-c", sockets)
		if r.Expect(t, 0, "exited"); string(r.Stdout) != "end\n" {
			t.Errorf("--net %s: %s", network, r.Stdout)
		}
	}
}

// protocols tries protocols and options of the allowed socket families.
const protocols = `import ctypes, errno, fcntl, os, struct
from socket import *
libc = ctypes.CDLL(None, use_errno=True)
def said(what, *args):
    try:
        what(*args)
        return "ok"
    except OSError as e:
        return errno.errorcode[e.errno]
def expect(want, name, what, *args):
    if (got := said(what, *args)) not in want.split():
        print(name, got)
netlink, raw = 16, 3
for family, kind, number in (AF_UNIX, SOCK_SEQPACKET, 0), (AF_UNIX, SOCK_STREAM, 1), (AF_INET, SOCK_STREAM, 6), (AF_INET, SOCK_DGRAM, 17), (netlink, raw, 0), (netlink, SOCK_DGRAM, 4), (netlink, raw, 15):
    expect("ok", (family, kind, number), socket, family, kind | SOCK_CLOEXEC, number)
expect("ok EACCES", "ping", socket, AF_INET, SOCK_DGRAM, 1) # EACCES: net.ipv4.ping_group_range
expect("EPERM", "raw", socket, AF_INET, raw, 1)
for number in [n for n in range(24) if n not in (0, 4, 15)] + [64]:
    expect("EPROTONOSUPPORT", ("netlink", number), socket, netlink, raw, number)
for family in AF_INET, AF_INET6:
    for kind, number in (SOCK_STREAM, 262), (SOCK_STREAM, 132), (SOCK_STREAM, 256), (SOCK_DGRAM, 136), (SOCK_DGRAM, 115), (raw, 255):
        expect("EPROTONOSUPPORT", (family, number), socket, family, kind, number)
    for kind in SOCK_SEQPACKET, 6, 10:
        expect("ESOCKTNOSUPPORT", (family, kind), socket, family, kind, 0)
expect("EPROTONOSUPPORT", "pair", lambda: socketpair(AF_UNIX, SOCK_STREAM, 2))
expect("ok", "interfaces", if_nameindex) # the C library asks by netlink
expect("ok", "addresses", getaddrinfo, "localhost", 80)
tcp, udp = socket(AF_INET, SOCK_STREAM), socket(AF_INET, SOCK_DGRAM)
for name in SO_RCVBUF, SO_SNDBUF, 32, 33: # and with FORCE
    before = udp.getsockopt(SOL_SOCKET, name % 25)
    expect("ok", ("buffer", name), udp.setsockopt, SOL_SOCKET, name, 100000)
    if udp.getsockopt(SOL_SOCKET, name % 25) != before:
        print("buffer", name)
program = struct.pack("HHBBI", 6, 0, 0, 0, 0xffff) # return
program = ctypes.create_string_buffer(program)
for name in 26, 50, 51, 52:
    expect("EPERM", ("filter", name), udp.setsockopt, SOL_SOCKET, name, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
for name in 1, 100:
    expect("ENOPROTOOPT", ("udp", name), udp.setsockopt, IPPROTO_UDP, name, 1)
expect("ENOENT", "ulp", tcp.setsockopt, IPPROTO_TCP, 31, b"tls")
expect("ok", "nodelay", tcp.setsockopt, IPPROTO_TCP, TCP_NODELAY, 1)
one, other = socketpair()
for name, call in ("send", one.send), ("sendmsg", lambda data, flags: one.sendmsg([data], [], flags)):
    expect("ENOTSUP EOPNOTSUPP", name, call, b"x", MSG_OOB)
    expect("ok", name, call, b"x", MSG_NOSIGNAL | MSG_DONTWAIT)
there = os.open("/tmp", os.O_RDONLY)
for number in 0xc0506617, 0xc0406618, 0xc0406619, 0x800c6613, 0x40806685, 0x9408, 0x80089418, 0x40089416, 0x89a0, 0x89a1, 0x8940, 0x8941, 0x8982, 0x8983:
    expect("EPERM", hex(number), fcntl.ioctl, there, number, bytes(128))
for name, number in ("memfd_secret", 447), ("cachestat", 451), ("listns", 470), ("later", 472):
    if libc.syscall(number, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
        print(name)
print("end")
`

// Sockets have only the protocols and options that programs need. Other numbers fail as in a kernel without them, and do
// not make the kernel load a module.
func TestSeccompProtocols(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "--net", "host", "python3", "-c", protocols)
	if r.Expect(t, 0, "exited"); string(r.Stdout) != "end\n" {
		t.Errorf("%s", r.Stdout)
	}
}

// ioctls tries what would outlast the command on the caller's terminal, and what it needs.
const ioctls = `import errno, fcntl, struct, termios
for name, number in ("TIOCEXCL", 0x540C), ("TIOCSETD", 0x5423), ("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TCXONC", 0x540A):
    try:
        fcntl.ioctl(0, number, struct.pack("i", 0))
        print(name, "ok")
    except OSError as e:
        if e.errno != errno.EPERM:
            print(name, errno.errorcode[e.errno])
termios.tcsetattr(0, termios.TCSANOW, termios.tcgetattr(0))
fcntl.ioctl(0, termios.TIOCGWINSZ, b"12345678")
print("end")
`

// A terminal that is the command's stdin is left as others can use it.
func TestSeccompTerminal(t *testing.T) {
	t.Parallel()
	master, terminal, err := pty.Open()
	harness.Must(t, err)
	defer master.Close()
	defer terminal.Close()
	r := harness.Run(t, harness.Options{Stdin: terminal}, "python3", "-c", ioctls)
	if r.Expect(t, 0, "exited"); string(r.Stdout) != "end\n" {
		t.Errorf("%s", r.Stdout)
	}
}
