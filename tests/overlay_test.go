package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// original creates a directory for overlays.
func original(t *testing.T) (dir string) {
	dir = filepath.Join(harness.Dir(t), "original")
	check.Must(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("old\n"), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(dir, "sub/deep"), []byte("deep\n"), 0o644))
	return dir
}

// wantOriginal fails the test if that directory has changed.
func wantOriginal(t *testing.T, dir string) {
	t.Helper()
	names, err := filepath.Glob(dir + "/*")
	check.Must(t, err)
	text := harness.ReadFile(t, filepath.Join(dir, "file"))
	deep := harness.ReadFile(t, filepath.Join(dir, "sub/deep"))
	check.That(t, len(names) == 2 && string(text) == "old\n" && string(deep) == "deep\n", "the original was changed: %q, %q, %q", names, text, deep)
}

// A layer on disk is in use as long as any process can write to it, also when sbxrun was killed
// and its keeper is stopped.
func TestUpperHeld(t *testing.T) {
	t.Parallel()
	dir := original(t)
	flags := []string{"--cwd", "overlay", "--upper", filepath.Join(filepath.Dir(dir), "upper")}
	p := harness.Start(t, harness.Options{Dir: dir}, append(flags, "sh", "-c", "echo up; while echo x >>log; do sleep 0.01; done")...)
	p.WaitOutput("up\n")
	keeper := p.Role(harness.RoleKeeper)
	check.Must(t, keeper.Signal(unix.SIGSTOP))
	p.Kill()
	<-p.Exited()
	harness.Run(t, harness.Options{Dir: dir}, append(flags, "true")...).Expect(t, 125, "start-failed").ErrHas(t, "another sandbox uses it")
	check.Must(t, keeper.Signal(unix.SIGCONT))
	p.Wait()
	harness.Run(t, harness.Options{Dir: dir}, append(flags, "cat", "file", "log")...).Expect(t, 0, "exited")
}

// Overlays that hide each other or another mount are refused.
func TestOverlayRefused(t *testing.T) {
	t.Parallel()
	dir := original(t)
	harness.Run(t, harness.Options{}, layer(t, "--cwd", "none", "--overlay", dir+":/mnt", "--tmpfs", "/mnt/sub", "true")...).Expect(t, 125, "start-failed").ErrHas(t, "/mnt/sub is mounted within, and would be hidden")
	wrap := []string{"unshare", "--mount"}
	if !harness.Root() {
		wrap = append(wrap, "--user", "--map-current-user", "--keep-caps")
	}
	o := harness.Options{Bare: true, Wrap: append(wrap, "sh", "-c", `mount --bind "$0" "$0/sub" && exec setpriv --ambient-caps=-all --inh-caps=-all "$@"`, dir)}
	harness.Run(t, o, layer(t, "--cwd", "none", "--overlay", dir+":/mnt", "true")...).Exits(t, 125).ErrHas(t, "another file system is mounted within the directory")
	wantOriginal(t, dir)
}

// text returns the output of a command of sbxrun, which must exit with code.
func text(t *testing.T, s *harness.State, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	r := s.Run(args...).Exits(t, code)
	return string(r.Stdout), string(r.Stderr)
}

