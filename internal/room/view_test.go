package room

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// laidOut creates files below a new directory and returns its path: "name/" is a directory, "name -> target" a link, and
// anything else an executable file.
func laidOut(t *testing.T, names ...string) string {
	t.Helper()
	top, err := filepath.EvalSymlinks(t.TempDir())
	check.Must(t, err)
	for _, name := range names {
		name, target, isLink := strings.Cut(name, " -> ")
		p := filepath.Join(top, name)
		check.Must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		switch {
		case isLink:
			err = os.Symlink(strings.ReplaceAll(target, "TOP", top), p)
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(p, 0o755)
		default:
			err = os.WriteFile(p, []byte("\x7fELF"), 0o755)
		}
		check.Must(t, err)
	}
	return top
}

// sample returns the view of a sandbox on a fake host, and the path of that host's root.
func sample(t *testing.T) (view, string) {
	top := laidOut(t,
		"usr/bin/prog",
		"usr/bin/awk -> /etc/alternatives/awk",
		"usr/bin/mawk",
		"usr/bin/relative -> ../lib/real",
		"usr/bin/up -> ../../usr/bin/prog",
		"usr/bin/toofar -> ../../../../../../usr/bin/prog",
		"usr/bin/dangling -> nowhere",
		"usr/bin/loop -> loop2",
		"usr/bin/loop2 -> loop",
		"usr/bin/hidden -> /opt/prog",
		"usr/bin/host -> TOP/usr/bin/prog",
		"usr/bin/totmp -> /tmp/x",
		"usr/bin/toproc -> /proc/self/exe",
		"usr/bin/root -> /",
		"usr/lib/real",
		"etc/alternatives/awk -> /usr/bin/mawk",
		"etc/shadow",
		"opt/prog",
		"work/run",
		"work/dir/",
		"work/bin -> /bin",
		"work/out -> ../etc/shadow",
		"work/link -> dir",
		"work/etc -> /etc",
		"other/thing",
	)
	return view{
		{kind: opSymlink, dst: "/bin", src: "usr/bin"},
		{kind: opSymlink, dst: "/sbin", src: "/usr/bin"},
		{kind: opBind, dst: "/usr", src: top + "/usr"},
		{kind: opBindRW, dst: "/w", src: top + "/work"},
		{kind: opTmpfs, dst: "/tmp"},
		{kind: opProc, dst: "/proc"},
		{kind: opDir, dst: "/run"},
		{kind: opCopy, dst: "/etc/hosts", data: []byte("x")},
		{kind: opBind, dst: "/etc/alternatives", src: top + "/etc/alternatives"},
		{kind: opBind, dst: "/w/dir/other", src: top + "/other"},
		{kind: opBind, dst: "/a/b/c", src: top + "/other"},
	}, top
}

