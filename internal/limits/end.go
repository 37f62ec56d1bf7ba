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

// boundless is a quota that nobody can use up, in microseconds of a period.
const boundless = "1000000000"

// Unthrottle raises the CPU quota beyond all bounds, so that what is killed gets to die:
// what it may still use is a moment. It does not take it away: with the first quota of a
// machine, and without the last, the kernel patches its own code (cfs_bandwidth_used),
// which stops all processors for some 0.07 ms.
//
// With idle nothing is left but an init: should it never have had to wait, the quota of a lasting
// group stays as it is, for the next command.
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
	// Of v1 none may be greater than one above, and then there are others anyway.
	if write(dir+file, boundless) != nil {
		_ = change(dir+file, none) // what fails here is tried again by Loosen
	}
}

// Loosen thaws the cgroups, and what is within, and takes the CPU quotas away, so that what is killed
// gets to die: a thread that is throttled does not. What is gone is no error.
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

// change writes a value to a file that is there and has another.
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

// thaw thaws a cgroup, of v2 or the v1 freezer, if it is frozen.
func thaw(dir string) error {
	return result.All(change(dir+"/cgroup.freeze", "0"), change(dir+"/freezer.state", "THAWED"))
}

// Thaw thaws the cgroups that a process, a sandbox's init, is in, if somebody has put
// it where the caller is not: SIGKILL does not end what a v1 freezer holds.
func (m *Machine) Thaw(pid int) error {
	theirs, err := Membership(m.root, pid)
	if err != nil {
		return nil // it is gone
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
		// What holds the caller too was not frozen, or nobody would ask.
		for ok && len(dir) > len(mt.Point) && !strings.HasPrefix(ours+"/", dir+"/") {
			errs = append(errs, thaw(dir))
			dir = filepath.Dir(dir)
		}
	}
	return result.All(errs...)
}

// Kill kills all of the v2 cgroup at once (cgroup.kill, Linux 5.14): the second
// way, if init cannot be killed. [errors.ErrUnsupported] without v2.
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

// Remove removes the cgroups. They stay busy for a moment after the last process
// is reaped; it tries until the deadline. It may be called again after an error.
// However it ends, they have no owner afterwards: what is left is its keeper's, if that
// still reaps, or [Machine.Leftovers] finds it when it is empty. One that is not there any more is no
// error to either.
func (g *Group) Remove(deadline time.Time) error {
	if g.lasting != nil {
		g.lasting.files.close()
	}
	err := RemoveDirs(g.Dirs(), deadline)
	for i, n := range g.nodes {
		_ = unix.Close(n.lock) // EBADF: it was given up before, or never had
		g.nodes[i].lock = -1
	}
	if err == nil {
		g.nodes = nil
	}
	return err
}

// RemoveDirs removes cgroups and what is in them, by their directories. One that is not there is
// no error, one that holds processes is: [unix.EBUSY].
func RemoveDirs(dirs []string, deadline time.Time) error {
	var errs []error
	for _, dir := range dirs {
		if !strings.HasPrefix(filepath.Base(dir), Prefix) {
			errs = append(errs, fmt.Errorf("remove %s: it was not made by sbxrun", dir))
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
			// The kernel tells v2 alone when one is empty, and not when it can be removed.
			time.Sleep(min(wait, left))
			wait = min(2*wait, 20*time.Millisecond)
		}
	}
	return result.All(errs...)
}

// removeTree: a directory with children is busy, and so is one that was left
// with cgroups of execs.
func removeTree(dir string) error {
	err := unix.Rmdir(dir)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err == unix.EBUSY || err == unix.ENOTEMPTY {
		entries, _ := os.ReadDir(dir) // if it is gone, rmdir says so
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

// Leftover is a cgroup that a crash has left, or a command whose end could not be proven.
type Leftover struct{ ID, Dir string }

// Leftovers finds sbxrun's cgroups that hold no processes and have no owner any more,
// in all that is mounted: the caller's own, and to root all.
func (m *Machine) Leftovers() (found []Leftover) {
	for _, mt := range m.mount {
		_ = filepath.WalkDir(mt.Point, func(dir string, e os.DirEntry, err error) error {
			if err != nil || !e.IsDir() {
				return nil // not ours to read, or gone
			}
			id, ok := strings.CutPrefix(e.Name(), Prefix)
			if !ok || strings.HasSuffix(id, ".scope") { // systemd's, which collects it
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

// mine: others' are theirs to remove. And one that is just being made is not locked
// yet.
func mine(dir string) bool {
	var st unix.Stat_t
	return unix.Stat(dir, &st) == nil && (os.Geteuid() == 0 || int(st.Uid) == os.Geteuid()) && time.Since(time.Unix(st.Ctim.Unix())) > young
}

const young = 2 * time.Second

// Owned reports whether the one who has made a cgroup lives, and has not given it up.
func Owned(dir string) bool {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true // we cannot know
	}
	defer unix.Close(fd)
	return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil
}

// unpopulated: neither it nor one below has a process.
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

// holdsNone: no process is in the cgroup itself.
func holdsNone(dir string) bool {
	procs, err := proc.ReadFile(dir + "/cgroup.procs")
	return err == nil && len(procs) == 0
}
