package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/creack/pty"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The commands of a run, a sandbox and an exec, and their children, have the same filter. A user
// namespace may also fail for lack of room.
func TestSeccomp(t *testing.T) {
	t.Parallel()
	command := []string{"sh", "-c", `python3 -c "$1"`, "sh", harness.SystemCalls}
	r := harness.Run(t, harness.Options{}, command...).Expect(t, 0, "exited")
	harness.Filtered(t, "run", string(r.Stdout))
	b := harness.NewState(t).Sandbox(harness.Options{})
	x := b.Exec(harness.Options{}, nil, command...).Expect(t, 0, "exited")
	harness.Filtered(t, "exec", string(x.Stdout))

	// With --seccomp off there is no filter, so the results are the kernel's.
	harness.Run(t, harness.Options{}, append([]string{"--seccomp", "off"}, "grep", "Seccomp:", "/proc/self/status")...).Expect(t, 0, "exited").Out(t, "Seccomp:\t0\n")
	b = harness.NewState(t).Sandbox(harness.Options{}, "--seccomp", "off")
	b.Exec(harness.Options{}, nil, "grep", "Seccomp:", "/proc/self/status").Expect(t, 0, "exited").Out(t, "Seccomp:\t0\n")
	harness.Run(t, harness.Options{}, "--seccomp", "strict", "true").Exits(t, 125)
}

// modes tries every call that can set S_ISUID or S_ISGID, and prints those that don't fail as they
// should; then it sets ordinary modes.
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

// A command cannot leave a setuid file in a writable bind.
func TestSeccompSetID(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	check.Must(t, os.Mkdir(dir+"/inherit", 0o777))
	check.Must(t, os.Chmod(dir+"/inherit", 0o777|os.ModeSetgid))
	r := harness.Run(t, harness.Options{}, "--bind", dir+":/out", "python3", "-c", modes).Expect(t, 0, "exited")
	check.That(t, strings.Replace(string(r.Stdout), "made: inherit\n", "", 1) == "end\n", "%s", r.Stdout)
	// A directory may pass on its setgid bit, which the host has set.
	r = harness.Run(t, harness.Options{}, "--bind", dir+":/out", "sh", "-c", "mkdir /out/inherit/sub && stat -c %A /out/inherit/sub").Expect(t, 0, "exited")
	check.That(t, len(r.Stdout) >= 7 && r.Stdout[6] == 's', "in a directory with S_ISGID: %q", r.Stdout)
}

// setid tries to get privileges for files in /out by existing files, archives, attributes and
// 32-bit calls. It prints every attempt that succeeds.
const setid = `import ctypes, io, mmap, os, platform, shutil, signal, socket, stat, struct, tarfile
os.umask(0)
os.chdir("/out")
def attempt(what, f):
    try: f()
    except OSError: return
    print(what, "succeeded")
capability = b"\x01\0\0\x02" + b"\0\x20\0\0" + b"\0" * 12 # cap_net_raw, permitted and effective
open("file", "w").close()
for value in capability, b"\x01\0\0\x03" + capability[4:] + b"\0" * 4:
    attempt("security.capability", lambda: os.setxattr("file", "security.capability", value))
attempt("chown to root", lambda: os.chown("file", 0, 0))
# A file keeps its bits until its contents change.
os.rename("program", "renamed"); os.link("renamed", "linked")
attempt("chmod that keeps the bit", lambda: os.chmod("linked", 0o4777))
shutil.copyfile("renamed", "copied")
attempt("copystat", lambda: shutil.copystat("renamed", "copied"))
with open("renamed", "r+b") as f: f.write(b"changed")
with open("truncated", "r+b") as f: f.truncate(1)
if "security.capability" in os.listxattr("capable"):
    with open("capable", "r+b") as f: f.write(b"changed")
archive = io.BytesIO()
with tarfile.open(fileobj=archive, mode="w") as t:
    for mode in 0o4755, 0o2755:
        m = tarfile.TarInfo("unpacked%o" % mode); m.mode, m.uid = mode, os.getuid(); t.addfile(m)
open("/tmp/a.tar", "wb").write(archive.getvalue())
os.system("tar xpf /tmp/a.tar 2>/dev/null; cp -a linked copy 2>/dev/null; install -m 4755 linked installed 2>/dev/null")
s = socket.socket(socket.AF_UNIX)
attempt("fchmod of a socket", lambda: os.fchmod(s.fileno(), 0o4755))
# An access list changes only the ordinary bits.
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, perm, 0xffffffff) for tag, perm in ((1, 7), (4, 7), (0x20, 7)))
attempt("access list of another size", lambda: os.setxattr("file", "system.posix_acl_access", acl[:-1]))
try: os.setxattr("file", "system.posix_acl_access", acl)
except OSError: pass
if platform.machine() == "x86_64":
    low = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, prot=7) # MAP_32BIT
    at = ctypes.addressof(ctypes.c_char.from_buffer(low))
    # push %rbx; push %rsi; mov %edi,%eax; mov %esi,%ebx; xchg %edx,%ecx; mov %r8d,%esi; int $0x80; pop %rsi; pop %rbx; ret
    low.write(bytes.fromhex("535689f889f387d14489c6cd805e5bc3"))
    low.seek(256); low.write(b"file\0"); low.seek(272); low.write(b"new32\0")
    file, new, here = at + 256, at + 272, -100
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * 5)(at) # number, ebx, ecx, edx, esi
    child = os.fork()
    if child == 0:
        fd = os.open("file", os.O_RDONLY)
        for args in ((15, file, 0o4755, 0, 0), (94, fd, 0o4755, 0, 0), (8, new, 0o4755, 0, 0), (5, new, 0o101, 0o4755, 0), (14, new, stat.S_IFREG | 0o4755, 0, 0),
                     (306, here, file, 0o4755, 0), (452, here, file, 0o4755, 0), (295, here, new, 0o101, 0o4755), (297, here, new, stat.S_IFREG | 0o4755, 0)):
            if call(*args) >= 0: print("32-bit call", args[0], "succeeded", flush=True)
        os._exit(0)
    os.waitpid(child, 0) # SIGSEGV where nobody may make such calls
print("end")
`