// apply reports a conflict if a directory was replaced on the host, even if its files are old. As
// root, it does not write to root's directories that the tree's owner has moved there.
func TestOverlayReplaced(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, replace, want string
		root                bool
	}{
		{"update", "mv cur v1 && mv v2 cur", `the directory "cur" was replaced`, false},
		{"another", "mv cur x && mv keep cur", `the directory "cur" was replaced`, false},
		{"root's", "mv cur x && mv keep cur && touch cur", `the directory "cur" belongs to uid 0`, true},
		{"base", "cp -a . ../copy && mv ../original ../old && mv ../copy ../original", `the directory "." was replaced`, false},
	} {
		if tt.root && !harness.Root() {
			continue // an ordinary user has no such directories
		}
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir, s := original(t), harness.NewState(t)
			for _, name := range []string{"cur/f", "v2/f", "keep/f"} {
				check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
				check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644))
			}
			if tt.root {
				runHere(t, exec.Command("chown", "-R", "61000:61000", dir))
				runHere(t, exec.Command("chown", "-R", "0:0", dir+"/keep"))
				check.Must(t, os.Chmod(dir+"/keep", 0o700))
			}
			b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
			execOut(t, b, "echo new >cur/f; echo new >cur/made; sleep 0.1")
			replace := exec.Command("sh", "-ec", tt.replace)
			replace.Dir = dir
			runHere(t, replace)
			before := treeText(t, dir)
			if got, _ := text(t, s, 0, "diff", "agent"); strings.TrimPrefix(got, "P cur/ (mode 0700 to 0755) (changed on the host, too)\n") != "M cur/f (changed on the host, too)\nA cur/made (changed on the host, too)\n" {
				t.Errorf("diff: %q", got)
			}
			_, stderr := text(t, s, 1, "apply", "agent")
			check.That(t, strings.Contains(stderr, tt.want), "apply: %s", stderr)
			check.Equal(t, treeText(t, dir), before)
			text(t, s, 0, "apply", "agent", "--force")
			holds(t, dir+"/cur/f", "new\n")
		})
	}
}

