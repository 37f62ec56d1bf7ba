package room

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestCurrentDirectory(t *testing.T) {
	top := laidOut(t, "plain/sub/", "a b/", "line\nbreak/", "byte\xff/", "homes/me/project/", "homes/other/", "gone/")
	at := func(name string) string { return filepath.Join(top, name) }
	shown := func(dir string) []Mount { return []Mount{{Kind: ReadOnly, Source: dir, Here: ".", Dest: dir}} }
	home := at("homes/me")
	tests := []struct {
		name, dir string
		mounts    []Mount // the user's mounts
		want      []Mount // the policy's mounts afterwards, if there is no error
		err       string
	}{
		{name: "plain", dir: at("plain"), want: shown(at("plain"))},
		{name: "newline", dir: at("line\nbreak"), want: shown(at("line\nbreak"))},
		{name: "not UTF-8", dir: at("byte\xff"), want: shown(at("byte\xff"))},
		{name: "below a home directory", dir: at("homes/me/project"), want: shown(at("homes/me/project"))},
		{name: "beside a home directory", dir: at("homes/other"), want: shown(at("homes/other"))},
		{name: "shown by a mount", dir: at("plain"), mounts: []Mount{{Kind: ReadWrite, Source: at("plain"), Dest: at("plain")}},
			want: []Mount{{Kind: ReadWrite, Source: at("plain"), Dest: at("plain")}}},
		{name: "below a mount", dir: at("plain/sub"), mounts: []Mount{{Source: at("a b"), Dest: at("plain")}},
			want: []Mount{{Source: at("a b"), Dest: at("plain")}}},
		{name: "above a mount", dir: at("plain"), mounts: []Mount{{Kind: Tmpfs, Dest: at("plain/sub")}},
			want: append([]Mount{{Kind: Tmpfs, Dest: at("plain/sub")}}, shown(at("plain"))...)},
		{name: "a home directory, by a mount", dir: home, mounts: shown(home), want: shown(home)},
		{name: "visible anyway", dir: "/usr/bin"},
		{name: "mounted over /tmp", dir: "/tmp", mounts: []Mount{{Source: "/tmp", Dest: "/tmp"}}, want: []Mount{{Source: "/tmp", Dest: "/tmp"}}},

		{name: "home directory", dir: home, err: fmt.Sprintf("the current directory %q is a home directory, with its keys and tokens", home)},
		{name: "above a home directory", dir: at("homes"), err: fmt.Sprintf("the current directory %q holds home directories, such as %q", at("homes"), home)},
		{name: "far above a home directory", dir: top, err: fmt.Sprintf("the current directory %q holds home directories, such as %q", top, home)},
		{name: "root", dir: "/", err: "the current directory is /, which contains the whole host"},
		{name: "/tmp", dir: "/tmp", err: "the current directory is /tmp, and the sandbox has its own"},
		{name: "/var/tmp", dir: "/var/tmp", err: "the current directory is /var/tmp, and the sandbox has its own"},
		{name: "/home", dir: "/home", err: `the current directory "/home" `},
		{name: "/etc", dir: "/etc", err: `the current directory "/etc" is not shown by default`},
		{name: "/proc", dir: "/proc/self", err: `the current directory "/proc/`},
		{name: "/dev", dir: "/dev", err: `the current directory "/dev" is not shown by default`},
		{name: "/sys", dir: "/sys/kernel", err: `the current directory "/sys/kernel" is not shown by default`},
		{name: "removed", dir: at("gone"), err: "the current directory cannot be used: it was removed, or cannot be reached"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(tt.dir)
			if tt.name == "removed" {
				check.Must(t, os.Remove(tt.dir))
			}
			p := Policy{Mounts: tt.mounts}
			got, err := currentDirectory(&p, home)
			if tt.err != "" {
				var e *result.Error
				check.That(t, errors.As(err, &e) && e.Code == "workdir" && strings.HasPrefix(e.Message, tt.err) && strings.HasPrefix(e.Hint, "--cwd none"),
					"got %q, error %#v; want error %q", got, err, tt.err)
				return
			}
			check.That(t, err == nil && got == tt.dir, "got %q, %v", got, err)
			check.NoDiff(t, cmp.Diff(tt.want, p.Mounts), "mounts (-want +got)")
		})
	}
}

