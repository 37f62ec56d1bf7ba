package admission

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
)

// fake returns a directory with kernel files.
func fake(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = root + path
		check.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		check.Must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return root
}

// machine returns the files of a machine without cgroups.
func machine(tasks, threads, pids string, more map[string]string) map[string]string {
	files := map[string]string{
		"/proc/loadavg":                "0.50 0.25 0.10 3/" + tasks + " 4711\n",
		"/proc/sys/kernel/threads-max": threads + "\n",
		"/proc/sys/kernel/pid_max":     pids + "\n",
	}
	maps.Copy(files, more)
	return files
}

const (
	mountV2 = "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n"
	mountV1 = "39 31 0:36 / /cg/pids rw - cgroup cgroup rw,pids\n"
	mem     = "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
)

func TestLook(t *testing.T) {
	tests := []struct {
		name     string
		files    map[string]string
		want     []Bound
		tightest string
		refused  int64
	}{
		{"no cgroups", machine("500", "1000", "2000", nil),
			[]Bound{{Path: "/proc/sys/kernel/threads-max", Current: 500, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 500, Max: 2000}}, "/proc/sys/kernel/threads-max", 0},
		{"v2, two levels, the upper one is tighter", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": mountV2,
			"/cg/a/b/pids.max": "100\n", "/cg/a/b/pids.current": "20\n", "/cg/a/b/pids.events": "max 3\n",
			"/cg/a/pids.max": "50\n", "/cg/a/pids.current": "40\n", "/cg/a/pids.events": "max 4\n",
			"/cg/cgroup.procs": "",
		}), []Bound{{Path: "/cg/a/b/pids.max", Current: 20, Max: 100}, {Path: "/cg/a/pids.max", Current: 40, Max: 50}, {Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}},
			"/cg/a/pids.max", 7},
		{"v2 without its own limit, whose refused forks count", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2,
			"/cg/a/pids.max": "max\n", "/cg/a/pids.events": "max 9\n",
		}), []Bound{{Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}}, "/proc/sys/kernel/threads-max", 9},
		{"hybrid: pids is in v1", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "8:pids:/x\n4:memory:/y\n0::/z\n", "/proc/self/mountinfo": mem + mountV2 + mountV1,
			"/cg/pids/x/pids.max": "20\n", "/cg/pids/x/pids.current": "16\n",
			"/cg/z/pids.max": "1\n", "/cg/z/pids.current": "1\n", // ignored: the controller is elsewhere
		}), []Bound{{Path: "/cg/pids/x/pids.max", Current: 16, Max: 20}, {Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}}, "/cg/pids/x/pids.max", 0},
		{"a container's part of v1 is mounted twice; the larger part counts", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup":    "8:pids:/docker/c/x\n",
			"/proc/self/mountinfo": "1 2 0:36 /docker/c/x /small rw - cgroup cgroup rw,pids\n2 2 0:36 /docker/c /large rw - cgroup cgroup rw,pids\n",
			"/large/x/pids.max":    "max\n", "/large/pids.max": "30\n", "/large/pids.current": "3\n",
			"/small/pids.max": "1\n", "/small/pids.current": "1\n",
		}), []Bound{{Path: "/large/pids.max", Current: 3, Max: 30}, {Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}}, "/large/pids.max", 0},
		{"a container's root cgroup, seen as /", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mountV2,
			"/cg/pids.max": "300\n", "/cg/pids.current": "241\n",
		}), []Bound{{Path: "/cg/pids.max", Current: 241, Max: 300}, {Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}}, "/cg/pids.max", 0},
		{"the mount does not show the caller's cgroup", machine("10", "1000", "900", map[string]string{
			"/proc/self/cgroup": "0::/../other\n", "/proc/self/mountinfo": mountV2, "/cg/pids.max": "1\n", "/cg/pids.current": "1\n",
		}), []Bound{{Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 900}}, "/proc/sys/kernel/pid_max", 0},
		{"a maximum of 0, below the current number", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "0\n", "/cg/a/pids.current": "5\n",
		}), []Bound{{Path: "/cg/a/pids.max", Current: 5, Max: 0}, {Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000}}, "/cg/a/pids.max", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := fake(t, tt.files)
			r, err := look(root)
			check.Must(t, err)
			for i := range r.Bounds {
				r.Bounds[i].Path = strings.TrimPrefix(r.Bounds[i].Path, root)
			}
			check.NoDiff(t, cmp.Diff(tt.want, r.Bounds), "bounds (-want +got)")
			check.Equal(t, r.Tightest().Path, tt.tightest, "tightest")
			check.That(t, r.Refused == tt.refused, "%d forks refused, want %d", r.Refused, tt.refused)
		})
	}
}

