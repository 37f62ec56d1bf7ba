package admission

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Bound is a limit on the number of tasks.
type Bound struct {
	Path         string // the file that holds it
	Current, Max int64
	// Promised is the number of tasks that sandboxes may still create within their own limits. It is set by
	// [Reading.AddPromises].
	Promised int64
}

// Ratio returns the used share of the limit. It exceeds 1 if the limit was set below the current number.
func (b Bound) Ratio() float64 {
	if b.Max <= 0 {
		return 1 // nothing can start
	}
	return float64(b.Current) / float64(b.Max)
}

// Room returns the number of free tasks, at least 0.
func (b Bound) Room() int64 { return max(0, b.Max-b.Current-b.Promised) }

// Level says how near a limit is.
type Level string

const (
	OK    Level = "ok"
	Warn  Level = "warn"
	Alert Level = "alert"
)

// Thresholds are the ratios at which the levels begin.
type Thresholds struct{ Warn, Alert float64 }

// Level returns the level of a ratio.
func (t Thresholds) Level(ratio float64) Level {
	switch {
	case ratio >= t.Alert:
		return Alert
	case ratio >= t.Warn:
		return Warn
	}
	return OK
}

// Reading is the result of [Look].
type Reading struct {
	// Bounds are the limits of the caller's cgroup, of its ancestors, and of the machine, in this order.
	// The last ones always exist.
	Bounds []Bound
	// Refused is the number of forks that the cgroups have refused (pids.events). Only its growth between two
	// readings is meaningful. Before Linux 6.12 the cgroup of the fork counts, not the limited one.
	Refused int64

	dirs []string // the caller's cgroup and those above it
}

// Tightest returns the limit with the highest ratio.
func (r Reading) Tightest() Bound {
	tightest := r.Bounds[0]
	for _, b := range r.Bounds[1:] {
		if b.Ratio() > tightest.Ratio() {
			tightest = b
		}
	}
	return tightest
}

// Lacking returns the first limit that does not allow need more tasks.
func (r Reading) Lacking(need int64) (b Bound, lacks bool) {
	for _, b := range r.Bounds {
		if b.Room() < need {
			return b, true
		}
	}
	return Bound{}, false
}

// Look reads the limits of the calling process. Every run calls it, so it only reads a few small files.
func Look() (Reading, error) { return look("") }

// look is Look with a root directory, for tests. The paths in its result start with root.
func look(root string) (r Reading, err error) {
	if err := r.cgroups(root); err != nil {
		return Reading{}, fmt.Errorf("count tasks: %w", err)
	}
	if err := r.machine(root); err != nil {
		return Reading{}, fmt.Errorf("count tasks: %w", err)
	}
	return r, nil
}

// AddPromises adds to each limit the tasks that the sandboxes below it may still create, so that a sandbox
// with its own limit can use all of that: no one else is admitted to take these tasks. The numbers come
// from the sandboxes' cgroups. A limit that is not below the bound promises nothing.
func (r *Reading) AddPromises() {
	r.Bounds = slices.Clone(r.Bounds) // a copy of r must not share them, or AddPromises would add twice
	var below []Bound
	for _, dir := range r.dirs {
		entries, _ := os.ReadDir(dir) // none if it is not readable
		for _, e := range entries {
			if e.IsDir() && strings.HasPrefix(e.Name(), limits.Prefix) {
				one := dir + "/" + e.Name()
				// Crashes leave empty cgroups without an owner until cleanup removes them.
				if b, limited, _ := bound(one); limited && (b.Current > 0 || limits.Owned(one)) {
					below = append(below, b)
				}
			}
		}
		for i := range r.Bounds {
			if r.Bounds[i].Path != dir+"/pids.max" {
				continue
			}
			for _, b := range below {
				if b.Max < r.Bounds[i].Max {
					r.Bounds[i].Promised += b.Room()
				}
			}
		}
	}
}

// bound returns the limit of a cgroup. limited is false if there is none: the root has no pids.max, and
// others may have "max".
func bound(dir string) (b Bound, limited bool, err error) {
	b.Path = dir + "/pids.max"
	if b.Max, limited, err = readMax(b.Path); limited {
		b.Current, err = readCount(dir + "/pids.current")
	}
	return b, limited && err == nil, err
}

// machine adds the limits on all tasks of the machine.
func (r *Reading) machine(root string) error {
	data, err := proc.ReadFile(root + "/proc/loadavg")
	if err != nil {
		return err
	}
	tasks, err := parseTasks(data)
	if err != nil {
		return err
	}
	for _, name := range []string{"threads-max", "pid_max"} {
		path := root + "/proc/sys/kernel/" + name
		most, err := readCount(path)
		if err != nil {
			return err
		}
		r.Bounds = append(r.Bounds, Bound{Path: path, Current: tasks, Max: most})
	}
	return nil
}