// The policy decides which part of the current directory is visible.
func TestCurrentDirectoryAsked(t *testing.T) {
	top := laidOut(t, "repo/sub/deep/", "other/", "link -> repo")
	at := func(name string) string { return filepath.Join(top, name) }
	show := func(kind MountKind, dir string) []Mount { return []Mount{{Kind: kind, Source: dir, Dest: dir}} }
	tests := []struct {
		name, dir string
		policy    Policy
		workdir   string
		want      []Mount
		err       string
	}{
		{name: "writable", dir: at("repo"), policy: Policy{Cwd: CwdReadWrite}, workdir: at("repo"), want: show(ReadWrite, at("repo"))},
		{name: "read-only", dir: at("repo"), policy: Policy{Cwd: CwdReadOnly}, workdir: at("repo"), want: show(ReadOnly, at("repo"))},
		{name: "none", dir: at("repo"), policy: Policy{Cwd: CwdNone}, workdir: Home},
		{name: "none, started elsewhere", dir: at("repo"), policy: Policy{Cwd: CwdNone, Workdir: "/tmp"}, workdir: "/tmp"},
		{name: "none of a home directory", dir: at("other"), policy: Policy{Cwd: CwdNone}, workdir: Home},
		{name: "started elsewhere", dir: at("repo"), policy: Policy{Workdir: "/tmp"}, workdir: "/tmp"},
		{name: "writable, started elsewhere", dir: at("repo"), policy: Policy{Cwd: CwdReadWrite, Workdir: "/tmp"}, workdir: "/tmp", want: show(ReadWrite, at("repo"))},
		{name: "from above", dir: at("repo/sub/deep"), policy: Policy{CwdRoot: "../.."}, workdir: at("repo/sub/deep"), want: show(ReadOnly, at("repo"))},
		{name: "from above, writable", dir: at("repo/sub"), policy: Policy{Cwd: CwdReadWrite, CwdRoot: at("repo")}, workdir: at("repo/sub"), want: show(ReadWrite, at("repo"))},
		{name: "from itself", dir: at("repo"), policy: Policy{CwdRoot: "."}, workdir: at("repo"), want: show(ReadOnly, at("repo"))},
		{name: "from above, by a link", dir: at("repo/sub"), policy: Policy{CwdRoot: at("link")}, workdir: at("repo/sub"), want: show(ReadOnly, at("repo"))},
		{name: "writable, below a mount", dir: at("repo/sub"), policy: Policy{Cwd: CwdReadWrite, Mounts: show(ReadOnly, at("repo"))}, workdir: at("repo/sub"),
			want: append(show(ReadOnly, at("repo")), show(ReadWrite, at("repo/sub"))...)},

		{name: "mounted twice", dir: at("repo"), policy: Policy{Cwd: CwdReadWrite, Mounts: show(ReadOnly, at("repo"))}, err: fmt.Sprintf("the current directory %q has a mount of its own", at("repo"))},
		{name: "beside", dir: at("repo"), policy: Policy{CwdRoot: at("other")}, err: fmt.Sprintf("--cwd-root %q: the current directory %q is not below it", at("other"), at("repo"))},
		{name: "missing", dir: at("repo"), policy: Policy{CwdRoot: "none"}, err: fmt.Sprintf("--cwd-root %q: lstat", at("repo/none"))},
		{name: "all of the host", dir: at("repo"), policy: Policy{CwdRoot: "/"}, err: "--cwd-root is /, which contains the whole host"},
		{name: "home above", dir: at("other"), policy: Policy{CwdRoot: "..", Cwd: CwdReadWrite}, err: fmt.Sprintf("--cwd-root %q holds home directories", top)},
		{name: "home", dir: at("other"), policy: Policy{Cwd: CwdReadWrite}, err: fmt.Sprintf("the current directory %q is a home directory", at("other"))},
		{name: "the system", dir: "/usr/share", policy: Policy{Cwd: CwdReadWrite}, err: `the current directory "/usr/share" belongs to the system`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(tt.dir)
			got, err := currentDirectory(&tt.policy, at("other"))
			if tt.err != "" {
				var e *result.Error
				check.That(t, errors.As(err, &e) && strings.HasPrefix(e.Message, tt.err) && e.Hint != "" && !strings.Contains(e.Hint, at("other")),
					"got %q, error %#v; want error %q, and a hint without the home directory", got, err, tt.err)
				return
			}
			check.That(t, err == nil && got == tt.workdir, "got %q, %v; want %q", got, err, tt.workdir)
			if last := len(tt.want) - 1; last >= 0 {
				tt.want[last].Here, _ = filepath.Rel(tt.dir, tt.want[last].Source)
			}
			check.NoDiff(t, cmp.Diff(tt.want, tt.policy.Mounts), "mounts (-want +got)")
		})
	}
}

