package tests

import (
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// hiddenFiles prints the readable contents of hidden files of /proc, and the sysctls that are
// writable.
const hiddenFiles = `import os
for dir in "/proc", "/proc/self/root/proc", "/proc/thread-self/root/proc":
    for name in "keys", "key-users", "locks":
        try:
            print(dir, name, open("%s/%s" % (dir, name)).read())
        except (PermissionError, FileNotFoundError):
            pass
for name in "cpuinfo", "meminfo", "stat", "loadavg", "self/status", "sys/kernel/osrelease":
    open("/proc/" + name).read()
for top, dirs, files in os.walk("/proc/sys"):
    for name in files:
        if os.access(os.path.join(top, name), os.W_OK):
            print("writable", top, name)
try:
    open("/proc/sys/kernel/sem", "r+").write("64000 1024000000 500 32000")
    print("kernel.sem was written")
except OSError:
    pass
print("end")
`

// Commands of a run, a sandbox and an exec see neither the caller's keys nor the machine's file
// locks, and cannot change a sysctl.
func TestProcMasked(t *testing.T) {
	t.Parallel()
	hidden := func(what string, out []byte) {
		t.Helper()
		if string(out) != "end\n" {
			t.Errorf("%s: %s", what, out)
		}
	}
	r := harness.Run(t, harness.Options{}, "python3", "-c", hiddenFiles)
	r.Expect(t, 0, "exited")
	hidden("run", r.Stdout)
	b := harness.NewState(t).Sandbox(harness.Options{})
	x := b.Exec(harness.Options{}, nil, "python3", "-c", hiddenFiles)
	x.Expect(t, 0, "exited")
	hidden("exec", x.Stdout)
}
