package state

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The test's role in a child process.
const roleVar = "SBXRUN_TEST_ROLE"

// TestMain is also the supervisor that TestKilledSupervisor kills: it creates a sandbox,
// reports it, and waits until it is killed or its stdin ends.
func TestMain(m *testing.M) {
	if os.Getenv(roleVar) == "supervisor" {
		d, err := Open(Caller{StateDir: os.Args[1], UID: os.Geteuid()})
		if err == nil {
			var o *Claim
			if o, err = d.Create(os.Args[2], os.Args[3]); err == nil {
				err = o.Write(record("2026-01-01T00:00:00.000Z", Running))
			}
		}
		fmt.Println(err)
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// opened returns a new state directory.
func opened(t *testing.T) *Dir {
	t.Helper()
	// Below /tmp: an unprivileged user may have no other place, and t.TempDir makes directories that others can read.
	return openedAt(t, filepath.Join(t.TempDir(), "state"))
}

func openedAt(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Open(Caller{StateDir: path, UID: os.Geteuid()})
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

func testID(n int) string { return fmt.Sprintf("%016x", 0x5bcd000000000000+n) }

func created(t *testing.T, d *Dir, n int, name string) *Claim {
	t.Helper()
	o, err := d.Create(testID(n), name)
	must(t, err)
	t.Cleanup(func() { o.giveUp() })
	return o
}

// written returns the claim of a new sandbox with a record.
func written(t *testing.T, d *Dir, n int, name string) *Claim {
	t.Helper()
	o := created(t, d, n, name)
	must(t, o.Write(record(fmt.Sprintf("2026-01-01T00:00:%02d.000Z", n), Running)))
	return o
}

func writeFile(o *Claim, name string, data []byte) error { return Failed(o.folder.Write(name, data)) }

func record(createdAt string, phase Phase) Record {
	r := Record{Argv: []string{"true"}, CreatedAt: createdAt, Phase: phase, Supervisor: proc.Identity{PID: 4711, Start: 1, BootID: "b", PIDNS: 1}}
	if phase == Ended {
		r.Report = &result.Report{Status: result.StatusCompleted}
	}
	return r
}

func found(t *testing.T, d *Dir, word string) *Entry {
	t.Helper()
	e, err := d.Find(word)
	check.Require(t, err == nil, "find %q: %v", word, err)
	return e
}

// wantCode checks that err is a [*result.Error] with this code and fit to be shown: one line and a hint.
func wantCode(t *testing.T, what string, err error, code string) {
	t.Helper()
	var e *result.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: %v; want an error with code %q", what, err, code)
		return
	}
	check.That(t, e.Message != "" && e.Hint != "" && !strings.ContainsAny(e.Message+e.Hint, "\n\x00\x1b"), "%s: message %q, hint %q", what, e.Message, e.Hint)
}

// wantIDs checks the IDs that List returns, and returns its warnings.
func wantIDs(t *testing.T, d *Dir, want ...int) []error {
	t.Helper()
	entries, warnings := d.List()
	var got, ids []string
	for _, e := range entries {
		got = append(got, e.ID)
	}
	for _, n := range want {
		ids = append(ids, testID(n))
	}
	check.That(t, strings.Join(got, " ") == strings.Join(ids, " "), "listed %v, want %v", got, ids)
	return warnings
}

// wantFiles checks the paths below the state directory.
func wantFiles(t *testing.T, d *Dir, want ...string) {
	t.Helper()
	var got []string
	err := filepath.WalkDir(d.Path(), func(path string, _ os.DirEntry, err error) error {
		if path != d.Path() {
			got = append(got, strings.TrimPrefix(path, d.Path()+"/"))
		}
		return err
	})
	check.That(t, err == nil, "%v", err)
	check.That(t, strings.Join(got, " ") == strings.Join(want, " "), "there is %v, want %v", got, want)
}

func must(t testing.TB, err error) {
	t.Helper()
	check.Must(t, err)
}

// A sandbox from its creation to its removal, as its supervisor and other processes see it.
func TestLife(t *testing.T) {
	d := opened(t)
	o := created(t, d, 1, "web")
	wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", "lock", "names", "names/web")
	w := wantIDs(t, d)
	check.That(t, w == nil, "without a record: %v", w)
	_, err := d.Find("web")
	wantCode(t, "without a record", err, "no-such-sandbox")

	r := record("2026-01-01T00:00:01.000Z", Starting)
	must(t, o.Write(r))
	e := found(t, d, "web")
	check.That(t, e.Alive && e.Status() == "starting" && e.ID == testID(1) && e.Record.ID == testID(1) && e.Record.Name == "web" && e.Record.Version == 1, "%+v, %s", e, e.Status())
	r.Phase, r.Init = Running, &proc.Identity{PID: 4712}
	must(t, o.Write(r))
	must(t, e.Refresh())
	check.That(t, e.Status() == "running" && e.Record.Init.PID == 4712, "%+v, %s", e.Record, e.Status())
	must(t, writeFile(o, "env", []byte("A=1")))
	data, err := os.ReadFile(filepath.Join(d.Path(), testID(1), "env"))
	check.That(t, err == nil && string(data) == "A=1", "%q, %v", data, err)
	log, err := o.OpenFile("stdout", os.O_WRONLY|os.O_CREATE|os.O_APPEND)
	must(t, err)
	_, err = log.WriteString("hello\n")
	must(t, err)
	log.Close()
	file, err := e.OpenFile("stdout")
	must(t, err)
	file.Close()
	for _, name := range []string{"env", "stdout", recordName, lockName, activityName} {
		st, err := os.Lstat(filepath.Join(d.Path(), testID(1), name))
		check.That(t, err == nil && st.Mode() == 0o600, "%s: %v, %v", name, st, err)
	}
	wantCode(t, "remove the living", e.Remove(), "still-alive")
	_, err = d.Create(testID(1), "")
	wantCode(t, "the same id", err, "state")
	must(t, e.Refresh())

	// The status comes from the report as soon as there is one.
	r.Phase, r.Report = Ended, &result.Report{Status: result.StatusFailed}
	must(t, o.Write(r))
	must(t, e.Refresh())
	check.That(t, e.Alive && e.Status() == "failed", "alive %v, %s", e.Alive, e.Status())
	must(t, o.Close())
	must(t, o.Close())
	wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/env", testID(1)+"/lock", testID(1)+"/record.json", testID(1)+"/stdout", "lock", "names")
	e = found(t, d, "web")
	check.That(t, !e.Alive && e.Status() == "failed", "alive %v, %s", e.Alive, e.Status())
	must(t, e.Remove())
	must(t, e.Remove())
	wantFiles(t, d, "lock", "names")
	wantCode(t, "refresh after removal", e.Refresh(), "no-such-sandbox")
	_, err = e.OpenFile("env")
	wantCode(t, "read after removal", err, "no-such-sandbox")
}

// supervisor runs a supervisor in a child process until end is called or it is killed.
func supervisor(t *testing.T, d *Dir, n int, name string) (c *exec.Cmd, end func()) {
	t.Helper()
	c = exec.Command(os.Args[0], d.Path(), testID(n), name)
	c.Env = append(os.Environ(), roleVar+"=supervisor")
	in, err := c.StdinPipe()
	must(t, err)
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	end = func() { in.Close(); _ = c.Wait() }
	buf := make([]byte, 1000)
	if k, err := out.Read(buf); err != nil || string(buf[:k]) != "<nil>\n" {
		end()
		t.Fatalf("supervisor: %q, %v", buf[:k], err)
	}
	return c, end
}

// A killed supervisor leaves its record, and its name becomes free.
func TestKilledSupervisor(t *testing.T) {
	d := opened(t)
	c, end := supervisor(t, d, 1, "web")
	defer end()
	e := found(t, d, "web")
	check.That(t, e.Alive && e.Status() == "running", "alive %v, %s", e.Alive, e.Status())
	_, err := d.Create(testID(2), "web")
	wantCode(t, "a name that is taken", err, "name-in-use")
	check.That(t, strings.Contains(err.Error(), testID(1)), "the message does not name the sandbox:  %v", err)
	wantIDs(t, d, 1)
	must(t, c.Process.Kill())
	_ = c.Wait()
	e = found(t, d, "web")
	check.That(t, !e.Alive && e.Status() == "lost", "alive %v, %s", e.Alive, e.Status())
	o := written(t, d, 2, "web")
	got := found(t, d, "web")
	check.That(t, got.ID == o.ID && got.Alive, "%+v", got)
	must(t, e.Remove()) // does not remove its new owner's name
	wantIDs(t, d, 2)
	got = found(t, d, "web")
	check.That(t, got.ID == o.ID, "%+v", got)
	must(t, o.Remove())
	must(t, o.Remove())
	wantFiles(t, d, "lock", "names")
}

// A process stopped with a lock held blocks others only for a while.
func TestLockPatience(t *testing.T) {
	d := opened(t)
	_, err := d.root.Lock("x", os.O_RDWR|os.O_CREATE, unix.F_WRLCK, 0)
	must(t, err)
	begin := time.Now()
	_, err = d.root.Lock("x", os.O_RDWR, unix.F_WRLCK, 20*time.Millisecond)
	wantCode(t, "a lock that is held", Failed(err), "state")
	took := time.Since(begin)
	check.That(t, took >= 20*time.Millisecond && took <= 5*time.Second, "took %v", took)
}

func TestPath(t *testing.T) {
	own := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(own, link))
	file := filepath.Join(own, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	me, other := os.Geteuid(), os.Geteuid()+1
	fallback := "/tmp/sbxrun-" + strconv.Itoa(me)
	if me == 0 {
		fallback = "/run/sbxrun"
	}
	tests := []struct {
		name   string
		caller Caller
		want   string // "" for an error
	}{
		{"nothing set", Caller{UID: me}, fallback},
		{"root", Caller{UID: 0}, "/run/sbxrun"},
		{"somebody", Caller{UID: 4711}, "/tmp/sbxrun-4711"},
		{"state directory", Caller{StateDir: "/x/y", RuntimeDir: own, UID: me}, "/x/y"},
		{"with a slash, which would follow a link", Caller{StateDir: "/x//y/", RuntimeDir: own, UID: me}, "/x/y"},
		{"relative", Caller{StateDir: "x", RuntimeDir: own, UID: me}, ""},
		{"relative to here", Caller{StateDir: "./x", RuntimeDir: own, UID: me}, ""},
		{"runtime directory", Caller{RuntimeDir: own, UID: me}, own + "/sbxrun"},
		{"runtime directory by a link", Caller{RuntimeDir: link, UID: me}, link + "/sbxrun"},
		{"runtime directory of another", Caller{RuntimeDir: own, UID: other}, "/tmp/sbxrun-" + strconv.Itoa(other)},
		{"relative runtime directory", Caller{RuntimeDir: ".", UID: me}, fallback},
		{"no runtime directory", Caller{RuntimeDir: own + "/none", UID: me}, fallback},
		{"runtime directory is a file", Caller{RuntimeDir: file, UID: me}, fallback},
	}
	for _, tt := range tests {
		got, err := tt.caller.Path()
		check.That(t, got == tt.want, "%s: %q, want %q", tt.name, got, tt.want)
		if tt.want == "" {
			wantCode(t, tt.name, err, "state")
		} else if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestOpen(t *testing.T) {
	defer unix.Umask(unix.Umask(0))
	base := t.TempDir()
	path := filepath.Join(base, "state")
	caller := Caller{StateDir: path, UID: os.Geteuid()}
	d, err := Look(caller)
	must(t, err)
	entries, warnings := d.List()
	check.That(t, entries == nil && warnings == nil, "%v, %v", entries, warnings)
	_, err = d.Find("x")
	wantCode(t, "find where nothing is", err, "no-such-sandbox")
	w := d.Sweep()
	check.That(t, w == nil, "%v", w)
	_, err = d.Create(testID(1), "x")
	wantCode(t, "create by who only looks", err, "state")
	must(t, d.Close())
	_, err = os.Lstat(path)
	check.Require(t, os.IsNotExist(err), "Look created it: %v", err)

	for range 2 {
		d, err := Open(caller)
		must(t, err)
		check.That(t, d.Path() == path, "%v", d.Path())
		must(t, d.Close())
	}
	st, err := os.Lstat(path)
	check.That(t, err == nil && st.Mode() == os.ModeDir|0o700, "%v, %v", st, err)
	d, err = Look(caller)
	must(t, err)
	must(t, d.Close())
}

func TestOpenRefused(t *testing.T) {
	base := t.TempDir()
	in := func(name string) string { return filepath.Join(base, name) }
	must(t, os.Mkdir(in("real"), 0o700))
	must(t, os.Symlink(in("real"), in("link")))
	must(t, os.Symlink(in("none"), in("dangling")))
	must(t, os.WriteFile(in("file"), nil, 0o700))
	must(t, unix.Mkfifo(in("pipe"), 0o700))
	for _, mode := range []os.FileMode{0o710, 0o701, 0o720, 0o755, 0o777 | os.ModeSticky} {
		name := in("mode" + strconv.FormatUint(uint64(mode.Perm()), 8))
		must(t, os.Mkdir(name, 0o700))
		must(t, os.Chmod(name, mode))
	}
	// Owned by another user: root, or an arbitrary one.
	others := "/"
	if os.Geteuid() == 0 {
		others = in("others")
		must(t, os.Mkdir(others, 0o700))
		must(t, os.Chown(others, 4711, 4711))
	}
	tests := []struct{ path, says string }{
		{in("link"), "symbolic link"},
		{in("link") + "/", "symbolic link"},
		{in("link") + "/.", "symbolic link"},
		{in("dangling"), "symbolic link"},
		{in("file"), "not a directory"},
		{in("pipe"), "not a directory"},
		{in("file/x"), "not a directory"},
		{in("mode710"), "mode 0710"},
		{in("mode701"), "mode 0701"},
		{in("mode720"), "mode 0720"},
		{in("mode755"), "mode 0755"},
		{in("mode777"), "mode 1777"},
		{others, "belongs to uid"},
		{"/proc/none", "/proc/none"},
		{in(strings.Repeat("x", 300)), "too long"},
	}
	for _, tt := range tests {
		_, err := Open(Caller{StateDir: tt.path, UID: os.Geteuid()})
		wantCode(t, tt.path, err, "state")
		check.That(t, err == nil || strings.Contains(err.Error(), tt.says), "%s: %v; want it to say %q", tt.path, err, tt.says)
	}
	// Only the last component is created.
	_, err := Open(Caller{StateDir: in("none/state"), UID: os.Geteuid()})
	wantCode(t, "no parent", err, "state")
	_, err = os.Lstat(in("none"))
	check.That(t, os.IsNotExist(err), "parent: %v", err)
	// Open does not change the mode of an existing directory.
	st, err := os.Stat(in("mode755"))
	check.That(t, err == nil && st.Mode().Perm() == 0o755, "%v, %v", st, err)
}

// Renaming the state directory does not affect an open Dir.
func TestRenamedStateDirectory(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	moved := d.Path() + "-moved"
	must(t, os.Rename(d.Path(), moved))
	must(t, os.Mkdir(d.Path(), 0o777))
	must(t, o.Write(record("2", Running)))
	e := found(t, d, "web")
	check.That(t, e.Alive && e.Record.CreatedAt == "2", "%+v", e)
	must(t, o.Remove())
	left, err := os.ReadDir(d.Path())
	check.That(t, err == nil && len(left) == 0, "%v, %v", left, err)
}

// Path does not use a name in a shared directory if another user owns it or can enter it. It
// returns a path in the home directory, also after the name is free again.
func TestTakenName(t *testing.T) {
	shared := sharedDir
	sharedDir = t.TempDir()
	defer func() { sharedDir = shared }()
	me := os.Geteuid()
	uid := me
	if me == 0 {
		uid = 4711 // root uses /run
	}
	mine := func(dir string) string {
		if me == 0 {
			must(t, os.Chown(dir, uid, uid))
		}
		return dir
	}
	home := func() string {
		dir := filepath.Join(t.TempDir(), "home")
		must(t, os.Mkdir(dir, 0o755))
		return mine(dir)
	}
	name := filepath.Join(sharedDir, "sbxrun-"+strconv.Itoa(uid))
	taken := map[string]func() error{
		"a file":      func() error { return os.WriteFile(name, nil, 0o600) },
		"a link":      func() error { return os.Symlink(mine(t.TempDir()), name) },
		"a dead link": func() error { return os.Symlink("nowhere", name) },
		"mode 0777": func() error {
			must(t, os.Mkdir(name, 0o777))
			return os.Chmod(mine(name), 0o777)
		},
	}
	if me == 0 {
		taken["another's"] = func() error { return os.Mkdir(name, 0o700) }
	}
	path := func(c Caller) string {
		got, err := c.Path()
		must(t, err)
		return got
	}
	for what, take := range taken {
		c := Caller{Home: home(), UID: uid}
		check.Equal(t, path(c), name, "%s, before", what)
		must(t, take())
		below := filepath.Join(c.Home, ".local/state/sbxrun")
		check.Equal(t, path(c), below, "%s", what)
		for _, unsafe := range []string{"", "relative", sharedDir} {
			got := path(Caller{Home: unsafe, UID: uid})
			check.That(t, (unsafe == sharedDir || got == name) && (unsafe != sharedDir || me != 0 || got == name), "%s, HOME=%q: %s", what, unsafe, got)
		}
		if me == 0 { // otherwise root would own the directory
			must(t, os.MkdirAll(below, 0o700))
			mine(below)
		} else {
			must(t, CheckUsable(c))
			_, err := os.Lstat(filepath.Dir(below))
			check.That(t, err != nil, "%s: CheckUsable makes directories", what)
			d, err := Open(c)
			must(t, err)
			d.Close()
		}
		must(t, os.Remove(name))
		check.Equal(t, path(c), below, "%s, gone", what)
		must(t, os.Mkdir(name, 0o700))
		mine(name)
		check.Equal(t, path(c), name, "%s, and then the caller's own", what)
		must(t, os.Remove(name))
	}
	runtime := t.TempDir()
	must(t, os.Chmod(runtime, 0o777)) // so that others can create the name in it
	got := path(Caller{RuntimeDir: runtime, UID: me})
	check.That(t, !strings.HasPrefix(got, runtime), "a runtime directory that others can write to: %s", got)
}
