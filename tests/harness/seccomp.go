package harness

import "strings"

// SystemCalls is a program in Python that makes some system calls and prints what they say, for
// [Filtered]: keyctl, io_uring_setup, a user namespace, sync and syncfs, a lease and init's limits,
// and that others are there, as debuggers and sanitizers need.
const SystemCalls = `import ctypes, errno, fcntl, os, platform, resource
numbers = {"x86_64": (250, 425, 101, 162, 306), "aarch64": (219, 425, 117, 81, 267)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
def say(name, result):
    print(name, "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()])
say("keyctl", libc.syscall(numbers[0], 0, -3, 0, 0, 0))
say("io_uring_setup", libc.syscall(numbers[1], 1, None))
say("unshare", libc.unshare(0x10000000))
say("ptrace", libc.syscall(numbers[2], 0, 0, 0, 0))
say("sync", libc.syscall(numbers[3]))
say("syncfs", libc.syscall(numbers[4], os.open("/usr", os.O_RDONLY)))
say("fsync", libc.fsync(os.open("/usr", os.O_RDONLY)))
say("lease", libc.fcntl(os.open("/tmp/leased", os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_RDLCK))
say("prlimit64", libc.prlimit(1, resource.RLIMIT_NOFILE, None, None))
`

// Filtered looks at what [SystemCalls] has printed where there is the filter. A user namespace is
// refused by it, or has no room.
func Filtered(t T, what, out string) {
	t.Helper()
	words := strings.Fields(out)
	if len(words) != 18 || words[1] != "EPERM" || words[3] != "ENOSYS" || words[5] != "EPERM" && words[5] != "ENOSPC" || words[7] != "ok" ||
		words[9] != "EPERM" || words[11] != "ENOSYS" || words[13] != "ok" || words[15] != "EPERM" || words[17] != "EPERM" {
		t.Errorf("%s: %q", what, out)
	}
}
