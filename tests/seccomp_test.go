package tests

import (
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// calls makes some system calls and prints what they say: keyctl, io_uring_setup, a user
// namespace, and that others are there, as debuggers and sanitizers need.
const calls = `import ctypes, errno, os, platform
numbers = {"x86_64": (250, 425, 101), "aarch64": (219, 425, 117)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
def say(name, result):
    print(name, "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()])
say("keyctl", libc.syscall(numbers[0], 0, -3, 0, 0, 0))
say("io_uring_setup", libc.syscall(numbers[1], 1, None))
say("unshare", libc.unshare(0x10000000))
say("ptrace", libc.syscall(numbers[2], 0, 0, 0, 0))
`

// The same filter for the command of a run, of a sandbox and of an exec, and for what they
// start. A user namespace is refused by it, or has no room.
func TestSeccomp(t *testing.T) {
	t.Parallel()
	check := func(what, out string) {
		t.Helper()
		words := strings.Fields(out)
		if len(words) != 8 || words[1] != "EPERM" || words[3] != "ENOSYS" || words[5] != "EPERM" && words[5] != "ENOSPC" || words[7] != "ok" {
			t.Errorf("%s: %q", what, out)
		}
	}
	command := []string{"sh", "-c", `python3 -c "$1"`, "sh", calls}
	r := harness.Run(t, harness.Options{}, command...)
	r.Expect(t, 0, "exited")
	check("run", string(r.Stdout))
	b := harness.NewState(t).Sandbox(harness.Options{})
	x := b.Exec(harness.Options{}, nil, command...)
	x.Expect(t, 0, "exited")
	check("exec", string(x.Stdout))

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