// A manipulated layer on disk is shown and applied, or parts are left out; nothing outside is read or written.
func TestHostileLayer(t *testing.T) {
	t.Parallel()
	s, top := harness.NewState(t), harness.Dir(t)
	write := func(dir, name, text string) {
		name = filepath.Join(dir, name)
		check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		check.Must(t, os.WriteFile(name, []byte(text), 0o644))
	}
	outside, original := top+"/outside", top+"/original"
	write(outside, "secret", "secret")
	write(outside, "dir/f", "theirs")
	for _, name := range []string{"gone", "opaque/old", "opaque/kept", "part/gone", "part/kept", "later/gone", "to-link/f", "to-dir", "file"} {
		write(original, name, "old")
	}
	s.Sandbox(harness.Options{Dir: original}, "--name", "box", "--cwd", "overlay", "--upper", top+"/upper")
	text(t, s, 0, "kill", "--grace", "0", "box")
	layer := top + "/upper/0/upper"
	set := func(name, attr, value string) {
		check.Must(t, unix.Setxattr(filepath.Join(layer, name), "user.overlay."+attr, []byte(value), 0))
	}
	for _, name := range []string{"opaque/new", "opaque/kept", "part/new", "later/gone", "to-dir/in", "file", "one", "redirect/f", "meta", "-rf", "new\nline", "\xff\xfe", strings.Repeat("n", 255), "setuid", "closed/f"} {
		write(layer, name, "")
	}
	for _, name := range []string{"opaque/new", "opaque/kept", "part/new", "one", "file"} {
		write(layer, name, "new")
	}
	for _, name := range []string{"gone", "part/gone", "never", "opaque/never"} {
		check.Must(t, unix.Mknod(filepath.Join(layer, name), unix.S_IFCHR, 0))
	}
	set("opaque", "opaque", "y")
	set("later", "opaque", "x") // Linux 6.7: an empty file marks a deletion
	set("later/gone", "whiteout", "y")
	set("redirect", "redirect", "/../outside/dir")
	set("meta", "metacopy", "")
	set("meta", "redirect", "/../outside/secret")
	check.Must(t, os.Link(layer+"/one", layer+"/two"))
	check.Must(t, os.Link(outside+"/secret", layer+"/linked"))
	for name, target := range map[string]string{"out": outside, "to-link": outside + "/dir", "up": "../outside/secret", "self": "self"} {
		check.Must(t, os.Symlink(target, filepath.Join(layer, name)))
	}
	check.Must(t, unix.Mkfifo(layer+"/fifo", 0o644))
	check.Must(t, unix.Mknod(layer+"/socket", unix.S_IFSOCK|0o644, 0))
	if os.Geteuid() == 0 {
		check.Must(t, unix.Mknod(layer+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		check.Must(t, unix.Mknod(layer+"/loop", unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))))
		check.Must(t, unix.Mknod(layer+"/opaque/zero", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))))
	}
	check.Must(t, unix.Chmod(layer+"/setuid", 0o6755))
	before := treeText(t, outside)

	for _, flags := range [][]string{nil, {"-p"}, {"--json"}, {"--stat"}, {"--tar"}} {
		text(t, s, 0, append([]string{"diff", "box"}, flags...)...)
	}
	text(t, s, 0, "apply", "box", "--check")
	s.Run("diff", "box", "gone").Exits(t, 0).Out(t, "D gone\n")
	text(t, s, 0, "apply", "box")
	for _, name := range []string{"gone", "opaque/old", "part/gone", "later/gone", "to-link/f"} {
		b, err := os.ReadFile(filepath.Join(original, name))
		check.That(t, string(b) == "old" && err == nil, "without --delete: %s: %q, %v", name, b, err)
	}
	text(t, s, 0, "apply", "box", "--delete")
	want := map[string]string{
		".": "dir", "-rf": "file ", "new\nline": "file ", "\xff\xfe": "file ", strings.Repeat("n", 255): "file ", "setuid": "file ", "meta": "file ", "one": "file new", "two": "file new", "file": "file new", "linked": "file secret",
		"opaque": "dir", "opaque/new": "file new", "opaque/kept": "file new", "part": "dir", "part/new": "file new", "part/kept": "file old", "later": "dir", "to-dir": "dir", "to-dir/in": "file ", "redirect": "dir", "redirect/f": "file ", "closed": "dir", "closed/f": "file ",
		"out": "-> " + outside, "to-link": "-> " + outside + "/dir", "up": "-> ../outside/secret", "self": "-> self",
	}
	got := map[string]string{}
	check.Must(t, filepath.WalkDir(original, func(name string, e os.DirEntry, err error) error {
		check.Must(t, err)
		info, err := e.Info()
		check.Must(t, err)
		below, err := filepath.Rel(original, name)
		check.Must(t, err)
		switch info.Mode() &^ 0o777 {
		case 0:
			b := harness.ReadFile(t, name)
			got[below] = "file " + string(b)
		case os.ModeDir:
			got[below] = "dir"
		case os.ModeSymlink:
			target, err := os.Readlink(name)
			check.Must(t, err)
			got[below] = "-> " + target
		default:
			got[below] = info.Mode().String()
		}
		return nil
	}))
	check.NoDiff(t, cmp.Diff(want, got), "-want +got")
	one, errOne := os.Stat(original + "/one")
	two, errTwo := os.Stat(original + "/two")
	linked, errLinked := os.Stat(original + "/linked")
	secret, errSecret := os.Stat(outside + "/secret")
	check.That(t, errors.Join(errOne, errTwo, errLinked, errSecret) == nil && os.SameFile(one, two) && !os.SameFile(linked, secret), "of names of one file, those outside are others")
	check.Equal(t, treeText(t, outside), before, "what is outside was changed:\n")
}

// kernel reports whether the kernel has at least this version.
func kernel(t harness.T, wantMajor, wantMinor int) bool {
	var uts unix.Utsname
	check.Must(t, unix.Uname(&uts))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(uts.Release[:]), "%d.%d", &major, &minor)
	check.Must(t, err)
	return major > wantMajor || major == wantMajor && minor >= wantMinor
}

// layer adds flags for a layer that every kernel supports: a new one on disk where memory does not work.
func layer(t harness.T, flags ...string) []string {
	if kernel(t, 6, 6) {
		return flags
	}
	return append([]string{"--upper", filepath.Join(harness.Dir(t), "upper")}, flags...)
}

