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

// ioctls tries those that would outlast the command on the caller's terminal, and those that programs need.
const ioctls = `import errno, fcntl, os, struct, termios
for name, number in ("TIOCEXCL", 0x540C), ("TIOCSETD", 0x5423), ("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TCXONC", 0x540A):
    try:
        fcntl.ioctl(0, number, struct.pack("i", 0))
        print(name, "ok")
    except OSError as e:
        if e.errno != errno.EPERM:
            print(name, errno.errorcode[e.errno])
termios.tcsetattr(0, termios.TCSANOW, termios.tcgetattr(0))
fcntl.ioctl(0, termios.TIOCGWINSZ, b"12345678")

# The kernel would signal the foreground process group of the caller's terminal.
for command, value in (fcntl.F_SETFL, os.O_ASYNC | os.O_RDWR), (10, 9): # F_SETSIG, SIGKILL
    try:
        print(command, fcntl.fcntl(0, command, value))
    except PermissionError:
        pass
fcntl.ioctl(0, 0x5452, struct.pack("i", 1)) # FIOASYNC, which nginx needs
if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ASYNC:
    print("O_ASYNC is set")
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
