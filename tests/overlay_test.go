package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

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

// changes modifies a directory in all ways: changed files, a replaced directory, a removed file.
const changes = `echo new >file; rm -r sub; mkdir sub; echo x >sub/other; mkdir made; ln -s file link; cat file sub/other; ls`

const changed = "new\nx\nfile\nlink\nmade\nsub\n"

func TestOverlay(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string]func(dir string) []string{
		"cwd":   func(string) []string { return layer(t, "--cwd", "overlay") },
		"there": func(dir string) []string { return layer(t, "--overlay", dir) },
		"elsewhere": func(dir string) []string {
			return layer(t, "--overlay", dir+":/work", "--workdir", "/work")
		},
		"disk": func(dir string) []string {
			return []string{"--cwd", "overlay", "--upper", filepath.Join(filepath.Dir(dir), "upper")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := original(t)
			r := harness.Run(t, harness.Options{Dir: dir}, append(flags(dir), "sh", "-ec", changes+"; ls -A / | grep layers || true")...).Expect(t, 0, "exited")
			check.Equal(t, string(r.Stdout), changed)
			wantOriginal(t, dir)
		})
	}
}

// A layer on disk can be used again for the same directory, and for no other.
func TestOverlayUpper(t *testing.T) {
	t.Parallel()
	dir := original(t)
	upper := filepath.Join(filepath.Dir(dir), "upper")
	flags := []string{"--cwd", "overlay", "--upper", upper}
	harness.Run(t, harness.Options{Dir: dir}, append(flags, "sh", "-c", changes)...).Expect(t, 0, "exited")
	harness.Run(t, harness.Options{Dir: dir}, append(flags, "sh", "-c", "cat file sub/other; ls")...).Expect(t, 0, "exited").Out(t, changed)
	for _, tt := range []struct {
		dir, upper, want string
	}{
		{filepath.Join(dir, "sub"), upper, "belongs to " + dir},
		{dir, filepath.Join(dir, "sub"), "must lie elsewhere"},
		{dir, filepath.Dir(dir), "must lie elsewhere"},
		{dir, "/usr", "--upper"},
		{dir, filepath.Join(upper, "none", "own"), fmt.Sprintf("no such file or directory; make %q first", filepath.Join(upper, "none"))},
	} {
		harness.Run(t, harness.Options{Dir: tt.dir}, "--cwd", "overlay", "--upper", tt.upper, "true").Expect(t, 125, "start-failed").ErrHas(t, tt.want)
	}
	// A start that was killed while it wrote the record has no layers yet.
	cut := filepath.Join(filepath.Dir(dir), "cut")
	check.Must(t, os.Mkdir(cut, 0o700))
	record := filepath.Join(cut, "overlays.json")
	check.Must(t, os.WriteFile(record, []byte(`[{"source":`), 0o600))
	again := []string{"--cwd", "overlay", "--upper", cut, "true"}
	harness.Run(t, harness.Options{Dir: dir}, again...).Expect(t, 0, "exited")
	harness.Run(t, harness.Options{Dir: dir}, again...).Expect(t, 0, "exited")
	check.Must(t, os.WriteFile(record, []byte("["), 0o600))
	harness.Run(t, harness.Options{Dir: dir}, again...).Expect(t, 125, "start-failed").ErrHas(t, "overlays.json in it is damaged")
	wantOriginal(t, dir)
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

// overlaid starts a sandbox with an overlay over dir, and makes the changes there.
func overlaid(t *testing.T, s *harness.State, dir, name string, flags ...string) *harness.Sandbox {
	t.Helper()
	if len(flags) == 0 {
		flags = layer(t)
	}
	b := s.Sandbox(harness.Options{Dir: dir}, append([]string{"--name", name, "--cwd", "overlay"}, flags...)...)
	b.Exec(harness.Options{}, nil, "sh", "-ec", changes).Expect(t, 0, "exited")
	return b
}

// text returns the output of a command of sbxrun, which must exit with code.
func text(t *testing.T, s *harness.State, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	r := s.Run(args...).Exits(t, code)
	return string(r.Stdout), string(r.Stderr)
}

// diff shows a running sandbox's changes, and apply makes them on the host.
func TestOverlayApply(t *testing.T) {
	t.Parallel()
	dir, s := original(t), harness.NewState(t)
	overlaid(t, s, dir, "agent")
	want := "M file\nA link -> file\nA made/\nD sub/deep\nA sub/other\n"
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, got == want, "diff: %q, want %q", got, want)
	got, _ = text(t, s, 0, "diff", "agent", "--stat")
	check.That(t, strings.HasSuffix(got, ": 3 added, 1 changed, 1 deleted, 0 with another mode; 6 bytes\n"), "diff --stat: %q", got)
	got, _ = text(t, s, 0, "diff", "-p", "agent", filepath.Join(dir, "file"))
	check.That(t, strings.HasSuffix(got, "@@ -1,1 +1,1 @@\n-old\n+new\n"), "diff -p: %q", got)
	text(t, s, 0, "apply", "agent", "--check")
	wantOriginal(t, dir)
	_, stderr := text(t, s, 0, "apply", "agent")
	check.That(t, strings.HasPrefix(stderr, "D sub/deep\n"), "the deletion is not shown: %q", stderr)
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "D sub/deep\n", "after an apply without --delete: %q", got)
	text(t, s, 0, "apply", "agent", "--delete")
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "", "after the apply: %q", got)
	names, _ := filepath.Glob(dir + "/*/*")
	check.That(t, len(names) == 1 && names[0] == filepath.Join(dir, "sub/other"), "applied: %q", names)
	text(t, s, 0, "kill", "--grace", "0", "agent")
	if len(layer(t)) > 0 {
		return // a layer on disk still exists
	}
	_, stderr = text(t, s, 125, "diff", "agent")
	check.That(t, strings.Contains(stderr, "--upper DIR"), "a layer that is gone: %s", stderr)
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