// cgroups adds the limits of the caller's cgroup and its ancestors, as far as they are visible.
func (r *Reading) cgroups(root string) error {
	paths, err := limits.Membership(root, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil // a kernel without cgroups
	}
	if err != nil {
		return err
	}
	top, own, ok := "", "", false
	if root == "" {
		top, own, ok = usual(paths)
	}
	if !ok {
		mounts, err := limits.Mounts(root)
		if err != nil {
			return err
		}
		top, own = hierarchy(mounts, paths)
	}
	if own == "" {
		return nil
	}
	for dir := own; ; dir = path.Dir(dir) {
		r.dirs = append(r.dirs, root+dir)
		if err := r.cgroup(root+dir, dir == own); err != nil {
			return err
		}
		if len(dir) <= len(top) {
			return nil
		}
	}
}

// usual is a fast hierarchy for machines where the whole controller is mounted in the usual place, and the
// caller is in the initial cgroup namespace. Listing all mounts would cost every run a tenth of a
// millisecond.
func usual(paths map[string]string) (top, own string, ok bool) {
	const (
		first = "cgroup:[4026531835]" // namespace: CGROUP_NS_INIT_INO (linux/nsfs.h)
		whole = 1                     // inode of a hierarchy's root
	)
	top, kind := "/sys/fs/cgroup", int64(unix.CGROUP2_SUPER_MAGIC)
	membership, ok := paths["pids"]
	if ok {
		top, kind = top+"/pids", unix.CGROUP_SUPER_MAGIC
	} else if membership, ok = paths[""]; !ok {
		return "", "", false
	}
	var fs unix.Statfs_t
	var st unix.Stat_t
	if space, err := os.Readlink("/proc/self/ns/cgroup"); err != nil || space != first ||
		unix.Statfs(top, &fs) != nil || int64(fs.Type) != kind || unix.Stat(top, &st) != nil || st.Ino != whole {
		return "", "", false
	}
	own = strings.TrimSuffix(top+membership, "/")
	// The cgroup has the file, unless the controller is disabled there.
	return top, own, own == top || unix.Access(own+"/pids.max", unix.F_OK) == nil
}

// hierarchy returns the mount point of the controller pids and the directory of the caller's cgroup, or ""
// if they are not visible. A controller is in v1 or v2, never in both. Of several mounts, it chooses the
// one that shows most.
func hierarchy(mounts []limits.Mount, paths map[string]string) (top, own string) {
	membership, v1 := paths["pids"]
	if !v1 {
		membership = paths[""]
	}
	shown := -1
	for _, mt := range mounts {
		if mt.V2 == v1 || v1 && !slices.Contains(mt.Controllers, "pids") {
			continue
		}
		if dir, ok := mt.Own(membership); ok && len(dir)-len(mt.Point) > shown {
			top, own, shown = mt.Point, dir, len(dir)-len(mt.Point)
		}
	}
	return top, own
}

// cgroup adds the limit of a cgroup, if it has one.
func (r *Reading) cgroup(dir string, own bool) error {
	b, limited, err := bound(dir)
	if gone(err) {
		return nil // no such controller here, or not readable
	}
	if err != nil {
		return err
	}
	if limited || own {
		r.Refused += refused(dir)
	}
	if limited {
		r.Bounds = append(r.Bounds, b)
	}
	return nil
}

// gone reports whether a cgroup is missing or unreadable. One that is being removed returns ENODEV.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENODEV)
}

// refused returns the field max of pids.events (Linux 4.6), or 0.
func refused(dir string) int64 {
	data, _ := proc.ReadFile(dir + "/pids.events") // empty if it is not readable
	n, _ := limits.Row(data, "max")
	return n
}

// parseTasks returns the number of tasks in /proc/loadavg: the number after the slash in the fourth field
// (proc_loadavg(5)).
func parseTasks(data []byte) (int64, error) {
	f := bytes.Fields(data)
	if len(f) > 3 {
		if _, number, ok := bytes.Cut(f[3], []byte("/")); ok {
			return parseCount(number)
		}
	}
	return 0, fmt.Errorf("loadavg: no number of tasks in %.80q", data)
}

// readMax reads a file with a number, or "max" for no limit.
func readMax(path string) (n int64, limited bool, err error) {
	data, err := proc.ReadFile(path)
	if err != nil || string(bytes.TrimSpace(data)) == "max" {
		return 0, false, err
	}
	if n, err = parseCount(data); err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	return n, true, nil
}

// readCount reads a file with a number.
func readCount(path string) (int64, error) {
	n, limited, err := readMax(path)
	if err == nil && !limited {
		err = fmt.Errorf("%s: not a number: max", path)
	}
	return n, err
}

func parseCount(data []byte) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("not a number: %.40q", data)
	}
	return n, nil
}
