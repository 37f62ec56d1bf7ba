package limits

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

const (
	destination = "org.freedesktop.systemd1"
	object      = "/org/freedesktop/systemd1"
	iface       = "org.freedesktop.systemd1.Manager"
)

// systemd is a manager that has answered; no connection stays open. It can create a cgroup that the caller
// may divide: a transient scope with Delegate=yes (systemd.scope(5), systemd's CGROUP_DELEGATION.md).
//
// A login session's cgroup belongs to root. An ordinary user can create nothing in it, and cannot leave it:
// moving a process needs write permission for the nearest common ancestor (cgroup-v2.rst, delegation), which
// belongs to root as well. Only a manager can move the process. [systemd.Enter] therefore moves
// the calling process: processes it starts later are born in the scope and can be moved within it. Processes
// started before stay behind.
//
// An ordinary user asks the user's own manager, root the system's. The manager's private socket needs no D-Bus
// daemon; if it is missing, the bus is used. (A user's manager itself needs the system bus, so that the
// system's moves the process.) The listener is verified, whatever the environment contains: it must belong to
// the caller or root, and be in the same PID namespace or one below. A host's manager, reached from a
// container through a mounted socket, would move the process out of the container's limits.
//
// No cleanup is needed: systemd removes a scope and everything below it when its last process ends.
type systemd struct {
	endpoint
	cgroup string
	caller caller
}

// caller is the user that asks; tests use others. patience is the timeout of [findSystemd] and of [systemd.Enter].
type caller struct {
	root     string // "", or the directory with a test's files
	uid      int
	env      func(string) string
	patience time.Duration
}

// endpoint is a possible socket of a manager.
type endpoint struct {
	path string
	bus  bool   // a D-Bus daemon's, otherwise the manager's own
	home string // directory that must belong to the caller, or ""
}

