package limits

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
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
//
// The D-Bus client is github.com/godbus/dbus/v5. To have it linked costs each start of sbxrun, which rarely
// asks, 0.03 ms, and the binary 0.86 MB. coreos/go-systemd/v22 adds nothing that is used here, makes two
// connections where one will do, and takes the address from the environment unseen.
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
		return nil, failure(errors.New("systemd does not manage this machine"), fmt.Sprintf("as root: d=/sys/fs/cgroup/u%d; mkdir -p $d/leaf && chown -R %d $d && echo PID-OF-CALLER >$d/leaf/cgroup.procs", c.uid, c.uid))
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.patience)
	defer cancel()
	var why error
	for _, e := range c.endpoints() {
		m := &systemd{endpoint: e, caller: c}
		err := m.with(ctx, func(conn *dbus.Conn) error {
			return conn.Object(destination, object).CallWithContext(ctx, "org.freedesktop.DBus.Properties.Get", 0, iface, "ControlGroup").Store(&m.cgroup)
		})
		if err == nil {
			if m.cgroup == "" { // the system's, as some versions have it
				m.cgroup = "/"
			}
			return m, nil
		}
		// The first that is there has the reason.
		if why == nil || errors.Is(why, unix.ENOENT) {
			why = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, c.failure(why)
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
	case errors.Is(err, context.DeadlineExceeded):
		return &result.Error{Code: "limit", Message: fmt.Sprintf("systemd has not answered within %v", c.patience), Hint: "see " + status, Err: err}
	case errors.Is(err, unix.ENOENT) && c.uid != 0:
		return failure(err, fmt.Sprintf("as root: loginctl enable-linger %d", c.uid))
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
	ctx, cancel := context.WithTimeout(context.Background(), m.caller.patience)
	defer cancel()
	err = m.with(ctx, func(conn *dbus.Conn) error { return startScope(ctx, conn, m.bus, name) })
	if err != nil {
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

// property is one of a unit, as D-Bus has it: (sv).
type property struct {
	Name  string
	Value dbus.Variant
}

// auxiliary units are part of the call; there are none: a(sa(sv)).
type auxiliary struct {
	Name       string
	Properties []property
}

// startScope starts the scope and waits for its job.
func startScope(ctx context.Context, conn *dbus.Conn, bus bool, name string) error {
	signals := make(chan *dbus.Signal, 64)
	conn.Signal(signals) // first, as the job may end before the answer is read
	manager := conn.Object(destination, object)
	if bus {
		if err := conn.AddMatchSignalContext(ctx, dbus.WithMatchInterface(iface), dbus.WithMatchMember("JobRemoved")); err != nil {
			return err
		}
		if err := manager.CallWithContext(ctx, iface+".Subscribe", 0).Err; err != nil {
			return err
		}
	}
	var job dbus.ObjectPath
	err := manager.CallWithContext(ctx, iface+".StartTransientUnit", 0, name, "fail", properties(), []auxiliary{}).Store(&job)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case s, ok := <-signals:
			if !ok {
				return errors.New("systemd has closed the connection")
			}
			var (
				id           uint32
				which        dbus.ObjectPath
				unit, result string
			)
			if s.Name != iface+".JobRemoved" || dbus.Store(s.Body, &id, &which, &unit, &result) != nil || which != job {
				continue
			}
			if result != "done" {
				return fmt.Errorf("the job has %q", result) // failed, timeout, canceled…
			}
			return nil
		}
	}
}

func properties() []property {
	return []property{
		{"Description", dbus.MakeVariant("sandbox of sbxrun")},
		{"Delegate", dbus.MakeVariant(true)},
		// 0 is who asks: the manager takes the pid from the kernel, in its own PID namespace.
		{"PIDs", dbus.MakeVariant([]uint32{0})},
		// Nothing is left of it, even if it failed.
		{"CollectMode", dbus.MakeVariant("inactive-or-failed")},
		// Else DefaultTasksMax holds, a limit that nobody asked for.
		{"TasksMax", dbus.MakeVariant(uint64(math.MaxUint64))},
	}
}

// with makes a connection for the time of f.
func (m *systemd) with(ctx context.Context, f func(*dbus.Conn) error) (err error) {
	defer func() {
		if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
			err = context.DeadlineExceeded // the connection was closed for that
		}
	}()
	socket, err := m.dial(ctx)
	if err != nil {
		return err
	}
	defer socket.Close()
	if d, ok := ctx.Deadline(); ok {
		if err := socket.SetDeadline(d); err != nil {
			return err
		}
	}
	if err := authenticate(socket); err != nil {
		return err
	}
	if err := socket.SetDeadline(time.Time{}); err != nil { // from here on the context has it
		return err
	}
	conn, err := dbus.NewConn(newAuthenticated(socket), dbus.WithContext(ctx)) // is closed with the context
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal("")}); err != nil {
		return err
	}
	if m.bus {
		if err := conn.Hello(); err != nil {
			return err
		}
	}
	return f(conn)
}