// run --apply makes the changes if the command succeeds, and the report counts them.
func TestOverlayRun(t *testing.T) {
	t.Parallel()
	dir := original(t)
	flags := []string{"--cwd", "overlay", "--diff", "--apply-delete", "sh", "-ec"}
	r := harness.Run(t, harness.Options{Dir: dir}, layer(t, append(flags, changes+"; exit 3")...)...).Expect(t, 3, "exited")
	got := string(r.Stderr)
	check.That(t, strings.HasPrefix(got, "M file\nA link -> file\n"), "--diff: %q", got)
	count, bytes := r.Report.Value("changes.count"), r.Report.Value("changes.bytes")
	check.That(t, count == "5" && bytes == "6", "the report counts %s changes and %s bytes", count, bytes)
	wantOriginal(t, dir)
	harness.Run(t, harness.Options{Dir: dir}, layer(t, append(flags, changes)...)...).Expect(t, 0, "exited")
	names, _ := filepath.Glob(dir + "/*/*")
	check.That(t, len(names) == 1, "applied: %q", names)
	// The original changes late enough for the kernel's coarse clock.
	dir = original(t)
	r = harness.Run(t, harness.Options{Dir: dir}, layer(t, "--bind", dir+":/host", "--cwd", "overlay", "--apply", "sh", "-ec", "echo new >file; sleep 0.1; echo theirs >/host/file")...)
	r.Expect(t, 74, "exited")
	check.That(t, r.Report.Value("error.code") != "" && strings.Contains(string(r.Stderr), "has changed on the host"), "the original has changed: %s", r.Stderr)
	now, _ := os.ReadFile(filepath.Join(dir, "file"))
	check.That(t, string(now) == "theirs\n", "replaced by %q", now)
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
	if got, _ := text(t, s, 0, "diff", "box", "gone"); got != "D gone\n" {
		t.Errorf("after --check: %q", got)
	}
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
func kernel(t *testing.T, wantMajor, wantMinor int) bool {
	var uts unix.Utsname
	check.Must(t, unix.Uname(&uts))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(uts.Release[:]), "%d.%d", &major, &minor)
	check.Must(t, err)
	return major > wantMajor || major == wantMajor && minor >= wantMinor
}