// findSystemd finds the caller's manager. It changes nothing. The error is a single-line
// [*result.Error].
func findSystemd(c caller) (*systemd, error) {
	if _, err := os.Stat(c.root + "/run/systemd/system"); err != nil { // sd_booted(3)
		return nil, failure(errors.New("systemd does not manage this machine"), enableHint(c.uid, WritableCgroups))
	}
	deadline := time.Now().Add(c.patience)
	var first error
	for _, e := range c.endpoints() {
		m := &systemd{endpoint: e, caller: c}
		err := m.find(deadline)
		if err == nil {
			if m.cgroup == "" { // some versions of the system's manager return ""
				m.cgroup = "/"
			}
			return m, nil
		}
		// Keep the error of the first existing socket.
		if first == nil || errors.Is(first, unix.ENOENT) {
			first = err
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	return nil, c.failure(first)
}

func (c caller) endpoints() (list []endpoint) {
	if c.uid == 0 {
		return []endpoint{{path: c.root + "/run/systemd/private"}, {path: c.root + "/run/dbus/system_bus_socket", bus: true}}
	}
	standard := c.root + "/run/user/" + strconv.Itoa(c.uid)
	homes := []string{standard}
	if own := c.env("XDG_RUNTIME_DIR"); path.IsAbs(own) && path.Clean(own) != standard {
		homes = []string{path.Clean(own), standard}
	}
	for _, h := range homes {
		list = append(list, endpoint{h + "/systemd/private", false, h})
	}
	for address := range strings.SplitSeq(c.env("DBUS_SESSION_BUS_ADDRESS"), ";") {
		if p, ok := strings.CutPrefix(address, "unix:path="); ok {
			p, _, _ = strings.Cut(p, ",")
			list = append(list, endpoint{path: p, bus: true}) // dial checks the listener
		}
	}
	return append(list, endpoint{standard + "/bus", true, standard})
}

func (c caller) failure(err error) error {
	status := "systemctl --user status"
	if c.uid == 0 {
		status = "systemctl status"
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &result.Error{Code: "limit", Message: fmt.Sprintf("systemd did not answer within %v", c.patience), Hint: "see " + status, Err: err}
	case errors.Is(err, unix.ENOENT) && c.uid != 0:
		return failure(err, enableHint(c.uid, WritableCgroups))
	}
	return failure(err, "see "+status)
}

func failure(err error, hint string) error {
	line := strings.Join(strings.Fields(err.Error()), " ") // it contains text of other programs
	return &result.Error{Code: "limit", Message: line, Hint: hint, Err: err}
}

// Cgroup returns the manager's own cgroup, in the form of /proc/PID/cgroup. It can delegate its controllers.
func (m *systemd) Cgroup() string { return m.cgroup }

// Enter moves the calling process, but none of its children, to a new scope of this name, and returns the
// scope's cgroup, in the form of /proc/PID/cgroup. Controllers can be enabled there after the caller has moved
// to a child. The error is a [*result.Error]; after a timeout the caller may still be moved later.
func (m *systemd) Enter(name string) (cgroup string, err error) {
	if err = m.start(name, time.Now().Add(m.caller.patience)); err != nil {
		return "", m.caller.failure(fmt.Errorf("start %s: %w", name, err))
	}
	// Verify it with the kernel.
	paths, err := Membership(m.caller.root, 0)
	if err != nil {
		return "", m.caller.failure(err)
	}
	if cgroup = paths[""]; path.Base(cgroup) == name {
		return cgroup, nil
	}
	return "", m.caller.failure(fmt.Errorf("systemd started %s, but did not move sbxrun to it", name))
}

// find asks the manager for its own cgroup.
func (m *systemd) find(deadline time.Time) error {
	c, err := m.dial(deadline)
	if err != nil {
		return err
	}
	defer c.close()
	var args encoder
	args.text(iface)
	args.text("ControlGroup")
	body, err := c.call(destination, object, "org.freedesktop.DBus.Properties", "Get", "ss", &args, "v")
	if err != nil {
		return err
	}
	if kind := body.signature(); kind != "s" {
		return fmt.Errorf("its ControlGroup has type %.80q", kind)
	}
	m.cgroup = body.text()
	return body.err
}

// start starts the scope and waits for its job.
func (m *systemd) start(name string, deadline time.Time) error {
	c, err := m.dial(deadline)
	if err != nil {
		return err
	}
	defer c.close()
	if m.bus { // the manager itself sends signals unasked
		var rule encoder
		rule.text("type='signal',interface='" + iface + "',member='JobRemoved'")
		if _, err := c.call(daemon, daemonObject, daemon, "AddMatch", "s", &rule, ""); err != nil {
			return err
		}
		if _, err := c.call(destination, object, iface, "Subscribe", "", &encoder{}, ""); err != nil {
			return err
		}
	}
	var args encoder
	args.text(name)
	args.text("fail")
	properties(&args)
	args.end(args.array()) // no auxiliary units
	body, err := c.call(destination, object, iface, "StartTransientUnit", "ssa(sv)a(sa(sv))", &args, "o")
	if err != nil {
		return err
	}
	for job := body.text(); body.err == nil; {
		body, err = c.signal(iface, "JobRemoved", "uoss")
		if err != nil {
			return err
		}
		body.u32() // job number
		path := body.text()
		body.text() // unit
		if result := body.text(); path == job && result != "done" && body.err == nil {
			return fmt.Errorf("job result %q", result) // failed, timeout, canceled…
		} else if path == job {
			break
		}
	}
	return body.err
}

// properties encodes the properties of the scope: a(sv).
func properties(e *encoder) {
	list := e.array()
	property := func(name, signature string) {
		e.align(8)
		e.text(name)
		e.signature(signature)
	}
	property("Description", "s")
	e.text("sandbox of sbxrun")
	property("Delegate", "b")
	e.u32(1)
	// 0 is the caller: the manager gets the PID from the kernel, in its own PID namespace.
	property("PIDs", "au")
	e.u32(4) // bytes
	e.u32(0)
	// Remove the unit even after a failure.
	property("CollectMode", "s")
	e.text("inactive-or-failed")
	// Otherwise DefaultTasksMax applies, an unrequested limit.
	property("TasksMax", "t")
	e.u64(math.MaxUint64)
	e.end(list)
}

// The bus itself.
const (
	daemon       = "org.freedesktop.DBus"
	daemonObject = "/org/freedesktop/DBus"
)

// dial connects if the listener can be trusted.
func (m *systemd) dial(deadline time.Time) (*dbusConn, error) {
	if m.home != "" {
		var st unix.Stat_t
		if err := unix.Stat(m.home, &st); err != nil {
			return nil, fmt.Errorf("the user has no systemd manager: %s: %w", m.home, err)
		}
		if int(st.Uid) != m.caller.uid { // after sudo -E or su
			return nil, fmt.Errorf("%s belongs to uid %d, not to uid %d", m.home, st.Uid, m.caller.uid)
		}
	}
	c, err := dialDBus(m.path, deadline, func(peer *unix.Ucred) error {
		switch {
		case int(peer.Uid) != m.caller.uid && peer.Uid != 0:
			return fmt.Errorf("%s belongs to a process of uid %d", m.path, peer.Uid)
		case peer.Pid == 0:
			return fmt.Errorf("the process listening at %s is outside of this container", m.path)
		}
		return nil
	})
	if err != nil || !m.bus {
		return c, err
	}
	if _, err := c.call(daemon, daemonObject, daemon, "Hello", "", &encoder{}, "s"); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}
