package cgroups

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
		if diff := cmp.Diff(tt.want, ParseMounts([]byte(tt.in))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
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
		if diff := cmp.Diff(tt.want, ParseMembership([]byte(tt.in))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
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
		if got, ok := (Mount{Root: tt.root, Point: "/cg"}).Own(tt.path); got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s below %s: %q, %v; want %q", tt.path, tt.root, got, ok, tt.want)
		}
	}
}

func FuzzParsers(f *testing.F) {
	for _, s := range []string{"32 31 0:29 /a\\040b /c rw - cgroup cgroup rw,pids\n", "0::/x\n2:cpu,cpuacct:/a:b\n"} {
		f.Add([]byte(s), "/x")
	}
	f.Fuzz(func(t *testing.T, data []byte, path string) {
		for _, mt := range ParseMounts(data) {
			if dir, ok := mt.Own(path); ok && !strings.HasPrefix(dir, mt.Point) {
				t.Fatalf("%q of %+v is %q", path, mt, dir)
			}
		}
		for c, p := range ParseMembership(data) {
			if p[0] != '/' {
				t.Fatalf("%q: %q", c, p)
			}
		}
	})
}
