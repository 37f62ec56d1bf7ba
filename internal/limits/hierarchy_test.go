package limits

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestParseMounts(t *testing.T) {
	tests := []struct {
		name, in string
		want     []Mount
	}{
		{"nothing", "", nil},
		{"v2", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n", []Mount{{"/", "/sys/fs/cgroup", true, nil}}},
		{"v1, two controllers, no newline", "32 31 0:29 /docker/x /sys/fs/cgroup/cpu,cpuacct ro master:1 propagate_from:2 - cgroup cgroup rw,cpu,cpuacct",
			[]Mount{{"/docker/x", "/sys/fs/cgroup/cpu,cpuacct", false, []string{"cpu", "cpuacct"}}}},
		{"escaped", `32 31 0:29 /a\040b /c\134\011d rw - cgroup cgroup rw,pids` + "\n", []Mount{{"/a b", "/c\\\td", false, []string{"pids"}}}},
		{"others", "1 2 0:3 / / rw - ext4 /dev/sda rw,memory\n2 2 0:3 / /s rw - cgroup systemd rw,name=systemd\n3 2 0:3 / /d rw - cgroup x rw,devices\n", nil},
		{"truncated", "32 31 0:29 / /sys\n32 31 0:29 / /sys rw - cgroup2\n32 31 - cgroup2 a b\n - \n-\n", nil},
		{"relative", "32 31 0:29 x y rw - cgroup2 cgroup2 rw\n", nil},
		{"root", "32 31 0:29 / / rw - cgroup2 cgroup2 rw\n", nil},
	}
	for _, tt := range tests {
		check.NoDiff(t, cmp.Diff(tt.want, parseMounts([]byte(tt.in))), "%s (-want +got)", tt.name)
	}
}

func TestParseMembership(t *testing.T) {
	tests := []struct {
		name, in string
		want     map[string]string
	}{
		{"hybrid", "9:name=systemd:/\n8:pids:/\n2:cpu,cpuacct:/a:b c\n0::/x\n", map[string]string{"name=systemd": "/", "pids": "/", "cpu": "/a:b c", "cpuacct": "/a:b c", "": "/x"}},
		{"hostile", "\n::\n0\n0:\n0::\n1:memory:relative\n7::/no-v2\nxx", map[string]string{}},
		{"the first counts, no newline", "1:pids:/a\n2:pids:/b\n0::/c", map[string]string{"pids": "/a", "": "/c"}},
	}
	for _, tt := range tests {
		check.NoDiff(t, cmp.Diff(tt.want, parseMembership([]byte(tt.in))), "%s (-want +got)", tt.name)
	}
}

func TestOwn(t *testing.T) {
	tests := []struct {
		root, path, want string
	}{
		{"/", "/", "/cg"},
		{"/", "/a/b", "/cg/a/b"},
		{"/docker/x", "/docker/x", "/cg"},
		{"/docker/x", "/docker/x/y", "/cg/y"},
		{"/docker/x", "/docker/xy", ""},
		{"/docker/x", "/", ""},
		{"/", "/../../a", ""},
		{"/", "/..", ""},
		{"/", "/a (deleted)", ""},
		{"/", "", ""},
	}
	for _, tt := range tests {
		got, ok := (Mount{Root: tt.root, Point: "/cg"}).Own(tt.path)
		check.That(t, got == tt.want && ok == (tt.want != ""), "%s below %s: %q, %v; want %q", tt.path, tt.root, got, ok, tt.want)
	}
}

func TestRow(t *testing.T) {
	tests := []struct {
		in, key string
		want    int64
		ok      bool
	}{
		{"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n", "oom_kill", 2, true},
		{"oom_kill 2\n", "oom", 0, false},
		{"usage_usec 9223372036854775807", "usage_usec", math.MaxInt64, true},
		{"usage_usec 9223372036854775808", "usage_usec", 0, false},
		{"oom_kill -1\n", "oom_kill", 0, false},
		{"oom_kill\noom_kill 1 2\n", "oom_kill", 0, false},
		{"xoom_kill 1\n oom_kill  5 \n", "oom_kill", 5, true},
		{"42\n", "", 42, true},
		{"max\n", "", 0, false},
		{"", "", 0, false},
		{"\n\n7", "", 7, true},
		{"1 2\n", "", 0, false},
	}
	for _, tt := range tests {
		got, ok := Row([]byte(tt.in), tt.key)
		check.That(t, got == tt.want && ok == tt.ok, "Row(%q, %q) = %d, %v; want %d, %v", tt.in, tt.key, got, ok, tt.want, tt.ok)
	}
}

func FuzzParsers(f *testing.F) {
	for _, s := range []string{"32 31 0:29 /a\\040b /c rw - cgroup cgroup rw,pids\n", "0::/x\n2:cpu,cpuacct:/a:b\n", "oom_kill 2\nmax 1\n", "42\n", "MemTotal: 9 kB\n"} {
		f.Add([]byte(s), "/x", int64(64<<20))
	}
	f.Fuzz(func(t *testing.T, data []byte, path string, size int64) {
		for _, mt := range parseMounts(data) {
			dir, ok := mt.Own(path)
			check.Require(t, !ok || strings.HasPrefix(dir, mt.Point), "%q of %+v is %q", path, mt, dir)
		}
		for c, p := range parseMembership(data) {
			check.Require(t, p[0] == '/', "%q: %q", c, p)
		}
		for _, key := range []string{"", "oom_kill", "max"} {
			n, ok := Row(data, key)
			check.Require(t, n >= 0 && (ok || n == 0), "row %q of %q is %d, %v", key, data, n, ok)
		}
		once := FakeMeminfo(data, size, size)
		again := FakeMeminfo(once, size, size)
		check.Require(t, string(once) == string(again), "%q becomes %q and then %q", data, once, again)
	})
}
