package limits

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/proc"
	"golang.org/x/sys/unix"
)

// Machine describes the caller's options for cgroups.
type Machine struct {
	root    string            // "", or the directory with a test's files
	v2      []candidate       // writable ones among the caller's v2 cgroup and its ancestors, the nearest first
	v1      map[string]string // by controller: parent for a v1 cgroup
	reasons map[string]reason // by controller: why it cannot be used
	mount   []Mount
	own     string   // the caller's v2 cgroup
	base    []string // cgroups of the exec's sandbox
	// manager finds a manager that can move the caller to a delegated cgroup; nil to use none.
	manager func() (manager, error)
}

// manager is implemented by [systemd] and by tests.
type manager interface {
	Cgroup() string
	Enter(name string) (cgroup string, err error)
}

// candidate is a possible parent for a v2 cgroup.
type candidate struct {
	dir     string
	enabled []string // controllers enabled for its children
	more    []string // controllers that can be enabled
	manager manager  // if not nil, the manager's cgroup, below which the caller must enter a scope
}

// has reports whether the controller can be used. CPU time is counted without one.
func (c candidate) has(controller string) bool {
	return controller == "cpuacct" || slices.Contains(c.enabled, controller) || slices.Contains(c.more, controller)
}

type reason struct {
	text, hint string
	settled    bool // systemd cannot help
}

// Detect examines the caller's cgroups and its rights. It changes nothing.
func Detect() (*Machine, error) {
	m, err := detect("")
	if err != nil {
		return nil, err
	}
	// A working manager answers within 10 ms.
	c := caller{uid: os.Geteuid(), env: os.Getenv, patience: 2 * time.Second}
	m.manager = func() (manager, error) { return findSystemd(c) }
	return m, nil
}

// detect is Detect with all paths below root, for tests.
func detect(root string) (*Machine, error) {
	mounts, err := Mounts(root)
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	paths, err := Membership(root, 0)
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err) // a kernel without cgroups
	}
	m := &Machine{root: root, v1: map[string]string{}, reasons: map[string]reason{}, mount: mounts}
	for i := range m.mount {
		mt := &m.mount[i]
		mt.Point = root + mt.Point
		if mt.V2 {
			m.lookV2(*mt, paths[""])
			continue
		}
		for _, c := range mt.Controllers {
			if m.v1[c] != "" {
				continue
			}
			if own, ok := mt.Own(paths[c]); !ok {
				m.reasons[c] = reason{fmt.Sprintf("the caller's cgroup %q is not in the hierarchy mounted at %s", paths[c], mt.Point), "mount the whole cgroup hierarchy", true}
			} else if err := access(own, unix.W_OK|unix.X_OK); err != nil {
				m.reasons[c] = reason{fmt.Sprintf("cannot create a v1 cgroup in %s: %v", own, err), remedy(err), true}
			} else {
				m.v1[c] = own
			}
		}
	}
	return m, nil
}

// lookV2 examines the caller's cgroup and its ancestors.
func (m *Machine) lookV2(mt Mount, path string) {
	own, ok := mt.Own(path)
	if !ok {
		m.reasons[""] = reason{fmt.Sprintf("the caller's cgroup %q is not in the hierarchy mounted at %s", path, mt.Point), "mount the whole cgroup hierarchy", true}
		return
	}
	m.own = own
	for dir := own; ; dir = filepath.Dir(dir) {
		if available, err := proc.ReadFile(dir + "/cgroup.controllers"); err == nil {
			m.consider(dir, strings.Fields(string(available)))
		}
		if len(dir) <= len(mt.Point) {
			return
		}
	}
}

func (m *Machine) consider(dir string, available []string) {
	note := func(c string, w reason) {
		if _, told := m.reasons[c]; !told { // keep the reason of the nearest cgroup
			m.reasons[c] = w
		}
	}
	// Moving a process also needs a writable cgroup.procs in the common ancestor (cgroup-v2.rst, delegation).
	for _, path := range []string{dir, dir + "/cgroup.procs"} {
		if err := access(path, unix.W_OK); err != nil {
			for _, c := range append(available, "") {
				note(c, reason{fmt.Sprintf("cannot create a cgroup in %s: %v", dir, err), remedy(err), err == unix.EROFS})
			}
			return
		}
	}
	kind, err := proc.ReadFile(dir + "/cgroup.type")
	top := err != nil // the root cgroup has no type, and may contain processes
	if !top && strings.TrimSpace(string(kind)) != "domain" {
		return
	}
	enabled, _ := proc.ReadFile(dir + "/cgroup.subtree_control") // none if unreadable
	c := candidate{dir: dir, enabled: strings.Fields(string(enabled))}
	for _, name := range available {
		if slices.Contains(c.enabled, name) {
			continue
		}
		if err := unix.Access(dir+"/cgroup.subtree_control", unix.W_OK); err != nil {
			note(name, reason{fmt.Sprintf("controller %s is not enabled in %s: %v", name, dir, err), enableHint(os.Geteuid(), WritableCgroups), false})
		} else if !top && !holdsNone(dir) {
			m.reasons[name] = reason{"cannot enable controller " + name + " in " + dir + ", which contains processes", fmt.Sprintf("d=%s; mkdir $d/leaf && for p in $(cat $d/cgroup.procs); do echo $p >$d/leaf/cgroup.procs; done", dir), true}
		} else {
			c.more = append(c.more, name)
		}
	}
	m.v2 = append(m.v2, c)
}

