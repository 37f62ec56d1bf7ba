package limits

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// fakeSystemd is a manager that records its calls.
type fakeSystemd struct {
	calls      []string
	name, mode string
	properties map[string]any
	refusal    *dbus.Error
	job        string // its result; "" for none
	silent     bool
	handshake  string // sent before OK
}

// serve makes the fake listen, as this user's manager or as a bus daemon.
func (f *fakeSystemd) serve(t *testing.T, path string, bus bool) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	l, err := net.Listen("unix", path)
	check.Must(t, err)
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if !f.silent {
				f.answer(c, bus)
			} else {
				_, _ = io.Copy(io.Discard, c) // until the caller gives up
			}
			c.Close()
		}
	}()
}

// answer serves one connection. The library cannot act as the server in the handshake.
func (f *fakeSystemd) answer(c net.Conn, bus bool) {
	in := bufio.NewReader(c)
	if zero, err := in.ReadByte(); err != nil || zero != 0 {
		return
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		if line == "BEGIN\r\n" {
			_, _ = in.Discard(in.Buffered()) // ignored, as in systemd, until more data arrives
			f.methods(newAuthenticated(c), bus)
			return
		}
		if !strings.HasPrefix(line, "AUTH EXTERNAL ") {
			return
		}
		time.Sleep(time.Millisecond) // so that several messages may arrive together
		if _, err := io.WriteString(c, f.handshake+"OK 0123456789abcdef0123456789abcdef\r\n"); err != nil {
			return
		}
	}
}

func (f *fakeSystemd) methods(c net.Conn, bus bool) {
	conn, err := dbus.NewConn(c)
	if err != nil {
		return
	}
	defer conn.Close()
	called := func(name string) { f.calls = append(f.calls, name) }
	method := func(table map[string]any, path dbus.ObjectPath, iface string) {
		if err := conn.ExportMethodTable(table, path, iface); err != nil {
			panic(err)
		}
	}
	if bus {
		method(map[string]any{
			"Hello":    func() (string, *dbus.Error) { called("Hello"); return ":1.1", nil },
			"AddMatch": func(string) *dbus.Error { called("AddMatch"); return nil },
		}, "/org/freedesktop/DBus", "org.freedesktop.DBus")
	}
	method(map[string]any{"Get": func(i, p string) (dbus.Variant, *dbus.Error) {
		called("Get " + i + "." + p)
		return dbus.MakeVariant("/user.slice/user@1.service"), nil
	}}, object, "org.freedesktop.DBus.Properties")
	method(map[string]any{
		"Subscribe": func() *dbus.Error { called("Subscribe"); return nil },
		"StartTransientUnit": func(name, mode string, properties []property, _ []auxiliary) (dbus.ObjectPath, *dbus.Error) {
			called("StartTransientUnit")
			f.name, f.mode, f.properties = name, mode, map[string]any{}
			for _, p := range properties {
				f.properties[p.Name] = p.Value.Value()
			}
			if f.refusal != nil {
				return "", f.refusal
			}
			if f.job != "" {
				// Another job's signal first, and both before the answer.
				for _, path := range []dbus.ObjectPath{object + "/job/6", object + "/job/7"} {
					_ = conn.Emit(object, iface+".JobRemoved", uint32(7), path, name, map[bool]string{true: f.job, false: "failed"}[path == object+"/job/7"])
				}
			}
			return object + "/job/7", nil
		},
	}, object, iface)
	if conn.Auth([]dbus.Auth{dbus.AuthExternal("0")}) != nil {
		return
	}
	<-conn.Context().Done()
}

// property is a unit property in the library's form: (sv).
type property struct {
	Name  string
	Value dbus.Variant
}

// auxiliary units are an argument of the call: a(sa(sv)).
type auxiliary struct {
	Name       string
	Properties []property
}

// authenticated is a connection after the handshake, for the library, which insists on its own: it gets the
// answers from here, and the other side does not notice.
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

// callerAt returns a caller on a separate machine, with an ordinary user's or root's manager.
func callerAt(t *testing.T, membership string) caller {
	t.Helper()
	root, err := os.MkdirTemp("", "scope") // paths of sockets must be short
	check.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(root) })
	for _, dir := range []string{"/run/systemd/system", "/proc/self"} {
		check.Must(t, os.MkdirAll(root+dir, 0o755))
	}
	check.Must(t, os.WriteFile(root+"/proc/self/cgroup", []byte(membership), 0o644))
	return caller{root: root, uid: os.Geteuid(), env: func(string) string { return "" }, patience: 5 * time.Second}
}