// HOME may be a symbolic link or lie below one, while the path of the current directory has no links.
func TestCurrentDirectoryHomeIsALink(t *testing.T) {
	top := laidOut(t, "data/me/project/", "data/other/", "home -> data", "me -> data/me", "far -> TOP/home/me", "dangling -> none")
	for _, home := range []string{"me", "home/me", "far", "home/me/", "home/../me"} {
		home = top + "/" + home
		for dir, want := range map[string]string{
			"data/me":         fmt.Sprintf("the current directory %q is a home directory", top+"/data/me"),
			"data":            fmt.Sprintf("the current directory %q holds home directories", top+"/data"),
			"data/me/project": "",
			"data/other":      "",
		} {
			t.Chdir(filepath.Join(top, dir))
			got, err := currentDirectory(&Policy{}, home)
			switch {
			case want == "" && (err != nil || got != filepath.Join(top, dir)):
				t.Errorf("HOME=%s in %s: got %q, %v", home, dir, got, err)
			case want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)):
				t.Errorf("HOME=%s in %s: got %q, %v; want error %s", home, dir, got, err, want)
			}
		}
	}
	t.Chdir(top + "/data/me")
	_, err := currentDirectory(&Policy{}, top+"/dangling")
	check.That(t, err == nil, "HOME that leads nowhere: %v", err)
}

// On some systems /home is a link. The test creates such a root directory.
func TestHomeWithinHomeIsALink(t *testing.T) {
	const inside = "SBXRUN_TEST_CHROOT"
	if root := os.Getenv(inside); root != "" {
		check.Must(t, errors.Join(unix.Chroot(root), os.Chdir("/")))
		for dir, want := range map[string]string{
			"/var/homes/me": "/var/homes/me", "/var/homes": "/var/homes", "/var": "/var", "/var/homes/me/project": "", "/var/other": "", "/home": "/home",
		} {
			check.Equal(t, hostfiles.HomeWithin(dir, "/nonexistent"), want, "hostfiles.HomeWithin(%q)", dir)
		}
		return
	}
	root := laidOut(t, "var/homes/me/project/", "var/other/", "home -> var/homes")
	c := exec.Command("unshare", "--user", "--map-root-user", os.Args[0], "-test.run=^TestHomeWithinHomeIsALink$")
	c.Env = append(os.Environ(), inside+"="+root, "TMPDIR=/", "GOCOVERDIR=/") // for -cover
	out, err := c.CombinedOutput()
	check.That(t, err == nil, "with a root directory of its own: %v\n%s", err, out)
}

func TestHomeWithin(t *testing.T) {
	tests := []struct{ dir, home, want string }{
		{"/data", "/data", "/data"},
		{"/data", "/data/", "/data"},
		{"/data", "/data/me", "/data/me"},
		{"/data", "/data/x/../me", "/data/me"},
		{"/data/me/project", "/data/me", ""},
		{"/data/me2", "/data/me", ""},
		{"/data", "/database", ""},
		{"/data", "", ""},
		{"/data", "/", ""},  // an account without a home directory
		{"/data", "..", ""}, // an invalid HOME is ignored
		{"/root", "/data", "/root"},
		{"/home/somebody-who-is-not-here", "", "/home/somebody-who-is-not-here"},
		{"/home/somebody-who-is-not-here/x", "", ""},
	}
	for _, tt := range tests {
		check.Equal(t, hostfiles.HomeWithin(tt.dir, tt.home), tt.want, "hostfiles.HomeWithin(%q, %q)", tt.dir, tt.home)
	}
}

func TestCheckWorkdir(t *testing.T) {
	v, top := sample(t)
	err := os.Symlink("/usr/lib", filepath.Join(top, "work/far"))
	check.Must(t, err)
	tests := []struct{ dir, want string }{
		{"/w", ""},
		{"/w/dir", ""},
		{"/w/link", ""},
		{"/w/bin", ""},
		{"/usr/bin/root", ""},
		{"/tmp", ""},
		{"/", ""},
		{"/a/b", ""},
		{"/w/none", `working directory "/w/none" does not exist in the sandbox`},
		{"/tmp/x", `working directory "/tmp/x" does not exist in the sandbox`},
		{"/opt", `working directory "/opt" does not exist in the sandbox`},
		{"/w/out", `working directory "/w/out" does not exist in the sandbox`},
		{"/usr/bin/loop", `working directory "/usr/bin/loop" does not exist in the sandbox`},
		{"/w/far/../lib", ""}, // of /usr; there is no /w/lib
		{"/w/run", `working directory "/w/run" is not a directory`},
		{"/etc/hosts", `working directory "/etc/hosts" is not a directory`}, // a copy
		{"/etc/hosts/", `working directory "/etc/hosts/" is not a directory`},
		{"/w/run/x", `working directory "/w/run/x" does not exist in the sandbox`},
	}
	for _, tt := range tests {
		got := ""
		if err := checkWorkdir(v, tt.dir, nil); err != nil {
			var e *result.Error
			check.That(t, errors.As(err, &e) && e.Code == "workdir" && e.Hint != "", "checkWorkdir(%q): %#v", tt.dir, err)
			got = err.Error()
		}
		check.That(t, got == tt.want, "checkWorkdir(%q): %q, want %q", tt.dir, got, tt.want)
	}
}

