package limits

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"golang.org/x/sys/unix"
)

// boundless is a quota that cannot be used up, in microseconds per period.
const boundless = "1000000000"

// Unthrottle raises the CPU quota beyond all bounds, so that killed processes can die; the CPU time they
// use is negligible. It does not remove the quota: for the first quota on a machine, and after
// the last, the kernel patches its own code (cfs_bandwidth_used), which stops all processors for about
// 0.07 ms.
//
// idle means that only an init is left. If it was never throttled, the quota of a lasting group stays
// for the next command.
func (g *Group) Unthrottle(idle bool) {
	dir := g.read["cpu"]
	if dir == "" || !g.plan.enforced("cpus") {
		return
	}
	if idle && g.lasting != nil && g.count(throttled) == 0 {
		return
	}
	file, none := "/cpu.cfs_quota_us", "-1"
	if dir == g.v2 {
		file, none = "/cpu.max", "max"
	}
	if l := g.lasting; l != nil {
		delete(l.written, dir+file)
	}
	// In v1 no quota may exceed the parent's; then there are other quotas, and removing this one is cheap.
	if write(dir+file, boundless) != nil {
		_ = change(dir+file, none) // Loosen tries again
	}
}

// Loosen thaws the cgroups and those below, and removes the CPU quotas, so that killed processes can die: a throttled
// thread cannot. Missing cgroups are not an error.
func (g *Group) Loosen() error {
	if l := g.lasting; l != nil {
		for _, s := range g.throttle() {
			delete(l.written, s.path)
		}
	}
	var errs []error
	for _, top := range g.Dirs() {
		_ = filepath.WalkDir(top, func(dir string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				errs = append(errs, thaw(dir), change(dir+"/cpu.max", "max"), change(dir+"/cpu.cfs_quota_us", "-1"))
			}
			return nil
		})
	}
	return result.All(errs...)
}

// change writes a value to an existing file that has another value.
func change(path, value string) error {
	data, err := proc.ReadFile(path)
	if err != nil || strings.HasPrefix(string(data), value) {
		return nil
	}
	if err = write(path, value); err != nil && exists(path) {
		return fmt.Errorf("write %s to %s: %w", value, path, err)
	}
	return nil
}

// thaw thaws a v2 or v1 cgroup if it is frozen.
func thaw(dir string) error {
	return result.All(change(dir+"/cgroup.freeze", "0"), change(dir+"/freezer.state", "THAWED"))
}

// Thaw thaws the cgroups of a process, a sandbox's init, that are not the caller's own, in case someone has moved
// it there: SIGKILL does not end processes frozen by v1.
func (m *Machine) Thaw(pid int) error {
	theirs, err := Membership(m.root, pid)
	if err != nil {
		return nil // it has ended
	}
	own, err := Membership(m.root, 0)
	if err != nil {
		return err
	}
	var errs []error
	for _, mt := range m.mount {
		c := ""
		if !mt.V2 {
			if c = "freezer"; !slices.Contains(mt.Controllers, c) {
				continue
			}
		}
		dir, ok := mt.Own(theirs[c])
		ours, _ := mt.Own(own[c])
		// Cgroups that also contain the caller are not frozen.
		for ok && len(dir) > len(mt.Point) && !strings.HasPrefix(ours+"/", dir+"/") {
			errs = append(errs, thaw(dir))
			dir = filepath.Dir(dir)
		}
	}
	return result.All(errs...)
}

// Kill kills everything in the v2 cgroup at once (cgroup.kill, Linux 5.14), for the case that init cannot be
// killed. The error is [errors.ErrUnsupported] without v2.
func (g *Group) Kill() error {
	if g.v2 == "" {
		return errors.ErrUnsupported
	}
	err := write(g.v2+"/cgroup.kill", "1")
	if err == unix.ENOENT && exists(g.v2) {
		return errors.ErrUnsupported
	}
	return err
}

