// Package pressure counts the tasks (processes and their threads, zombies
// included) that are in use. A [Census] counts those of each sandbox. [Look] holds them all
// against every bound that a fork of the caller would run into with EAGAIN (fork(2)):
//
//   - pids.max of the caller's cgroup and of each one above it that can be seen, of
//     cgroup v2 or of the v1 controller pids (cgroup-v2.rst, pids.rst);
//   - threads-max and pid_max, which count all tasks of the machine
//     (proc_sys_kernel(5)). Since Linux 6.14 a PID namespace may have a pid_max of its
//     own; to compare the machine's tasks with it errs on the safe side.
//
// RLIMIT_NPROC is not among them: what it counts, the tasks of a user on the whole
// machine, no file tells. Whoever meets it gets the EAGAIN.
//
// A look is on the way of every run, so it is a few reads of small files; the
// benchmark says what that costs.
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

// Bound is one limit of the number of tasks.
type Bound struct {
	Path         string // the file that holds it
	Current, Max int64
	// Promised are tasks that are not there yet, and that sandboxes may take any moment:
	// what their own limits leave them. Only after [Reading.AddPromises].
	Promised int64
}

// Ratio is how much of it is used, 1 for all. It can be more: a maximum may be set
// below what there is.
func (b Bound) Ratio() float64 {
	if b.Max <= 0 {
		return 1 // nothing can be started at all
	}
	return float64(b.Current) / float64(b.Max)
}

// Room is how many more tasks fit; not below 0.
func (b Bound) Room() int64 { return max(0, b.Max-b.Current-b.Promised) }

// Level is how near the tightest bound is.
type Level string

const (
	OK    Level = "ok"
	Warn  Level = "warn"
	Alert Level = "alert"
)

// Thresholds are from which part of a bound on it is near: 0.6 is 60 %.
type Thresholds struct{ Warn, Alert float64 }

// Level is that of a ratio.
func (t Thresholds) Level(ratio float64) Level {
	switch {
	case ratio >= t.Alert:
		return Alert
	case ratio >= t.Warn:
		return Warn
	}
	return OK
}

// Reading is what one look has found.
type Reading struct {
	// Bounds are all that were found: the caller's cgroup first, then what is above
	// it, then the machine's, which are always there.
	Bounds []Bound
	// Refused is how many forks the cgroups have refused so far (pids.events). Only
	// that it has grown between two looks means something. Before Linux 6.12 it is
	// counted where the fork was tried, and not where the bound is.
	Refused int64

	dirs []string // the caller's cgroup and those above it
}

// Tightest is the bound that is used most.
func (r Reading) Tightest() Bound {
	tightest := r.Bounds[0]
	for _, b := range r.Bounds[1:] {
		if b.Ratio() > tightest.Ratio() {
			tightest = b
		}
	}
	return tightest
}

// Lacking is the first bound that has no room for so many tasks more.
func (r Reading) Lacking(need int64) (b Bound, lacks bool) {
	for _, b := range r.Bounds {
		if b.Room() < need {
			return b, true
		}
	}
	return Bound{}, false
}

// Look reads all of it for the calling process.
func Look() (Reading, error) { return look("") }

// look takes all paths below root, for tests; the paths that it gives have it in front.
func look(root string) (r Reading, err error) {
	if err := r.cgroups(root); err != nil {
		return Reading{}, fmt.Errorf("count tasks: %w", err)
	}
	if err := r.machine(root); err != nil {
		return Reading{}, fmt.Errorf("count tasks: %w", err)
	}
	return r, nil
}

// AddPromises adds to each bound what is promised to the sandboxes below it. Who was
// started with a limit on its tasks has them for sure then: no other one is let in to
// take them first. The kernel keeps the books, in the sandboxes' own cgroups. A limit
// that is no less than the bound is no promise: it could not be kept.
func (r *Reading) AddPromises() {
	r.Bounds = slices.Clone(r.Bounds) // those of a copy of r are no others', or they would be added twice
	var below []Bound
	for _, dir := range r.dirs {
		entries, _ := os.ReadDir(dir) // none, if it is not for us to see
		for _, e := range entries {
			if e.IsDir() && strings.HasPrefix(e.Name(), limits.Prefix) {
				one := dir + "/" + e.Name()
				// What a crash has left empty is there until cleanup removes it, and nobody's.
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

// bound is that of one cgroup; limited is false with an error, and if it has none: the topmost has
// no pids.max, and others have "max".
func bound(dir string) (b Bound, limited bool, err error) {
	b.Path = dir + "/pids.max"
	if b.Max, limited, err = readMax(b.Path); limited {
		b.Current, err = readCount(dir + "/pids.current")
	}
	return b, limited && err == nil, err
}

// machine adds what bounds all tasks of it.
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

// cgroups adds what the caller's cgroup and those above it allow, as far as they can
// be seen.
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

// usual is hierarchy on a machine where all of the controller is mounted in the usual place, and the
// caller is in the first cgroup namespace. The kernel takes a tenth of a millisecond to list all
// mounts, on the way of every run.
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
	// It has the file, or is none of the controller's.
	return top, own, own == top || unix.Access(own+"/pids.max", unix.F_OK) == nil
}

// hierarchy is where the controller pids is mounted, and the caller's cgroup there;
// none if it cannot be seen. A controller is in v1 or in v2, never in both. Of
// several mounts it is the one that shows most.
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

// cgroup adds one cgroup, if it bounds anything.
func (r *Reading) cgroup(dir string, own bool) error {
	b, limited, err := bound(dir)
	if gone(err) {
		return nil // no such controller here, or the cgroup is not for us to see
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

// gone: a cgroup that is being removed answers ENODEV.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENODEV)
}

// refused is the row max of pids.events (Linux 4.6), 0 where there is none.
func refused(dir string) int64 {
	data, _ := proc.ReadFile(dir + "/pids.events") // none, if it cannot be read
	n, _ := limits.Row(data, "max")
	return n
}

// parseTasks takes the number of tasks from /proc/loadavg: what stands after the
// slash in the fourth field (proc_loadavg(5)).
func parseTasks(data []byte) (int64, error) {
	f := bytes.Fields(data)
	if len(f) > 3 {
		if _, number, ok := bytes.Cut(f[3], []byte("/")); ok {
			return parseCount(number)
		}
	}
	return 0, fmt.Errorf("loadavg: no number of tasks in %.80q", data)
}

// readMax reads a file with a number, or "max" for none.
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
