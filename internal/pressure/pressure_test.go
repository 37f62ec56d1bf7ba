package pressure

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fake is a tree of kernel files.
func fake(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = root + path
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// machine is the files of a machine without cgroups.
func machine(tasks, threads, pids string, more map[string]string) map[string]string {
	files := map[string]string{
		"/proc/loadavg":                "0.50 0.25 0.10 3/" + tasks + " 4711\n",
		"/proc/sys/kernel/threads-max": threads + "\n",
		"/proc/sys/kernel/pid_max":     pids + "\n",
	}
	for path, text := range more {
		files[path] = text
	}
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
			[]Bound{{"/proc/sys/kernel/threads-max", 500, 1000}, {"/proc/sys/kernel/pid_max", 500, 2000}}, "/proc/sys/kernel/threads-max", 0},
		{"v2, two levels, the upper one is tighter", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": mountV2,
			"/cg/a/b/pids.max": "100\n", "/cg/a/b/pids.current": "20\n", "/cg/a/b/pids.events": "max 3\n",
			"/cg/a/pids.max": "50\n", "/cg/a/pids.current": "40\n", "/cg/a/pids.events": "max 4\n",
			"/cg/cgroup.procs": "",
		}), []Bound{{"/cg/a/b/pids.max", 20, 100}, {"/cg/a/pids.max", 40, 50}, {"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}},
			"/cg/a/pids.max", 7},
		{"v2, no bound of its own, but what it was refused is counted there", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2,
			"/cg/a/pids.max": "max\n", "/cg/a/pids.events": "max 9\n",
		}), []Bound{{"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}}, "/proc/sys/kernel/threads-max", 9},
		{"hybrid: pids is in v1", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "8:pids:/x\n4:memory:/y\n0::/z\n", "/proc/self/mountinfo": mem + mountV2 + mountV1,
			"/cg/pids/x/pids.max": "20\n", "/cg/pids/x/pids.current": "16\n",
			"/cg/z/pids.max": "1\n", "/cg/z/pids.current": "1\n", // not asked: the controller is elsewhere
		}), []Bound{{"/cg/pids/x/pids.max", 16, 20}, {"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}}, "/cg/pids/x/pids.max", 0},
		{"a container's part of v1 is mounted twice; the larger part counts", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup":    "8:pids:/docker/c/x\n",
			"/proc/self/mountinfo": "1 2 0:36 /docker/c/x /small rw - cgroup cgroup rw,pids\n2 2 0:36 /docker/c /large rw - cgroup cgroup rw,pids\n",
			"/large/x/pids.max":    "max\n", "/large/pids.max": "30\n", "/large/pids.current": "3\n",
			"/small/pids.max": "1\n", "/small/pids.current": "1\n",
		}), []Bound{{"/large/pids.max", 3, 30}, {"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}}, "/large/pids.max", 0},
		{"a container's root cgroup, seen as /", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mountV2,
			"/cg/pids.max": "300\n", "/cg/pids.current": "241\n",
		}), []Bound{{"/cg/pids.max", 241, 300}, {"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}}, "/cg/pids.max", 0},
		{"what is mounted does not show the caller's cgroup", machine("10", "1000", "900", map[string]string{
			"/proc/self/cgroup": "0::/../other\n", "/proc/self/mountinfo": mountV2, "/cg/pids.max": "1\n", "/cg/pids.current": "1\n",
		}), []Bound{{"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 900}}, "/proc/sys/kernel/pid_max", 0},
		{"a maximum of 0, below what there is", machine("10", "1000", "2000", map[string]string{
			"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "0\n", "/cg/a/pids.current": "5\n",
		}), []Bound{{"/cg/a/pids.max", 5, 0}, {"/proc/sys/kernel/threads-max", 10, 1000}, {"/proc/sys/kernel/pid_max", 10, 2000}}, "/cg/a/pids.max", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := fake(t, tt.files)
			r, err := look(root)
			if err != nil {
				t.Fatal(err)
			}
			for i := range r.Bounds {
				r.Bounds[i].Path = strings.TrimPrefix(r.Bounds[i].Path, root)
			}
			if diff := cmp.Diff(tt.want, r.Bounds); diff != "" {
				t.Errorf("bounds (-want +got):\n%s", diff)
			}
			if got := r.Tightest().Path; got != tt.tightest {
				t.Errorf("tightest is %s, want %s", got, tt.tightest)
			}
			if r.Refused != tt.refused {
				t.Errorf("%d forks refused, want %d", r.Refused, tt.refused)
			}
		})
	}
}

func TestLookFails(t *testing.T) {
	for name, more := range map[string]map[string]string{
		"no number of tasks":         {"/proc/loadavg": "0.5 0.2 0.1 3-9 4711\n"},
		"truncated":                  {"/proc/loadavg": "0.5 0.2"},
		"no number of threads":       {"/proc/sys/kernel/threads-max": "many\n"},
		"negative":                   {"/proc/sys/kernel/pid_max": "-1\n"},
		"pids.max that is no number": {"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "x\n"},
		"pids.current likewise":      {"/proc/self/cgroup": "0::/a\n", "/proc/self/mountinfo": mountV2, "/cg/a/pids.max": "9\n", "/cg/a/pids.current": "\n"},
	} {
		if r, err := look(fake(t, machine("1", "2", "3", more))); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// TestLookHere: the machine that the test runs on has at least this process.
func TestLookHere(t *testing.T) {
	r, err := Look()
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Bounds) < 2 {
		t.Fatalf("%+v", r)
	}
	for _, b := range r.Bounds {
		if b.Current < 1 || b.Max < b.Current {
			t.Errorf("%+v", b)
		}
	}
}

func TestLevel(t *testing.T) {
	at := Thresholds{Warn: 0.6, Alert: 0.8}
	for ratio, want := range map[float64]Level{0: OK, 0.5: OK, 0.599: OK, 0.6: Warn, 0.65: Warn, 0.799: Warn, 0.8: Alert, 0.85: Alert, 1: Alert, 7: Alert} {
		if got := at.Level(ratio); got != want {
			t.Errorf("%v is %s, want %s", ratio, got, want)
		}
	}
	if got := (Thresholds{Warn: 0.9, Alert: 0.5}).Level(0.7); got != Alert {
		t.Errorf("an alert below the warning is %s", got)
	}
}

func TestLacking(t *testing.T) {
	r := Reading{Bounds: []Bound{{"a", 10, 100}, {"b", 95, 100}, {"c", 120, 100}}}
	for need, want := range map[int64]string{0: "", 1: "c", 5: "c", 6: "b", 91: "a"} {
		if b, lacks := r.Lacking(need); b.Path != want || lacks != (want != "") {
			t.Errorf("%d more: %q, %v, want %q", need, b.Path, lacks, want)
		}
	}
}

func BenchmarkLook(b *testing.B) {
	for b.Loop() {
		if _, err := Look(); err != nil {
			b.Fatal(err)
		}
	}
}