// layer adds flags for a layer that every kernel supports: a new one on disk where memory does not work.
func layer(t *testing.T, flags ...string) []string {
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

// From Linux 6.6 on, a directory in memory can have a layer. Before, it lacks the attributes that
// overlayfs needs (tmpfs(5)), and the overlay is refused with a hint.
func TestLayerInMemory(t *testing.T) {
	t.Parallel()
	dir := original(t)
	r := harness.Run(t, harness.Options{Dir: dir}, "--cwd", "overlay", "sh", "-c", "echo new >file")
	if kernel(t, 6, 6) {
		r.Expect(t, 0, "exited")
		r = harness.Run(t, harness.Options{Dir: dir}, "--cwd", "overlay", "--tmp-size", "1M", "sh", "-c", "head -c 900K /dev/zero >small && head -c 200K /dev/zero >large")
		r.Expect(t, 1, "exited")
		check.That(t, strings.Contains(string(r.Stderr), "No space left on device"), "more than --tmp-size: %s", r.Stderr)
	} else {
		r.Expect(t, 125, "start-failed")
		want := "extended attributes, which directories in memory have from Linux 6.6 on; --upper DIR keeps the layer on disk"
		if os.Getuid() == 0 && !kernel(t, 6, 3) && strings.Contains(string(r.Stderr), "idmapped") { // the original is in memory as well
			want = "tmpfs, which can from Linux 6.3 on"
		}
		check.That(t, strings.Contains(string(r.Stderr), want), "stderr %q", r.Stderr)
	}
	wantOriginal(t, dir)
}

// When a command has made files unreadable for its own user, apply makes the other changes, and its exit code reports
// the failure. Root reads everything.
func TestApplyUnread(t *testing.T) {
	t.Parallel()
	dir := original(t)
	const closes = `mkdir closed; echo x >closed/file; echo y >unread; chmod 0 closed unread file; echo z >z`
	r := harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c", closes)...)
	holds(t, filepath.Join(dir, "z"), "z\n")
	if os.Geteuid() == 0 {
		r.Expect(t, 0, "exited")
		holds(t, filepath.Join(dir, "closed/file"), "x\n")
		holds(t, filepath.Join(dir, "unread"), "y\n")
		return
	}
	r.Expect(t, 74, "exited")
	check.That(t, r.Report.Error != nil && r.Report.Error.Code == "left-out" && strings.Contains(string(r.Stderr), `cannot read "closed"`), "%v; %s", r.Report.Error, r.Stderr)
	holds(t, filepath.Join(dir, "file"), "old\n")
	s := harness.NewState(t)
	box := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "box", "--cwd", "overlay")...)
	execOut(t, box, "echo new >other; mkdir closed; chmod 0 closed")
	for _, c := range []struct {
		want int
		args []string
	}{{125, []string{"diff", "box"}}, {125, []string{"diff", "box", "--json"}}, {0, []string{"diff", "box", "other"}}, {0, []string{"apply", "box", "other"}}, {125, []string{"apply", "box", "closed/file"}}, {125, []string{"apply", "--json", "box", "closed/file"}}} {
		r := s.Run(c.args...)
		check.That(t, r.ExitCode == c.want && (len(r.Stdout) != 0 || c.args[0] != "diff" && c.args[1] != "--json"), "%v: %d, want %d; %q, %s", c.args, r.ExitCode, c.want, r.Stdout, r.Stderr)
	}
	holds(t, filepath.Join(dir, "other"), "new\n")
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

// project makes a git repository with a commit, and a sandbox with an overlay of it.
func project(t *testing.T, s *harness.State) (dir string, b *harness.Sandbox) {
	t.Helper()
	dir = repository(t)
	for _, name := range []string{"file", "other", "staged"} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("old\n"), 0o644))
	}
	git(t, dir, "branch", "-M", "main")
	git(t, dir, "add", ".")
	git(t, dir, "commit", "-qm", "files")
	return dir, s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
}

const commit = `export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' GIT_AUTHOR_NAME=x GIT_AUTHOR_EMAIL=x GIT_COMMITTER_NAME=x GIT_COMMITTER_EMAIL=x
`