// candidate returns the nearest candidate with most of the wanted controllers, because a process is in
// a single v2 cgroup.
func (m *Machine) candidate(wanted []string) (best candidate) {
	most := -1
	for _, c := range m.v2 {
		n := 0
		for _, w := range wanted {
			if c.has(w) {
				n++
			}
		}
		if n > most {
			best, most = c, n
		}
	}
	return best
}

// delegated returns a systemd manager's cgroup if that has more of the controllers than v1 and the best
// candidate. The reason is set if some are still missing.
func (m *Machine) delegated(best candidate, controllers []string) (candidate, *reason) {
	lacks := func(c candidate) (list []string) {
		for _, name := range controllers {
			if m.v1[name] == "" && (c.dir == "" || !c.has(name)) {
				list = append(list, name)
			}
		}
		return list
	}
	// An exec's limits are within its sandbox's cgroups, which no manager provides.
	if m.manager == nil || len(m.base) > 0 || len(lacks(best)) == 0 {
		return best, nil
	}
	given, err := m.manager()
	if err != nil {
		return best, &reason{text: "asked systemd for a scope: " + err.Error(), hint: hintFor(err)}
	}
	c := candidate{manager: given}
	for _, mt := range m.mount {
		if dir, ok := mt.Own(given.Cgroup()); ok && mt.V2 {
			available, _ := proc.ReadFile(dir + "/cgroup.controllers") // none if unreadable
			c.dir, c.more = dir, strings.Fields(string(available))
		}
	}
	left := lacks(c)
	if c.dir == "" || len(left) >= len(lacks(best)) {
		c = best
	}
	if len(left) == 0 {
		return c, nil
	}
	return c, &reason{text: "asked systemd for a scope: its cgroup " + given.Cgroup() + " lacks the controller " + strings.Join(left, ", "),
		hint: enableHint(os.Geteuid(), WritableCgroups)}
}

// mayMove reports whether the caller can move a process to dir: their common ancestor must be writable
// (cgroup-v2.rst, delegation).
func (m *Machine) mayMove(dir string) bool {
	if m.own == "" {
		return true // unknown; the move reports an error
	}
	common := m.own
	for dir != common && !strings.HasPrefix(dir, common+"/") && len(common) > 1 {
		common = filepath.Dir(common)
	}
	return unix.Access(common+"/cgroup.procs", unix.W_OK) == nil
}

// reason returns why a controller cannot be used here, and the smallest change that would help.
func (m *Machine) reason(controller string) reason {
	if controller == "cpuacct" {
		if w, ok := m.reasons[""]; ok { // v2 would count CPU time
			return w
		}
	}
	if w, ok := m.reasons[controller]; ok {
		return w
	}
	if len(m.mount) == 0 {
		return reason{"no cgroup hierarchy is mounted", "mount -t cgroup2 cgroup2 /sys/fs/cgroup", true}
	}
	if w, ok := m.reasons[""]; ok && !slices.ContainsFunc(m.mount, func(mt Mount) bool { return !mt.V2 }) {
		return w
	}
	if len(m.v2) > 0 {
		return reason{text: "no writable cgroup has the controller " + controller,
			hint: enableHint(os.Geteuid(), "enable "+controller+" for the caller's cgroup (systemd: Delegate=yes)") + ", if the kernel has " + controller + " (no cgroup_disable=" + controller + ")"}
	}
	return reason{"the kernel has no cgroup controller " + controller, "boot a kernel with it (no cgroup_disable=" + controller + ")", true}
}

// access returns an error if the caller may not access a cgroup or one of its files.
func access(path string, mode uint32) error {
	err := unix.Access(path, mode)
	var fs unix.Statfs_t
	if err == unix.EACCES && unix.Statfs(path, &fs) == nil && fs.Flags&unix.ST_RDONLY != 0 {
		return unix.EROFS // changing the owner would not help
	}
	return err
}

// WritableCgroups is the hint for cgroups that are mounted read-only, as in containers.
const WritableCgroups = "give this container writable cgroups with an option of its engine: --security-opt writable-cgroups=true (Docker 28), --security-opt unmask=/sys/fs/cgroup (Podman)"

// remedy returns the hint if the caller may not write to its cgroup.
func remedy(err error) string {
	if err == unix.EROFS {
		return WritableCgroups
	}
	return enableHint(os.Geteuid(), WritableCgroups)
}

// Within returns the machine for an exec in a sandbox with these [Group.Dirs]: the exec's cgroups are made
// below the sandbox's, and in other hierarchies it joins the sandbox's.
func (m *Machine) Within(dirs []string) *Machine {
	in := *m
	in.base, in.v1 = dirs, map[string]string{}
	maps.Copy(in.v1, m.v1)
	for _, dir := range dirs {
		for _, mt := range m.mount {
			if !strings.HasPrefix(dir, mt.Point+"/") {
				continue
			}
			for _, c := range mt.Controllers {
				in.v1[c] = dir
			}
			if mt.V2 {
				enabled, _ := proc.ReadFile(dir + "/cgroup.subtree_control") // none if it was removed
				in.v2 = []candidate{{dir: dir, enabled: strings.Fields(string(enabled))}}
			}
		}
	}
	return &in
}
