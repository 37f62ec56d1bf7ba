package limits

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// layout is a cgroup v2 tree of ordinary files. Each directory has its children's controllers, its
// processes and its mode.
type layout struct {
	dir, available, enabled, procs string
	mode                           os.FileMode
}

func fake(t *testing.T, own string, dirs ...layout) (*Machine, string) {
	t.Helper()
	root := t.TempDir()
	put := func(path, text string, mode os.FileMode) {
		path = root + path
		check.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		check.Must(t, os.WriteFile(path, []byte(text), mode))
	}
	put("/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n", 0o644)
	put("/proc/self/cgroup", "0::"+own+"\n", 0o644)
	put("/proc/swaps", "Filename Type Size Used Priority\n", 0o644)
	for _, d := range dirs {
		put("/cg"+d.dir+"/cgroup.controllers", d.available, 0o444)
		put("/cg"+d.dir+"/cgroup.subtree_control", d.enabled, 0o644)
		put("/cg"+d.dir+"/cgroup.procs", d.procs, 0o644)
		if d.dir != "" {
			put("/cg"+d.dir+"/cgroup.type", "domain\n", 0o444)
		}
	}
	for _, d := range dirs {
		if d.mode != 0 {
			dir := root + "/cg" + d.dir
			check.Must(t, os.Chmod(dir, d.mode))
			t.Cleanup(func() { _ = os.Chmod(dir, 0o755) })
		}
	}
	m, err := detect(root)
	check.Must(t, err)
	return m, root
}

// deadline is long enough for a cgroup that is not busy.
func deadline() time.Time { return time.Now().Add(time.Second) }

const all = "cpu memory pids"

func TestLayouts(t *testing.T) {
	asked := Request{Memory: 64 << 20, Pids: 10, CPUs: 1}
	tests := []struct {
		name, own string
		dirs      []layout
		want      string // parent of the new cgroup; "" for an error
		refused   string // part of the message
	}{
		{"beside a leaf", "/a/leaf", []layout{{"", all, all, "1\n", 0}, {"/a", all, all, "", 0}, {"/a/leaf", all, "", "2\n", 0}}, "/cg/a", ""},
		{"controllers can be enabled", "/a/leaf", []layout{{"", all, all, "1\n", 0}, {"/a", all, "", "", 0}, {"/a/leaf", "", "", "2\n", 0}}, "/cg/a", ""},
		{"the parent lacks one, the next has it", "/a/leaf", []layout{{"", all, all, "1\n", 0}, {"/a", "memory pids", "memory pids", "", 0}, {"/a/leaf", "", "", "2\n", 0}}, "/cg", ""},
		{"the root of all cgroups", "/", []layout{{"", all, "", "1\n", 0}}, "/cg", ""},
		{"a container's root that holds processes", "/c", []layout{{"/c", all, "", "1\n", 0}}, "", "which contains processes"},
		{"no memory controller", "/a/leaf", []layout{{"/a", "cpu pids", "cpu pids", "", 0}, {"/a/leaf", "cpu pids", "", "2\n", 0}}, "", "no writable cgroup has the controller memory"},
		{"not ours to see", "/../x", []layout{{"", all, all, "", 0}}, "", "not in the hierarchy mounted"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m, root := fake(t, tt.own, tt.dirs...)
			p, err := m.Plan(asked, true)
			if tt.want == "" {
				e, ok := errors.AsType[*result.Error](err)
				check.Require(t, ok && e.Code == "limit" && strings.Contains(e.Message, tt.refused) && e.Hint != "" && !strings.Contains(e.Message, "\n"), "%+v, %#v", p, err)
				return
			}
			check.Must(t, err)
			check.That(t, p.v2.dir == root+tt.want, "below %s, want %s", p.v2.dir, tt.want)
		})
	}
}

// In a plain login session on v2 no cgroup is writable.
func TestNotWritable(t *testing.T) {
	m, _ := fake(t, "/a/leaf", layout{"", all, all, "1\n", 0o555}, layout{"/a", all, all, "", 0o555}, layout{"/a/leaf", all, "", "2\n", 0o555})
	p, err := m.Plan(Request{Pids: 10}, true)
	if os.Geteuid() == 0 { // modes do not restrict root
		check.That(t, err == nil, "%v", err)
		return
	}
	e, ok := errors.AsType[*result.Error](err)
	check.That(t, ok && strings.Contains(e.Message, "permission denied") && strings.HasPrefix(e.Hint, "to enable limits in this shell: sbxrun doctor --script | sudo sh; "), "%+v, %#v", p, err)
}