// diff summarises git's own data unless it is named, apply lists what it applied, and git status on the
// host, which writes the index, is no conflict.
func TestDiffApplyGit(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`echo new >file; git add file; git commit -qm second; echo x >.git/hooks/pre-commit`)
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, strings.HasPrefix(got, "A .git/hooks/pre-commit (held back)\nM file\nM .git/ (") && strings.HasSuffix(got, " changes of git's data)\n") && strings.Count(got, "\n") == 3,
		"diff: %q", got)
	got, _ = text(t, s, 0, "diff", "agent", ".git/refs")
	check.That(t, got == "M .git/refs/heads/main\n", "diff .git/refs: %q", got)
	got, _ = text(t, s, 0, "diff", "agent", "--json")
	check.That(t, strings.Contains(got, `"path":".git/index"`), "diff --json: %s", got)
	patch, note := text(t, s, 0, "diff", "agent", "-p")
	check.That(t, strings.HasPrefix(patch, "# held back: programs on the host execute or trust this file\ndiff --git a/.git/hooks/pre-commit") && !strings.Contains(patch, ".git/index") && strings.Contains(note, "changes of git's data in .git; name it to see them"),
		"diff -p: %s%s", patch, note)

	// The status of a file on the host changes, so git status writes the index.
	before := harness.ReadFile(t, filepath.Join(dir, ".git/index"))
	check.Must(t, os.Chtimes(filepath.Join(dir, "other"), time.Unix(1, 0), time.Unix(1, 0)))
	git(t, dir, "status")
	now, _ := os.ReadFile(filepath.Join(dir, ".git/index"))
	check.Require(t, string(now) != string(before), "git status did not write the index")
	stdout, _ := text(t, s, 1, "apply", "agent", "--delete")
	check.That(t, strings.HasPrefix(stdout, "M file\nM .git/ ("), "apply: %q", stdout)
	got = git(t, dir, "status", "--porcelain") + git(t, dir, "log", "--format=%s")
	check.That(t, got == "second\nfiles\nfirst\n", "after the apply: %q", got)
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "A .git/hooks/pre-commit (held back)\n", "after the apply: %q", got)
}

// Commits can be fetched from the sandbox as a bundle, as docs/concepts/files.md shows.
func TestFetchBundle(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`echo new >file; git commit -qam second; git bundle create -q /tmp/work.bundle HEAD`)
	text(t, s, 0, "cp", "agent:/tmp/work.bundle", dir)
	git(t, dir, "fetch", "-q", "./work.bundle", "HEAD")
	check.Equal(t, git(t, dir, "log", "--format=%s", "..FETCH_HEAD"), "second\n", "fetched")
}

// A file that was staged on the host is a conflict, and git status in the sandbox is no change.
func TestApplyGitIndexConflict(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`touch -d 2001-01-01 other; git status >&2`)
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, got == "", "after git status in the sandbox: %q", got)
	execOut(t, b, commit+`echo new >file; git add file`)
	check.Must(t, os.WriteFile(filepath.Join(dir, "staged"), []byte("changed\n"), 0o644))
	git(t, dir, "add", "staged")
	_, stderr := text(t, s, 1, "apply", "agent")
	check.That(t, strings.Contains(stderr, `".git/index" has changed on the host`), "apply: %s", stderr)
	stdout, _ := text(t, s, 0, "apply", "agent", "--exclude", ".git")
	check.That(t, stdout == "M file\n", "apply --exclude .git: %q", stdout)
}