func TestLookFails(t *testing.T) {
	for name, more := range map[string]map[string]string{
		"no number of tasks":   {"/proc/loadavg": "0.5 0.2 0.1 3-9 4711\n"},
		"truncated":            {"/proc/loadavg": "0.5 0.2"},
		"no number of threads": {"/proc/sys/kernel/threads-max": "many\n"},
		"negative":             {"/proc/sys/kernel/pid_max": "-1\n"},
		"invalid pids.max":     {"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "x\n"},
		"invalid pids.current": {"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "9\n", "/cg/a/pids.current": "\n"},
	} {
		r, err := look(fake(t, machine("1", "2", "3", more)))
		check.That(t, err != nil, "%s: %+v", name, r)
	}
}

// Look works on this machine, which has at least this process.
func TestLookHere(t *testing.T) {
	r, err := Look()
	check.Must(t, err)
	check.Require(t, len(r.Bounds) >= 2, "%+v", r)
	for _, b := range r.Bounds {
		check.That(t, b.Current >= 1 && b.Max >= b.Current, "%+v", b)
	}
}

// usual agrees with the list of mounts, or finds nothing.
func TestUsual(t *testing.T) {
	paths, err := limits.Membership("", 0)
	check.Must(t, err)
	mounts, err := limits.Mounts("")
	check.Must(t, err)
	wantTop, wantOwn := hierarchy(mounts, paths)
	top, own, ok := usual(paths)
	check.That(t, !ok || top == wantTop && own == wantOwn, "%s %s, want %s %s", top, own, wantTop, wantOwn)
	for _, paths := range []map[string]string{{}, {"pids": "/not/there"}, {"": "/not/there"}} {
		top, own, ok := usual(paths)
		check.That(t, !ok, "%v: %s %s", paths, top, own)
	}
}

func TestLevel(t *testing.T) {
	at := Thresholds{Warn: 0.6, Alert: 0.8}
	for ratio, want := range map[float64]Level{0: OK, 0.5: OK, 0.599: OK, 0.6: Warn, 0.65: Warn, 0.799: Warn, 0.8: Alert, 0.85: Alert, 1: Alert, 7: Alert} {
		check.Equal(t, at.Level(ratio), want, "%v", ratio)
	}
	check.Equal(t, (Thresholds{Warn: 0.9, Alert: 0.5}).Level(0.7), Alert, "an alert below the warning")
}

func TestLacking(t *testing.T) {
	r := Reading{Bounds: []Bound{{Path: "a", Current: 10, Max: 100}, {Path: "b", Current: 95, Max: 100}, {Path: "c", Current: 120, Max: 100}}}
	for need, want := range map[int64]string{0: "", 1: "c", 5: "c", 6: "b", 91: "a"} {
		b, lacks := r.Lacking(need)
		check.That(t, b.Path == want && lacks == (want != ""), "%d more: %q, %v, want %q", need, b.Path, lacks, want)
	}
}

// AddPromises counts the unused limits of sandboxes below each cgroup, except for those that exceed the
// cgroup's own limit.
func TestPromises(t *testing.T) {
	root := fake(t, machine("10", "1000", "2000", map[string]string{
		"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": mountV2,
		"/cg/a/b/pids.max": "100\n", "/cg/a/b/pids.current": "20\n",
		"/cg/a/b/sbxrun-1/pids.max": "30\n", "/cg/a/b/sbxrun-1/pids.current": "4\n",
		"/cg/a/b/sbxrun-2/pids.max": "30\n", "/cg/a/b/sbxrun-2/pids.current": "40\n",
		"/cg/a/b/sbxrun-3/pids.max": "max\n", "/cg/a/b/sbxrun-3/pids.current": "1\n",
		"/cg/a/b/sbxrun-4/pids.max": "100\n", "/cg/a/b/sbxrun-4/pids.current": "1\n",
		"/cg/a/b/sbxrun-5/cgroup.procs": "",
		"/cg/a/b/other/pids.max":        "30\n", "/cg/a/b/other/pids.current": "1\n",
		"/cg/a/b/sbxrun-7/pids.max": "20\n", "/cg/a/b/sbxrun-7/pids.current": "0\n", // left by a crash
		"/cg/a/b/sbxrun-8/pids.max": "10\n", "/cg/a/b/sbxrun-8/pids.current": "0\n", // still empty
		"/cg/a/pids.max": "200\n", "/cg/a/pids.current": "40\n",
		"/cg/a/sbxrun-6/pids.max": "8\n", "/cg/a/sbxrun-6/pids.current": "3\n",
	}))
	owner, err := os.Open(root + "/cg/a/b/sbxrun-8")
	check.Must(t, err)
	defer owner.Close()
	check.Must(t, unix.Flock(int(owner.Fd()), unix.LOCK_SH))
	r, err := look(root)
	check.Must(t, err)
	for range 2 { // copies stay independent
		again := r
		again.AddPromises()
	}
	r.AddPromises()
	want := []Bound{
		{Path: "/cg/a/b/pids.max", Current: 20, Max: 100, Promised: 26 + 10},
		{Path: "/cg/a/pids.max", Current: 40, Max: 200, Promised: 26 + 99 + 5 + 10},
		{Path: "/proc/sys/kernel/threads-max", Current: 10, Max: 1000}, {Path: "/proc/sys/kernel/pid_max", Current: 10, Max: 2000},
	}
	for i := range r.Bounds {
		r.Bounds[i].Path = strings.TrimPrefix(r.Bounds[i].Path, root)
	}
	check.NoDiff(t, cmp.Diff(want, r.Bounds), "(-want +got)")
	check.Equal(t, r.Bounds[1].Room(), 200-40-140, "room")
}