func TestViewResolve(t *testing.T) {
	v, top := sample(t)
	tests := []struct {
		path, want string // want is relative to the fake host's root; "" is one of the sandbox's own directories
		err        error
	}{
		{path: "/usr/bin/prog", want: "usr/bin/prog"},
		{path: "/usr/bin/awk", want: "usr/bin/mawk"}, // two links, both looked up inside
		{path: "/usr/bin/relative", want: "usr/lib/real"},
		{path: "/usr/bin/up", want: "usr/bin/prog"},
		{path: "/usr/bin/toofar", want: "usr/bin/prog"}, // above / is /
		{path: "/usr/bin", want: "usr/bin"},
		{path: "/usr/bin/", want: "usr/bin"},
		{path: "/bin/prog", want: "usr/bin/prog"}, // by bwrap's link
		{path: "/sbin/awk", want: "usr/bin/mawk"},
		{path: "/bin", want: "usr/bin"},
		{path: "/w/bin/prog", want: "usr/bin/prog"}, // by the host's link to bwrap's
		{path: "/w/link", want: "work/dir"},
		{path: "/w/link/other/thing", want: "other/thing"}, // a mount behind a link
		{path: "/w/dir/other/thing", want: "other/thing"},
		{path: "/usr/bin/root/w/run", want: "work/run"},
		{path: "/a/b/c/thing", want: "other/thing"},
		{path: "/etc/alternatives/awk", want: "usr/bin/mawk"},

		{path: "/"},
		{path: "/tmp"},
		{path: "/run"},
		{path: "/proc"},
		{path: "/a"},
		{path: "/a/b"}, // made by bwrap on the way to /a/b/c
		{path: "/etc"},
		{path: "/usr/bin/root"},

		{path: "/usr/bin/dangling", err: fs.ErrNotExist},
		{path: "/usr/bin/nowhere", err: fs.ErrNotExist},
		{path: "/usr/bin/prog/x", err: unix.ENOTDIR},
		{path: "/usr/bin/loop", err: errLoop},
		{path: "/usr/bin/loop/x", err: errLoop},
		{path: "/usr/bin/hidden", err: errNotVisible}, // /opt/prog exists only on the host
		{path: "/usr/bin/host", err: errNotVisible},
		{path: "/w/out", err: errNotVisible}, // ../etc/shadow as seen from the host's side
		{path: "/w/etc/shadow", err: errNotVisible},
		{path: "/opt/prog", err: errNotVisible},
		{path: "/tmp/x", err: errNotVisible},
		{path: "/usr/bin/totmp", err: errNotVisible},
		{path: "/usr/bin/toproc", err: errNotVisible},
		{path: "/a/x", err: errNotVisible},
		{path: "/usrx", err: errNotVisible},
		{path: "/nowhere", err: errNotVisible},
	}
	for _, tt := range tests {
		got, err := v.resolve(tt.path)
		if !errors.Is(err, tt.err) {
			t.Errorf("resolve(%q) = %q, %v; want error %v", tt.path, got, err, tt.err)
			continue
		}
		want := ""
		if tt.want != "" {
			want = filepath.Join(top, tt.want)
		}
		check.That(t, err != nil || got == want, "resolve(%q) = %q; want %q", tt.path, got, want)
	}
}

func TestSandboxPathOf(t *testing.T) {
	v, _ := sample(t)
	tests := []struct{ callers, want string }{
		{"/usr/local/bin:/usr/bin:/bin", "/usr/local/bin:/usr/bin:/bin"},
		{"/opt/x/bin:/usr/bin:/home/me/.pyenv/shims", "/usr/bin"},
		{"/w/bin:/usr/bin/../bin", "/w/bin:/usr/bin/../bin"},
		{"/bin/sub", "/bin/sub"},
		{".:bin::/usr/bin:", "/usr/bin"}, // never the working directory
		{"/tmp:/proc:/run:/:/usrx:/binary", defaultPath},
		{"", defaultPath},
		{"\n:\xff", defaultPath},
	}
	for _, tt := range tests {
		check.Equal(t, sandboxPathOf(v, tt.callers), tt.want, "sandboxPathOf(%q)", tt.callers)
	}
}

// Where one of the sandbox's own directories covers a link of a root directory, the link leads nowhere.
func TestViewResolveCovered(t *testing.T) {
	top := t.TempDir()
	check.Must(t, errors.Join(os.MkdirAll(filepath.Join(top, "tree/srv"), 0o755), os.MkdirAll(filepath.Join(top, "secret/a"), 0o755), os.Symlink(filepath.Join(top, "secret"), filepath.Join(top, "tree/home"))))
	for _, name := range []string{"secret/file", "secret/a/file", "tree/srv/file"} {
		check.Must(t, os.WriteFile(filepath.Join(top, name), nil, 0o755))
	}
	tree := filepath.Join(top, "tree")
	v := view{{kind: opRoot, dst: "/", src: tree}, {kind: opTmpfs, dst: "/home/a/b"}, {kind: opTmpfs, dst: "/srv/x"}}
	for name, want := range map[string]string{"/home": "", "/home/a": "", "/home/a/b": "", "/srv": tree + "/srv", "/srv/file": tree + "/srv/file"} {
		got, err := v.resolve(name)
		check.That(t, err == nil && got == want, "%s: %q, %v; want %q", name, got, err, want)
	}
	for _, name := range []string{"/home/file", "/home/a/file", "/srv/x/../../home/file"} {
		got, err := v.resolve(name)
		check.That(t, errors.Is(err, fs.ErrNotExist) && got == "", "%s: %q, %v", name, got, err)
	}
}