// --exclude leaves out names at any depth and paths, with everything below them.
func TestDiffExclude(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), original(t)
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
	execOut(t, b, `mkdir -p sub/vendor/x build; echo >sub/vendor/x/f; echo >build/a.o; echo >build/b.c; echo >sub/c.pyc; echo >keep; rm sub/deep`)
	for args, want := range map[string]string{
		"":               "A build/\nA build/a.o\nA build/b.c\nA keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\nA sub/vendor/x/\nA sub/vendor/x/f\n",
		"vendor *.pyc":   "A build/\nA build/a.o\nA build/b.c\nA keep\nD sub/deep\n",
		"build/*.o sub/": "A build/\nA build/b.c\nA keep\n",
		"x /nowhere":     "A build/\nA build/a.o\nA build/b.c\nA keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\n",
		dir + "/build":   "A keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\nA sub/vendor/x/\nA sub/vendor/x/f\n",
	} {
		flags := []string{"diff", "agent"}
		for _, p := range strings.Fields(args) {
			flags = append(flags, "--exclude", p)
		}
		got, _ := text(t, s, 0, flags...)
		check.That(t, got == want, "--exclude %s: %q, want %q", args, got, want)
	}
	_, stderr := text(t, s, 125, "diff", "agent", "--exclude", "[x")
	check.That(t, strings.Contains(stderr, "--exclude"), "a bad pattern: %s", stderr)
	stdout, _ := text(t, s, 0, "apply", "agent", "--exclude", "sub", "--exclude", "build")
	check.That(t, stdout == "A keep\n", "apply: %q", stdout)
}

// apply holds back files that programs on the host execute unless they are named, and diff marks them.
func TestApplyHeldBack(t *testing.T) {
	t.Parallel()
	dir, s := original(t), harness.NewState(t)
	check.Must(t, os.MkdirAll(filepath.Join(dir, ".git/hooks"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(dir, ".git/config"), []byte("[core]\n"), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(dir, "script"), []byte("#!/bin/sh\n"), 0o755))
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
	execOut(t, b, `mkdir -p .vscode .claude .GIT/hooks nested evil/objects evil/refs
for f in .git/hooks/pre-commit .GIT/hooks/x .vscode/tasks.json .claude/settings.json .mcp.json .envrc package.json sub/package.json conftest.py; do echo x >$f; done
printf '[core]\nfsmonitor = /tmp/evil\n' >.git/config; cp .git/config evil/config; echo 'gitdir: ../evil' >nested/.git; echo 'ref: refs/heads/x' >evil/HEAD
chmod +x .git/hooks/pre-commit; echo '#!/bin/sh' >tool; echo data >.git/index; echo new >file; echo '#!/bin/sh -e' >script; echo >plain; chmod 755 plain
ln -s /etc/passwd out; ln -s ../../x up; ln -s sub/../../y up2; ln -s ../file sub/in`)
	marked := `A .GIT/
A .GIT/hooks/ (held back)
A .GIT/hooks/x (held back)
A .claude/ (held back)
A .claude/settings.json (held back)
A .envrc (held back)
M .git/config (held back)
A .git/hooks/pre-commit (executable) (held back)
A .mcp.json (held back)
A .vscode/ (held back)
A .vscode/tasks.json (held back)
A conftest.py (held back)
A evil/
A evil/HEAD (held back)
A evil/config
A evil/objects/
A evil/refs/
M file
A nested/
A nested/.git (held back)
A out -> /etc/passwd (leads outside)
A package.json (held back)
A plain (executable)
M script
A sub/in -> ../file
A sub/package.json (held back)
A tool (executable)
A up -> ../../x (leads outside)
A up2 -> sub/../../y (leads outside)
M .git/ (1 change of git's data)
`
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, got == marked, "diff: %s", cmp.Diff(marked, got))
	got, _ = text(t, s, 0, "diff", "--json", "agent", ".git/hooks", "tool", "out")
	check.That(t, strings.Count(got, `"executable":true`) == 2 && strings.Count(got, `"outside":true`) == 1 && !strings.Contains(got, "held_back"), "diff --json: %s", got)
	const held = "A .GIT/hooks/ (held back)\nA .claude/ (held back)\nA .envrc (held back)\nM .git/config (held back)\nA .git/hooks/pre-commit (held back)\nA .mcp.json (held back)\nA .vscode/ (held back)\n" +
		"A conftest.py (held back)\nA evil/HEAD (held back)\nA nested/.git (held back)\nA package.json (held back)\nA sub/package.json (held back)\n" +
		"sbxrun: error: 12 paths, such as \".GIT/hooks\", are held back because programs on the host execute or trust them; see sbxrun diff -p; --all applies them, and naming a path applies that one\n"
	_, stderr := text(t, s, 1, "apply", "agent", "--check")
	check.That(t, strings.HasSuffix(stderr, held), "apply --check: %s", stderr)
	_, stderr = text(t, s, 1, "apply", "agent")
	check.That(t, stderr == held, "apply: %s", cmp.Diff(held, stderr))
	holds(t, dir+"/file", "new\n")
	holds(t, dir+"/.git/index", "data\n")
	holds(t, dir+"/.git/config", "[core]\n")
	for _, name := range []string{".vscode", "package.json", ".git/hooks/pre-commit", "sub/package.json", ".GIT/hooks", "nested/.git", "evil/HEAD"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		check.That(t, err != nil, "%s was applied", name)
	}
	// Naming a directory releases its other files, but not those that are held back.
	text(t, s, 1, "apply", "agent", "sub")
	stdout, _ := text(t, s, 1, "apply", "agent", "sub", "--json")
	want := `{"changes":0,"left":0,"held_back":["sub/package.json"],"error":{"code":"held-back",`
	check.That(t, strings.HasPrefix(stdout, want), "apply --json: %s", stdout)
	text(t, s, 0, "apply", "agent", "package.json", ".vscode", filepath.Join(dir, ".git/hooks"))
	holds(t, dir+"/.vscode/tasks.json", "x\n")
	holds(t, dir+"/package.json", "x\n")
	holds(t, dir+"/.git/hooks/pre-commit", "x\n")
	text(t, s, 0, "apply", "agent", "--all")
	holds(t, dir+"/.envrc", "x\n")
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "", "after --all: %s", got)
}