// Root's sandboxes run with another uid, which cannot enter every directory.
func TestCheckWorkdirOfAnotherUser(t *testing.T) {
	top := laidOut(t, "dir/")
	v := view{{kind: opBind, dst: "/w", src: top + "/dir"}, {kind: opTmpfs, dst: "/tmp"}}
	me, mine := uint32(os.Getuid()), uint32(os.Getgid())
	const other = 4711
	for _, tt := range []struct {
		mode os.FileMode
		cred proc.Cred
		ok   bool
	}{
		{0o700, proc.Cred{UID: other, GID: other}, false},
		{0o770, proc.Cred{UID: other, GID: other}, false},
		{0o706, proc.Cred{UID: other, GID: other}, false},
		{0o701, proc.Cred{UID: other, GID: other}, true},
		{0o710, proc.Cred{UID: other, GID: mine}, true},
		{0o701, proc.Cred{UID: other, GID: mine}, false},
		{0o700, proc.Cred{UID: me, GID: other}, true},
		{0o077, proc.Cred{UID: me, GID: mine}, false},
	} {
		check.Must(t, os.Chmod(top+"/dir", tt.mode))
		err := checkWorkdir(v, "/w", &tt.cred)
		if tt.ok {
			check.That(t, err == nil, "mode %o for %v: %v", tt.mode, tt.cred, err)
			continue
		}
		var e *result.Error
		want := fmt.Sprintf(`working directory "/w" cannot be entered by uid %d`, tt.cred.UID)
		check.That(t, errors.As(err, &e) && e.Code == "workdir" && strings.HasPrefix(e.Message, want) && e.Hint != "", "mode %o for %v: got %#v, want %s", tt.mode, tt.cred, err, want)
	}
	check.OK(t, checkWorkdir(v, "/tmp", &proc.Cred{UID: other, GID: other}), "the sandbox's own")
}

// The same, from the current directory on.
func TestPrepareRootInADirectoryOfAnotherUser(t *testing.T) {
	top := laidOut(t, "private/")
	dir := top + "/private"
	check.Must(t, os.Chmod(dir, 0o700))
	t.Chdir(dir)
	plan, err := Prepare(Policy{Command: []string{"true"}}, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), Home: "/nonexistent"})
	var e *result.Error
	want := fmt.Sprintf("working directory %q cannot be entered by uid 65534", dir)
	check.That(t, plan == nil && errors.As(err, &e) && e.Code == "workdir" && strings.HasPrefix(e.Message, want), "got %v, %#v; want %s", plan, err, want)
	if os.Geteuid() == 0 {
		return
	}
	// The mode of a user's own directory may deny them entry.
	check.Must(t, os.Chmod(dir, 0o600))
	_, err = Prepare(Policy{Command: []string{"true"}}, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), Home: "/nonexistent", UID: os.Geteuid(), GID: os.Getegid()})
	check.That(t, errors.As(err, &e) && e.Code == "workdir" && e.Hint != "", "got %#v", err)
}

// Each link of a path is created once, also if the path leads through it twice, and none in /proc or /dev.
func TestLinkPath(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	check.Must(t, err)
	at := func(name string) string { return filepath.Join(dir, name) }
	check.Must(t, errors.Join(os.MkdirAll(at("real/project"), 0o755), os.Symlink(at("real"), at("link")), os.Symlink(at("link/project"), at("real/again"))))
	t.Chdir(at("real/project"))
	for name, want := range map[string][]op{
		at("link/again"): {{kind: opSymlink, src: at("real"), dst: at("link")}, {kind: opSymlink, src: at("link/project"), dst: at("real/again")}},
		"/proc/self/cwd": nil,
		"/dev/fd/../cwd": nil,
	} {
		p := &Plan{ops: []op{{kind: opProc, dst: "/proc"}, {kind: opDev, dst: "/dev"}, {kind: opBind, src: at("real/project"), dst: at("real/project")}}}
		p.linkPath(name)
		check.That(t, slices.EqualFunc(p.ops[3:], want, func(a, b op) bool { return a.kind == b.kind && a.src == b.src && a.dst == b.dst }), "%s: %+v", name, p.ops[3:])
	}
}