const moved = "1:cpu:/x.scope\n0::/user.slice/user@1.service/app.slice/sbxrun-x.scope\n"

func asked(bus bool) (calls []string) {
	if bus {
		return []string{"Hello", "Get " + iface + ".ControlGroup", "Hello", "AddMatch", "Subscribe", "StartTransientUnit"}
	}
	return []string{"Get " + iface + ".ControlGroup", "StartTransientUnit"}
}

func TestScopeEnter(t *testing.T) {
	for _, bus := range []bool{false, true} {
		t.Run(map[bool]string{false: "private", true: "bus"}[bus], func(t *testing.T) {
			c := callerAt(t, moved)
			path := c.endpoints()[0].path
			if bus {
				path = c.endpoints()[len(c.endpoints())-1].path
			}
			f := &fakeSystemd{job: "done"}
			f.serve(t, path, bus)
			m, err := findSystemd(c)
			check.Must(t, err)
			check.That(t, m.Cgroup() == "/user.slice/user@1.service", "%q", m.Cgroup())
			cgroup, err := m.Enter("sbxrun-x.scope")
			check.Require(t, err == nil && cgroup == "/user.slice/user@1.service/app.slice/sbxrun-x.scope", "%v %v", cgroup, err)
			want := map[string]any{"Delegate": true, "PIDs": []uint32{0}, "CollectMode": "inactive-or-failed", "TasksMax": ^uint64(0), "Description": "sandbox of sbxrun"}
			diff := cmp.Diff(want, f.properties)
			check.That(t, diff == "" && f.name == "sbxrun-x.scope" && f.mode == "fail", "%s %s (-want +got)\n%s", f.name, f.mode, diff)
			check.NoDiff(t, cmp.Diff(asked(bus), f.calls), "(-want +got)")
		})
	}
}

// refused checks that an error is fit to be shown: one line, with a hint.
func refused(t *testing.T, err error, message, hint string) {
	t.Helper()
	e, ok := errors.AsType[*result.Error](err)
	check.That(t, ok && e.Code == "limit" && strings.Contains(e.Message, message) && strings.Contains(e.Hint, hint) && !strings.Contains(e.Message, "\n"), "%#v, want %q; %q", err, message, hint)
}

func TestScopeEnterRefused(t *testing.T) {
	for _, tt := range []struct {
		name       string
		fake       fakeSystemd
		membership string
		want       string
	}{
		{"by the manager", fakeSystemd{refusal: dbus.NewError("org.freedesktop.DBus.Error.AccessDenied", []any{"Access\ndenied"})}, moved, "start sbxrun-x.scope: Access denied"},
		{"the job fails", fakeSystemd{job: "failed"}, moved, `job result "failed"`},
		{"it was not moved", fakeSystemd{job: "done"}, "0::/user.slice/session-1.scope\n", "did not move sbxrun to it"},
		{"no cgroup v2", fakeSystemd{job: "done"}, "1:cpu:/sbxrun-x.scope\n", "did not move sbxrun to it"},
		{"another's scope", fakeSystemd{job: "done"}, "0::/sbxrun-x.scope/y\n", "did not move sbxrun to it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := callerAt(t, tt.membership)
			tt.fake.serve(t, c.endpoints()[0].path, false)
			m, err := findSystemd(c)
			check.Must(t, err)
			cgroup, err := m.Enter("sbxrun-x.scope")
			check.That(t, cgroup == "", "%q", cgroup)
			refused(t, err, tt.want, "")
		})
	}
}

// A manager that does not answer, at any point, causes a timeout.
func TestScopeSilence(t *testing.T) {
	c := callerAt(t, moved)
	c.patience = 50 * time.Millisecond
	(&fakeSystemd{silent: true}).serve(t, c.endpoints()[0].path, false)
	start := time.Now()
	_, err := findSystemd(c)
	refused(t, err, "did not answer within 50ms", "systemctl")
	d := time.Since(start)
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded) && d >= c.patience && d <= 5*time.Second, "%v after %v", err, d)

	c = callerAt(t, moved)
	f := &fakeSystemd{} // its job never ends
	f.serve(t, c.endpoints()[0].path, false)
	m, err := findSystemd(c)
	check.Must(t, err)
	m.caller.patience = 50 * time.Millisecond
	_, err = m.Enter("sbxrun-x.scope")
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
	refused(t, err, "did not answer", "systemctl")
}