// run --apply holds back the same files and then turns exit code 0 into another; --apply-all does not. They include all
// links in git's directory, because git on the host writes to their targets, and files of an overlay whose directory
// itself is a repository or a trusted directory.
func TestRunApplyHeldBack(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		dir, prepare, script string
		held, applied        []string
	}{
		{".", "", "mkdir -p .git/hooks; echo x >.git/hooks/pre-commit; echo new >file; rm sub/deep", []string{".git/hooks"}, []string{"sub/deep"}},
		{".", "mkdir -p .git/logs; touch .git/logs/HEAD", "ln -sf ../../file .git/logs/HEAD; ln -s ../file .git/FETCH_HEAD; ln -s ../.. .git/objects; ln -s file link; echo data >.git/index",
			[]string{".git/FETCH_HEAD", ".git/objects"}, []string{"link", ".git/index"}},
		{"bare", "mkdir objects refs; echo 'ref: refs/heads/x' >HEAD", "mkdir hooks; echo x >hooks/post-update; echo data >index", []string{"hooks"}, []string{"index"}},
		{"p/.git/hooks", "", "echo x >pre-commit", []string{"pre-commit"}, nil},
		{"p/.vscode", "", "echo x >tasks.json", []string{"tasks.json"}, nil},
	} {
		dir := filepath.Join(original(t), tt.dir)
		check.Must(t, os.MkdirAll(dir, 0o755))
		prepare := exec.Command("sh", "-ec", tt.prepare)
		prepare.Dir = dir
		runHere(t, prepare)
		there := func(name string) bool {
			_, err := os.Lstat(filepath.Join(dir, name))
			return err == nil
		}
		r := harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c", tt.script)...).Expect(t, 74, "exited").ErrHas(t, "--apply-all applies ")
		check.Equal(t, r.Report.Value("error.code"), "held-back")
		for _, name := range tt.held {
			check.That(t, !there(name), "%s: %s was applied", tt.dir, name)
		}
		for _, name := range tt.applied {
			check.That(t, there(name), "%s: %s was not applied", tt.dir, name)
		}
		if strings.Contains(tt.prepare, "logs") {
			holds(t, dir+"/.git/logs/HEAD", "")
		}
		harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply-all", "sh", "-c", tt.script)...).Expect(t, 0, "exited")
		for _, name := range tt.held {
			check.That(t, there(name), "%s: %s was not applied by --apply-all", tt.dir, name)
		}
	}
}