// No file in a writable bind can get S_ISUID, S_ISGID or capabilities, also where a sandbox of
// root acts as the owner of the directory, who owns all files that it writes.
func TestPrivilegesOfWrittenFiles(t *testing.T) {
	t.Parallel()
	owners := []int{os.Getuid()}
	if harness.Root() {
		owners = append(owners, 61000)
	}
	for _, owner := range owners {
		dir := filepath.Join(harness.SharedDir(t), "out")
		check.Must(t, os.Mkdir(dir, 0o755))
		for _, name := range []string{"program", "truncated", "capable"} {
			check.Must(t, os.WriteFile(filepath.Join(dir, name), make([]byte, 100), 0o755))
			check.Must(t, os.Chown(filepath.Join(dir, name), owner, owner))
		}
		check.Must(t, os.Chmod(filepath.Join(dir, "program"), 0o755|os.ModeSetuid))
		check.Must(t, os.Chmod(filepath.Join(dir, "truncated"), 0o755|os.ModeSetgid))
		check.Must(t, os.Chown(dir, owner, owner))
		if harness.Root() {
			check.Must(t, unix.Setxattr(filepath.Join(dir, "capable"), "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00"+strings.Repeat("\x00", 12)), 0))
		}
		harness.Run(t, harness.Options{Dir: dir}, "--bind", dir+":/out", "/usr/bin/python3", "-c", setid).Expect(t, 0, "exited").Out(t, "end\n")
		entries := harness.ReadDir(t, dir)
		check.That(t, len(entries) >= 8, "owner %d: %v", owner, entries)
		for _, e := range entries {
			var st unix.Stat_t
			name := filepath.Join(dir, e.Name())
			check.Must(t, unix.Lstat(name, &st))
			if st.Mode&0o6000 != 0 || int(st.Uid) != owner || int(st.Gid) != owner {
				t.Errorf("owner %d: %s has mode %o and belongs to %d:%d", owner, e.Name(), st.Mode, st.Uid, st.Gid)
			}
			_, err := unix.Lgetxattr(name, "security.capability", nil)
			check.That(t, err == unix.ENODATA, "owner %d: %s has capabilities: %v", owner, e.Name(), err)
		}
	}
}

// sockets tries each family with socket(2) and socketpair(2), on x86-64 also with the calls of 32-bit programs.
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
		harness.Run(t, harness.Options{}, "--net", network, "python3", "-c", sockets).Expect(t, 0, "exited").Out(t, "end\n")
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

// Sockets have only the protocols and options that programs need. Other numbers fail as in a
// kernel without them, and don't make the kernel load a module.
func TestSeccompProtocols(t *testing.T) {
	t.Parallel()
	harness.Run(t, harness.Options{}, "--net", "host", "python3", "-c", protocols).Expect(t, 0, "exited").Out(t, "end\n")
}

// ioctls tries those that would outlast the command on the caller's terminal, and those that programs need.
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

// A terminal that is the command's stdin stays usable for others.
func TestSeccompTerminal(t *testing.T) {
	t.Parallel()
	master, terminal, err := pty.Open()
	check.Must(t, err)
	defer master.Close()
	defer terminal.Close()
	harness.Run(t, harness.Options{Stdin: terminal}, "python3", "-c", ioctls).Expect(t, 0, "exited").Out(t, "end\n")
}
