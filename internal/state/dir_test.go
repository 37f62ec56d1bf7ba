package state

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

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
		want   string // empty: an error
	}{
		{"nothing set", Caller{UID: me}, fallback},
		{"root", Caller{UID: 0}, "/run/sbxrun"},
		{"somebody", Caller{UID: 4711}, "/tmp/sbxrun-4711"},
		{"state directory", Caller{"/x/y", own, me}, "/x/y"},
		{"with a slash, which would follow a link", Caller{"/x//y/", own, me}, "/x/y"},
		{"relative", Caller{"x", own, me}, ""},
		{"relative to here", Caller{"./x", own, me}, ""},
		{"runtime directory", Caller{"", own, me}, own + "/sbxrun"},
		{"runtime directory by a link", Caller{"", link, me}, link + "/sbxrun"},
		{"runtime directory of another", Caller{"", own, other}, "/tmp/sbxrun-" + strconv.Itoa(other)},
		{"relative runtime directory", Caller{"", ".", me}, fallback},
		{"no runtime directory", Caller{"", own + "/none", me}, fallback},
		{"runtime directory is a file", Caller{"", file, me}, fallback},
	}
	for _, tt := range tests {
		got, err := tt.caller.path()
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
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
	if entries, warnings := d.List(); entries != nil || warnings != nil {
		t.Errorf("%v, %v", entries, warnings)
	}
	_, err = d.Find("x")
	wantCode(t, "find where nothing is", err, "no-such-sandbox")
	if w := d.Sweep(); w != nil {
		t.Error(w)
	}
	_, err = d.Create(testID(1), "x")
	wantCode(t, "create by who only looks", err, "state")
	must(t, d.Close())
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Fatalf("Look has made it: %v", err)
	}

	for range 2 {
		d, err := Open(caller)
		must(t, err)
		if d.Path() != path {
			t.Error(d.Path())
		}
		must(t, d.Close())
	}
	if st, err := os.Lstat(path); err != nil || st.Mode() != os.ModeDir|0o700 {
		t.Errorf("%v, %v", st, err)
	}
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
	// Somebody else's: root's, or what root gives away.
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
		{others, "belongs to user"},
		{"/proc/none", "/proc/none"},
		{in(strings.Repeat("x", 300)), "too long"},
	}
	for _, tt := range tests {
		_, err := Open(Caller{StateDir: tt.path, UID: os.Geteuid()})
		wantCode(t, tt.path, err, "state")
		if err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v; want it to say %q", tt.path, err, tt.says)
		}
	}
	// Only the last part is made.
	_, err := Open(Caller{StateDir: in("none/state"), UID: os.Geteuid()})
	wantCode(t, "no parent", err, "state")
	if _, err := os.Lstat(in("none")); !os.IsNotExist(err) {
		t.Errorf("parent: %v", err)
	}
	// Nothing was put right behind somebody's back.
	if st, err := os.Stat(in("mode755")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", st, err)
	}
}

// The path is looked up once.
func TestRenamedStateDirectory(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	moved := d.Path() + "-moved"
	must(t, os.Rename(d.Path(), moved))
	must(t, os.Mkdir(d.Path(), 0o777))
	must(t, o.Write(record("2", Running)))
	if e := found(t, d, "web"); !e.Alive || e.Record.CreatedAt != "2" {
		t.Errorf("%+v", e)
	}
	must(t, o.Remove())
	left, err := os.ReadDir(d.Path())
	if err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}