// After the death of the supervisor, diff, apply and snapshot report that a layer in memory is
// gone, or that there was none.
func TestOverlayLost(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	lost := map[string]string{"none": "the sandbox none has no overlay"}
	s.Sandbox(harness.Options{}, "--name", "none").KillSupervisor()
	if kernel(t, 6, 6) {
		lost["memory"] = "the sandbox memory has ended, and its layer with it"
		s.Sandbox(harness.Options{Dir: original(t)}, "--name", "memory", "--cwd", "overlay").KillSupervisor()
	}
	for name, want := range lost {
		for _, command := range []string{"diff", "apply"} {
			_, stderr := text(t, s, 125, command, name)
			check.That(t, strings.Contains(stderr, want), "%s %s: %s", command, name, stderr)
		}
		_, stderr := text(t, s, 125, "snapshot", "create", name)
		check.That(t, strings.Contains(stderr, "has ended without a layer on disk"), "snapshot %s: %s", name, stderr)
	}
}

// A path that is not UTF-8 is refused, because JSON records cannot hold it: diff and apply would use another directory.
func TestOverlayNotUTF8(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	top := original(t)
	dir, other := filepath.Join(top, "x\xff"), filepath.Join(top, "x\ufffd")
	check.Must(t, os.Mkdir(dir, 0o755))
	check.Must(t, os.Mkdir(other, 0o755))
	b, r := s.TrySandbox(harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--name", "agent")...)
	check.That(t, b == nil && r.ExitCode == 125 && strings.Contains(string(r.Stdout)+string(r.Stderr), "is not UTF-8"), "%d %s %s", r.ExitCode, r.Stdout, r.Stderr)
	harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c", "echo new >file")...).Expect(t, 0, "exited")
	holds(t, dir+"/file", "new\n")
}

// Attributes of overlayfs that a command has set through a writable bind hide no file in the
// directory below an overlay: files with metacopy are listed and refused (EPERM), others are
// unaffected. diff and apply work as without them.
func TestOverlayAttributes(t *testing.T) {
	t.Parallel()
	attributes := map[string]string{"opaque": "x", "whiteout": "y", "redirect": "/file", "origin": "x", "impure": "y", "metacopy": "", "overlay.opaque": "y"}
	for name, value := range attributes {
		dir, s := original(t), harness.NewState(t)
		for _, path := range []string{".", "file", "sub", "sub/deep"} {
			err := unix.Setxattr(filepath.Join(dir, path), "user.overlay."+name, []byte(value), 0)
			if errors.Is(err, unix.EOPNOTSUPP) {
				return // the file system has no user attributes
			}
			check.Must(t, err)
		}
		b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
		r := b.Exec(harness.Options{}, nil, "sh", "-c", "ls . sub; cat file sub/deep; echo new >sub/new; rm -r sub/deep; mkdir made")
		got := string(r.Stdout)
		check.That(t, strings.HasPrefix(got, ".:\nfile\nsub\n\nsub:\ndeep\n") && (strings.HasSuffix(got, "old\ndeep\n") || name == "metacopy" && strings.Contains(string(r.Stderr), "Operation not permitted")),
			"%s: %q, %s", name, got, r.Stderr)
		want := "A made/\nD sub/deep\nA sub/new\n"
		if name == "metacopy" && strings.Contains(string(r.Stderr), "cannot remove") {
			want = "A made/\nA sub/new\n"
		}
		got, _ = text(t, s, 0, "diff", "agent")
		check.That(t, got == want, "%s: diff: %q, want %q", name, got, want)
		text(t, s, 0, "apply", "agent", "--delete")
		holds(t, dir+"/file", "old\n")
		holds(t, dir+"/sub/new", "new\n")
		_, err := os.Stat(dir + "/sub/deep")
		check.That(t, (err == nil) == (want != "A made/\nD sub/deep\nA sub/new\n"), "%s: %v", name, err)
		n, err := unix.Getxattr(dir+"/sub/new", "user.overlay."+name, nil)
		check.That(t, err != nil, "%s: the applied file has the attribute, of %d bytes", name, n)
	}
}
