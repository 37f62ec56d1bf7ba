package harness

import (
	"strings"

	"github.com/sbxrun/sbxrun/tests/check"
)

// SystemCalls is a Python program that makes system calls and prints the results for [Filtered]:
// some that the filter refuses, and some that debuggers and sanitizers need.
const SystemCalls = `import ctypes, errno, fcntl, os, platform, resource, signal
numbers = {"x86_64": (250, 425, 101, 162, 306, 314, 160), "aarch64": (219, 425, 117, 81, 267, 274, 164)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
def say(name, result):
    print(name, "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()])
say("keyctl", libc.syscall(numbers[0], 0, -3, 0, 0, 0))
say("io_uring_setup", libc.syscall(numbers[1], 1, None))
say("unshare", libc.unshare(0x10000000))
child = os.fork()
if child == 0:
    signal.pause()
say("seize-exit", libc.syscall(numbers[2], 0x4206, child, 0, 0x40))
say("seize", libc.syscall(numbers[2], 0x4206, child, 0, 0x10))
say("interrupt", libc.syscall(numbers[2], 0x4207, child, 0, 0))
os.waitpid(child, 0)
say("options-exit", libc.syscall(numbers[2], 0x4200, child, 0, 0x50))
say("options", libc.syscall(numbers[2], 0x4200, child, 0, 0x10))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
say("ptrace", libc.syscall(numbers[2], 0, 0, 0, 0))
say("sync", libc.syscall(numbers[3]))
say("syncfs", libc.syscall(numbers[4], os.open("/usr", os.O_RDONLY)))
say("fsync", libc.fsync(os.open("/usr", os.O_RDONLY)))
say("lease", libc.fcntl(os.open("/tmp/leased", os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_RDLCK))
say("prlimit64", libc.prlimit(1, resource.RLIMIT_NOFILE, None, None))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
libc.syscall(numbers[6], resource.RLIMIT_CORE, ctypes.byref((ctypes.c_ulong * 2)()))
print("core", *resource.getrlimit(resource.RLIMIT_CORE))
say("setpriority", libc.setpriority(os.PRIO_PROCESS, 1, 19))
say("of-a-user", libc.setpriority(os.PRIO_USER, os.getuid(), 19))
zero = ctypes.byref(ctypes.c_int(0))
say("sched_setparam", libc.sched_setparam(1, zero))
say("sched_setscheduler", libc.sched_setscheduler(1, os.SCHED_IDLE, zero))
say("sched_setaffinity", libc.sched_setaffinity(1, 128, (ctypes.c_ubyte * 128)(*[255] * 128)))
say("sched_setattr", libc.syscall(numbers[5], 1, (ctypes.c_uint32 * 12)(48), 0))
say("its-own", libc.setpriority(os.PRIO_PROCESS, 0, 19))
`

// Filtered asserts that the output of [SystemCalls] is that of a filtered process. A user
// namespace may also fail with ENOSPC.
func Filtered(t T, what, out string) {
	t.Helper()
	const want = "keyctl EPERM io_uring_setup ENOSYS unshare EPERM seize-exit EPERM seize ok interrupt ok options-exit EPERM options ok ptrace ok sync EPERM syncfs ENOSYS fsync ok lease EPERM prlimit64 EPERM core 1 1 " +
		"setpriority EPERM of-a-user EPERM sched_setparam EPERM sched_setscheduler EPERM sched_setaffinity EPERM sched_setattr EPERM its-own ok"
	check.Equal(t, strings.Replace(strings.Join(strings.Fields(out), " "), "unshare ENOSPC", "unshare EPERM", 1), want, "%s: %q", what, out)
}