// dial connects, if who listens may be trusted.
func (m *systemd) dial(ctx context.Context) (*net.UnixConn, error) {
	if m.home != "" {
		var st unix.Stat_t
		if err := unix.Stat(m.home, &st); err != nil {
			return nil, fmt.Errorf("the user has no systemd manager: %s: %w", m.home, err)
		}
		if int(st.Uid) != m.caller.uid { // a sudo -E or su
			return nil, fmt.Errorf("%s belongs to user %d, not to %d", m.home, st.Uid, m.caller.uid)
		}
	}
	var d net.Dialer
	any, err := d.DialContext(ctx, "unix", m.path)
	if err != nil {
		return nil, err
	}
	conn := any.(*net.UnixConn)
	peer, err := listener(conn)
	switch {
	case err != nil:
		err = fmt.Errorf("who listens at %s: %w", m.path, err)
	case int(peer.Uid) != m.caller.uid && peer.Uid != 0:
		err = fmt.Errorf("user %d listens at %s", peer.Uid, m.path)
	case peer.Pid == 0:
		err = fmt.Errorf("who listens at %s is outside of this container", m.path)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// listener is who made the socket, as the kernel knows (unix(7), SO_PEERCRED).
func listener(conn *net.UnixConn) (peer *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		return nil, e
	}
	return peer, err
}

// authenticate does the client's half of the handshake, all in one write as systemd's own clients do.
//
// godbus says BEGIN last and goes on with a call. What systemd (252) reads together with BEGIN it
// leaves in its buffer until there is more to read, so that now and then the first call is not answered.
// The OK that comes after BEGIN was sent says that it has been read.
func authenticate(socket net.Conn) error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := io.WriteString(socket, "\x00AUTH EXTERNAL "+user+"\r\nBEGIN\r\n"); err != nil {
		return err
	}
	var line []byte
	for b := make([]byte, 1); len(line) < 256; line = append(line, b[0]) {
		// One by one: messages may follow.
		if _, err := io.ReadFull(socket, b); err != nil {
			return fmt.Errorf("authenticate: %w", err)
		}
		if b[0] == '\n' {
			break
		}
	}
	if !strings.HasPrefix(string(line), "OK ") {
		return fmt.Errorf("authenticate: %q", line)
	}
	return nil
}

// authenticated is a connection after the handshake, for a library that insists on its
// own: that one gets its answers from here, and the other side hears nothing of it.
type authenticated struct {
	net.Conn
	answers *strings.Reader
	begun   bool
}

func newAuthenticated(c net.Conn) *authenticated {
	return &authenticated{Conn: c, answers: strings.NewReader("REJECTED EXTERNAL\r\nOK 0\r\n")}
}

func (a *authenticated) Read(b []byte) (int, error) {
	if a.answers.Len() > 0 {
		return a.answers.Read(b)
	}
	return a.Conn.Read(b)
}

func (a *authenticated) Write(b []byte) (int, error) {
	if a.begun {
		return a.Conn.Write(b)
	}
	a.begun = string(b) == "BEGIN\r\n"
	return len(b), nil
}