// Remove removes the cgroups. They stay busy for a moment after the last process was reaped, so Remove retries until
// the deadline. It may be called again after an error. In any case the cgroups have no owner afterwards: the keeper
// removes them when it has reaped everything, or [Machine.Leftovers] finds them when they are empty. Missing cgroups
// are not an error.
func (g *Group) Remove(deadline time.Time) error {
	if g.lasting != nil {
		g.lasting.files.close()
	}
	err := RemoveDirs(g.Dirs(), deadline)
	for i, n := range g.nodes {
		_ = unix.Close(n.lock) // EBADF if it is closed already
		g.nodes[i].lock = -1
	}
	if err == nil {
		g.nodes = nil
	}
	return err
}

// RemoveDirs removes cgroups and those below, by their directories. A missing one is not an error; one with processes
// is [unix.EBUSY].
func RemoveDirs(dirs []string, deadline time.Time) error {
	var errs []error
	for _, dir := range dirs {
		if !strings.HasPrefix(filepath.Base(dir), Prefix) {
			errs = append(errs, fmt.Errorf("remove %s: not made by sbxrun", dir))
			continue
		}
		wait := 100 * time.Microsecond
		for {
			err := removeTree(dir)
			if err == nil {
				break
			}
			left := time.Until(deadline)
			if !errors.Is(err, unix.EBUSY) || left <= 0 {
				errs = append(errs, err)
				break
			}
			// v2 reports when a cgroup is empty, but not when it can be removed.
			time.Sleep(min(wait, left))
			wait = min(2*wait, 20*time.Millisecond)
		}
	}
	return result.All(errs...)
}

// removeTree removes a cgroup and its children, such as leftover cgroups of execs.
func removeTree(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err == unix.EBUSY || err == unix.ENOTEMPTY {
		entries, _ := os.ReadDir(dir) // if it was removed, rmdir reports it
		for _, e := range entries {
			if e.IsDir() {
				if err := removeTree(dir + "/" + e.Name()); err != nil {
					return err
				}
			}
		}
		if err = unix.Rmdir(dir); err == nil || err == unix.ENOENT {
			return nil
		}
	}
	return fmt.Errorf("remove %s: %w", dir, err)
}

// Leftover is a cgroup left behind by a crash or by a command whose end could not be proven.
type Leftover struct{ ID, Dir string }

// Leftovers finds empty sbxrun cgroups without an owner in all mounted hierarchies: the caller's own, or
// all for root.
func (m *Machine) Leftovers() (found []Leftover) {
	for _, mt := range m.mount {
		_ = filepath.WalkDir(mt.Point, func(dir string, e os.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				return nil // unreadable or removed
			}
			id, ok := strings.CutPrefix(e.Name(), Prefix)
			if !ok || strings.HasSuffix(id, ".scope") { // removed by systemd
				return nil
			}
			if mine(dir) && !Owned(dir) && unpopulated(dir) {
				found = append(found, Leftover{id, dir})
			}
			return filepath.SkipDir
		})
	}
	return found
}

// mine reports whether the caller may remove a cgroup. A new one may not be locked yet.
func mine(dir string) bool {
	var st unix.Stat_t
	return unix.Stat(dir, &st) == nil && (os.Geteuid() == 0 || int(st.Uid) == os.Geteuid()) && time.Since(time.Unix(st.Ctim.Unix())) > young
}

const young = 2 * time.Second

// Owned reports whether the process that made a cgroup is alive and has not released it.
func Owned(dir string) bool {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true // unknown
	}
	defer unix.Close(fd)
	return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil
}

// unpopulated reports whether a cgroup and those below contain no processes.
func unpopulated(dir string) bool {
	empty := true
	_ = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			empty = false
		} else if e.IsDir() {
			empty = empty && holdsNone(path)
		}
		return nil
	})
	return empty
}

// holdsNone reports whether a cgroup itself contains no processes.
func holdsNone(dir string) bool {
	procs, err := proc.ReadFile(dir + "/cgroup.procs")
	return err == nil && len(procs) == 0
}
