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

// systemd is a manager that has answered. It holds no connection. It is asked for a cgroup that the
// caller may divide: a transient scope with Delegate=yes (systemd.scope(5), systemd's CGROUP_DELEGATION.md).
//
// A login session is a cgroup of root's, so an ordinary user can make nothing in it, and
// cannot leave it either: to move a process one must be able to write to the nearest
// cgroup that holds both places (cgroup-v2.rst, delegation), which is root's as well. Only a
// manager can move it. [systemd.Enter] therefore moves the calling process itself: what it starts
// later is born in the scope and can be moved within. What it has started before stays behind.
//
// An ordinary user asks the user's own manager, root that of the system. Its private
// socket needs no D-Bus daemon; where that is missing, the bus is asked. (A user's
// manager itself needs the system bus, to have the system's move the process.) Who
// listens is verified, not what the environment says: it must be the caller or root, in the same PID
// namespace or one below. The manager of a host, reached from a container by a
// socket that is mounted there, would take the process out of the container's limits.
//
// Nothing has to be cleaned up: systemd collects a scope with all below it when its last
// process ends, however that ended.
type systemd struct {
	endpoint
	cgroup string
	caller caller
}

// caller is who asks; a test is another. patience bounds each of [findSystemd] and [systemd.Enter].
type caller struct {
	root     string // "", or where a test has its files
	uid      int
	env      func(string) string
	patience time.Duration
}

// endpoint is a socket at which a manager may be.
type endpoint struct {
	path string
	bus  bool   // a D-Bus daemon's, else the manager's own
	home string // a directory that must be the caller's, if not ""
}

// findSystemd finds the manager that the caller may ask. It changes nothing. An error is a
// [*result.Error] of one line.
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
			if m.cgroup == "" { // the system's, as some versions have it
				m.cgroup = "/"
			}
			return m, nil
		}
		// The first that is there has the reason.
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
			list = append(list, endpoint{path: p, bus: true}) // who listens is asked
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
		return &result.Error{Code: "limit", Message: fmt.Sprintf("systemd has not answered within %v", c.patience), Hint: "see " + status, Err: err}
	case errors.Is(err, unix.ENOENT) && c.uid != 0:
		return failure(err, enableHint(c.uid, WritableCgroups))
	}
	return failure(err, "see "+status)
}

func failure(err error, hint string) error {
	line := strings.Join(strings.Fields(err.Error()), " ") // some of it is others' text
	return &result.Error{Code: "limit", Message: line, Hint: hint, Err: err}
}

// Cgroup is the manager's own cgroup, as /proc/PID/cgroup has it. What it can delegate is there.
func (m *systemd) Cgroup() string { return m.cgroup }

// Enter moves the calling process, and nothing that it has started, to a new scope of
// this name, and returns the scope's cgroup, as /proc/PID/cgroup has it. It holds the caller
// then: controllers can be enabled when that has gone to a cgroup below. An error is a [*result.Error];
// if nobody answered in time, the caller may still be moved later.
func (m *systemd) Enter(name string) (cgroup string, err error) {
	if err = m.start(name, time.Now().Add(m.caller.patience)); err != nil {
		return "", m.caller.failure(fmt.Errorf("start %s: %w", name, err))
	}
	// The word of a manager is not the kernel's.
	paths, err := Membership(m.caller.root, 0)
	if err != nil {
		return "", m.caller.failure(err)
	}
	if cgroup = paths[""]; path.Base(cgroup) == name {
		return cgroup, nil
	}
	return "", m.caller.failure(fmt.Errorf("systemd has started %s, but sbxrun is not in it", name))
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
		return fmt.Errorf("its ControlGroup is %.80q", kind)
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
	if m.bus { // or signals come by themselves
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
	args.end(args.array()) // of auxiliary units
	body, err := c.call(destination, object, iface, "StartTransientUnit", "ssa(sv)a(sa(sv))", &args, "o")
	if err != nil {
		return err
	}
	for job := body.text(); body.err == nil; {
		body, err = c.signal(iface, "JobRemoved", "uoss")
		if err != nil {
			return err
		}
		body.u32() // the job's number
		path := body.text()
		body.text() // the unit
		if result := body.text(); path == job && result != "done" && body.err == nil {
			return fmt.Errorf("the job has %q", result) // failed, timeout, canceled…
		} else if path == job {
			break
		}
	}
	return body.err
}

// properties are those of the scope: a(sv).
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
	// 0 is who asks: the manager takes the pid from the kernel, in its own PID namespace.
	property("PIDs", "au")
	e.u32(4) // bytes
	e.u32(0)
	// Nothing is left of it, even if it failed.
	property("CollectMode", "s")
	e.text("inactive-or-failed")
	// Else DefaultTasksMax holds, a limit that nobody asked for.
	property("TasksMax", "t")
	e.u64(math.MaxUint64)
	e.end(list)
}

// The bus itself.
const (
	daemon       = "org.freedesktop.DBus"
	daemonObject = "/org/freedesktop/DBus"
)

// dial connects, if who listens may be trusted.
func (m *systemd) dial(deadline time.Time) (*dbusConn, error) {
	if m.home != "" {
		var st unix.Stat_t
		if err := unix.Stat(m.home, &st); err != nil {
			return nil, fmt.Errorf("the user has no systemd manager: %s: %w", m.home, err)
		}
		if int(st.Uid) != m.caller.uid { // a sudo -E or su
			return nil, fmt.Errorf("%s belongs to user %d, not to %d", m.home, st.Uid, m.caller.uid)
		}
	}
	c, err := dialDBus(m.path, deadline, func(peer *unix.Ucred) error {
		switch {
		case int(peer.Uid) != m.caller.uid && peer.Uid != 0:
			return fmt.Errorf("user %d listens at %s", peer.Uid, m.path)
		case peer.Pid == 0:
			return fmt.Errorf("who listens at %s is outside of this container", m.path)
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