// A single error lists all limits that cannot be enforced, with each reason and each hint once.
func TestRefusedAtOnce(t *testing.T) {
	m, root := fake(t, "/a/leaf", layout{"/a", "pids", "pids", "", 0}, layout{"/a/leaf", "pids", "", "2\n", 0})
	low := -21
	_, err := m.Plan(Request{Memory: 64 << 20, MemorySwap: -1, Pids: 10, CPUs: 1, CPUTime: time.Second, Nice: &low}, true)
	check.That(t, errors.As(err, new(*result.Error)) && !strings.Contains(err.Error(), "cannot be enforced"), "what no machine can enforce comes first: %v", err)
	_, err = m.Plan(Request{Memory: 64 << 20, MemorySwap: -1, Pids: 10, CPUs: 1, CPUTime: time.Second}, true)
	var e *result.Error
	want := "limits cannot be enforced here: memory, memory-swap: no writable cgroup has the controller memory; cpus: no writable cgroup has the controller cpu"
	check.That(t, errors.As(err, &e) && e.Message == want, "%v\nwant %s (%s)", err, want, root)
	check.That(t, strings.Count(e.Hint, OrWithout) == 1 && strings.Contains(e.Hint, "cgroup_disable=memory") && strings.Contains(e.Hint, "cgroup_disable=cpu"), "hint %q", e.Hint)
}

// If cgroup files are missing, Make fails and leaves nothing for a required limit, and marks the limit for best effort.
func TestMakeFails(t *testing.T) {
	for _, required := range []bool{true, false} {
		m, root := fake(t, "/a/leaf", layout{"/a", all, all, "", 0}, layout{"/a/leaf", all, "", "2\n", 0})
		p, err := m.Plan(Request{Memory: 1 << 20, Pids: 10}, required)
		check.Must(t, err)
		g, err := p.Make("x", false)
		dir := root + "/cg/a/sbxrun-x"
		if required {
			_, ok := errors.AsType[*result.Error](err)
			check.That(t, ok && errors.Is(err, unix.ENOENT) && !exists(dir), "%v, left: %v", err, exists(dir))
			continue
		}
		check.Require(t, err == nil && exists(dir), "%v", err)
		for _, l := range g.Limits(0) {
			check.That(t, !l.Enforced && l.Reason != "", "%+v", l)
		}
	}
}

func TestRemoveDirs(t *testing.T) {
	dir := t.TempDir()
	err := RemoveDirs([]string{dir}, deadline())
	check.That(t, err != nil && exists(dir), "what is not sbxrun's was removed: %v", err)
	check.OK(t, RemoveDirs([]string{dir + "/sbxrun-gone"}, deadline()))
	check.Must(t, os.MkdirAll(dir+"/sbxrun-a/main/x", 0o755))
	err = RemoveDirs([]string{dir + "/sbxrun-a"}, deadline())
	check.That(t, err == nil && !exists(dir+"/sbxrun-a"), "%v", err)
}

// MemoryOf uses whichever of a sandbox's cgroups counts memory.
func TestMemoryOf(t *testing.T) {
	dir := t.TempDir()
	for path, text := range map[string]string{"/v2/memory.current": "4096\n", "/memory/memory.usage_in_bytes": "8192\n", "/pids/pids.current": "3\n"} {
		check.Must(t, os.MkdirAll(filepath.Dir(dir+path), 0o755))
		check.Must(t, os.WriteFile(dir+path, []byte(text), 0o644))
	}
	for _, tt := range []struct {
		dirs []string
		want int64
	}{
		{[]string{dir + "/v2"}, 4096},
		{[]string{dir + "/pids", dir + "/memory"}, 8192},
		{[]string{dir + "/pids", dir + "/gone"}, 0},
		{nil, 0},
	} {
		got, ok := MemoryOf(tt.dirs)
		check.That(t, got == tt.want && ok == (tt.want != 0), "%q: %d, %v", tt.dirs, got, ok)
	}
}