// A listener that is not a D-Bus server is an error.
func TestScopeHandshake(t *testing.T) {
	for _, says := range []string{"REJECTED\r\n", "\n", "HTTP/1.1 400\r\n", strings.Repeat("x", 1000)} {
		c := callerAt(t, moved)
		(&fakeSystemd{handshake: says}).serve(t, c.endpoints()[0].path, false)
		_, err := findSystemd(c)
		refused(t, err, "authenticate", "systemctl")
	}
}

// A socket named by the environment is not trusted.
func TestScopeRefused(t *testing.T) {
	stranger := os.Geteuid() + 1
	t.Run("no systemd", func(t *testing.T) {
		c := callerAt(t, moved)
		os.Remove(c.root + "/run/systemd/system")
		_, err := findSystemd(c)
		refused(t, err, "systemd does not manage this machine", map[bool]string{true: WritableCgroups, false: "sbxrun doctor --script"}[c.uid == 0])
	})
	t.Run("no manager", func(t *testing.T) {
		c := callerAt(t, moved)
		c.uid = 12345
		_, err := findSystemd(c)
		refused(t, err, "the user has no systemd manager", "sbxrun doctor --script | sudo sh")
	})
	t.Run("another's directory", func(t *testing.T) {
		c := callerAt(t, moved)
		home := c.root + "/home"
		f := &fakeSystemd{job: "done"}
		f.serve(t, home+"/systemd/private", false)
		c.uid, c.env = stranger, func(name string) string { return map[string]string{"XDG_RUNTIME_DIR": home}[name] }
		_, err := findSystemd(c)
		refused(t, err, "belongs to uid", "systemctl")
		check.That(t, f.calls == nil, "it was asked %q", f.calls)
	})
	t.Run("another's bus", func(t *testing.T) {
		c := callerAt(t, moved)
		path := c.root + "/bus"
		f := &fakeSystemd{job: "done"}
		f.serve(t, path, true)
		var w *result.Error
		c.uid, c.env = stranger, func(name string) string {
			return map[string]string{"DBUS_SESSION_BUS_ADDRESS": "unix:abstract=x;unix:path=" + path + ",guid=1"}[name]
		}
		_, err := findSystemd(c)
		if os.Geteuid() == 0 { // root's listener is always trusted
			check.That(t, err == nil && len(f.calls) != 0, "%v", err)
			return
		}
		refused(t, err, "belongs to a process of uid", "")
		check.That(t, errors.As(err, &w) && f.calls == nil, "it was asked %q", f.calls)
	})
}

// Enter works with the machine's own systemd. A child of the test enters the scope, so that the test stays where it is.
func TestScopeHere(t *testing.T) {
	machine := here(t)
	if os.Getenv("SCOPE_TEST_ENTER") != "" {
		m, err := machine.manager()
		check.Must(t, err)
		cgroup, err := m.Enter(os.Getenv("SCOPE_TEST_ENTER"))
		check.Must(t, err)
		check.That(t, strings.HasPrefix(cgroup, m.Cgroup()), "%s is not below %s", cgroup, m.Cgroup())
		dir := "/sys/fs/cgroup" + cgroup
		for _, path := range []string{dir, dir + "/cgroup.procs", dir + "/cgroup.subtree_control"} {
			check.OK(t, unix.Access(path, unix.W_OK), "%s", path)
		}
		os.Stdout.WriteString("dir=" + dir + "\n")
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	begin := time.Now()
	m, err := machine.manager()
	if err != nil {
		var e *result.Error
		check.That(t, errors.As(err, &e) && e.Code == "limit" && e.Hint != "", "%#v", err)
		t.Logf("refused: %v; %s", err, e.Hint)
		return
	}
	t.Logf("%s after %v", m.Cgroup(), time.Since(begin))
	name := "sbxrun-scope-test.scope"
	cmd := exec.Command(os.Args[0], "-test.run=^TestScopeHere$", "-test.v")
	cmd.Env = append(os.Environ(), "SCOPE_TEST_ENTER="+name)
	out, err := cmd.CombinedOutput()
	_, dir, ok := strings.Cut(string(out), "dir=")
	check.Require(t, err != nil && err.Error() == "signal: killed" && ok, "%v: %s", err, out)
	dir, _, _ = strings.Cut(dir, "\n")
	harness.Until(t, 30*time.Second, "the end of "+dir, func() bool { return !exists(dir) })
}
