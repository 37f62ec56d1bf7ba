package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The current directory is visible at its own path, whatever its name, and read-only.
func TestCurrentDirectoryNames(t *testing.T) {
	t.Parallel()
	for name, dir := range map[string]string{
		"space":     "with two  spaces ",
		"newline":   "line\nbreak\n",
		"quotes":    `single' double" back\slash $(x) ;`,
		"dash":      "-rf",
		"dashes":    "--bind",
		"colon":     "a:b:c",
		"non-UTF-8": "caf\xe9\xff",
		"glob":      "*[a]?",
		"long":      strings.Repeat("n", 255),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(harness.Dir(t), dir)
			harness.Must(t, os.Mkdir(dir, 0o755))
			harness.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
			r := harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "pwd; cat file; touch new 2>/dev/null && echo writable")
			r.Expect(t, 1, "exited")
			got, want := string(r.Stdout), dir+"\ncontent"
			check.That(t, got == want, "%q, want %q", got, want)
			// The same when it is bound by name.
			escaped := strings.NewReplacer(`\`, `\\`, ":", `\:`).Replace(dir)
			harness.Run(t, harness.Options{Dir: "/usr"}, "--ro-bind="+escaped+":/mnt/it", "cat", "/mnt/it/file").Expect(t, 0, "exited").Out(t, "content")
		})
	}
}

// A removed current directory is an error.
func TestCurrentDirectoryDeleted(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(harness.Dir(t), "gone")
	harness.Must(t, os.Mkdir(dir, 0o755))
	deleted := []string{"sh", "-c", `rmdir "$PWD" && exec "$@"`, "-"}
	r := harness.Run(t, harness.Options{Dir: dir, Wrap: deleted}, "true")
	r.Expect(t, 125, "start-failed")
	check.That(t, r.Report.Error.Code == "workdir" && strings.Contains(string(r.Stderr), "current directory") && strings.Contains(string(r.Stderr), "--cwd none"), "%s", r.Stderr)
	harness.Must(t, os.Mkdir(dir, 0o755))
	r = harness.Run(t, harness.Options{Dir: dir, Wrap: deleted}, "--workdir", "/tmp", "pwd")
	r.Expect(t, 0, "exited")
}

// A directory that only its owner can enter is visible. For root it belongs to another user, and
// the sandbox, which runs as a third one, sees it as far as the permissions inside allow.
func TestCurrentDirectoryPrivate(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(harness.Dir(t), "private")
	dir := filepath.Join(parent, "dir")
	harness.Must(t, os.Mkdir(parent, 0o700))
	harness.Must(t, os.Mkdir(dir, 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
	if harness.Root() {
		harness.Must(t, os.Chown(parent, 1234, 1234))
		harness.Must(t, os.Chown(dir, 1234, 1234))
	}
	r := harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "pwd; cat file")
	r.Expect(t, 0, "exited")
	check.Equal(t, string(r.Stdout), dir+"\ncontent")
	// Also with binds of the directory and of a file in it, next to a path that everybody can reach.
	r = harness.Run(t, harness.Options{Dir: "/usr"}, "--ro-bind", dir+":/mnt/d", "--ro-bind", dir+"/file:/mnt/f", "cat", "/mnt/d/file", "/mnt/f", "/fixtures/README.md")
	r.Expect(t, 0, "exited")
	check.That(t, strings.HasPrefix(string(r.Stdout), "contentcontent# Fixtures"), "%.100q", r.Stdout)

	// Root's mounts for these binds appear nowhere else, even if mounts are shared between namespaces, as under systemd.
	if harness.Root() {
		const shared = `mount --make-rshared / && before=$(wc -l </proc/self/mountinfo) && "$@"; code=$?
			[ "$(wc -l </proc/self/mountinfo)" = "$before" ] || cat /proc/self/mountinfo; exit $code`
		o := harness.Options{Dir: dir, Wrap: []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", shared, "sh"}}
		r = harness.Run(t, o, "cat", "file")
		r.Expect(t, 0, "exited")
		check.That(t, string(r.Stdout) == "content", "%.2000q", r.Stdout)
	}

	// When the directory itself is closed, the command starts in it or an error names it.
	harness.Must(t, os.Chmod(dir, 0o700))
	r = harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "cat file && echo shown")
	shown := strings.Contains(string(r.Stdout), "shown")
	if named := strings.Contains(string(r.Stderr), dir); shown == harness.Root() || harness.Root() && !named {
		t.Errorf("as root %v: exit code %d, stdout %q, stderr %q", harness.Root(), r.ExitCode, r.Stdout, r.Stderr)
	}
}

// A directory that the caller itself can no longer reach is an error.
func TestCurrentDirectoryClosed(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(harness.Dir(t), "closed")
	dir := filepath.Join(parent, "dir")
	harness.Must(t, os.MkdirAll(dir, 0o755))
	r := harness.Run(t, harness.Options{Dir: dir, Wrap: []string{"sh", "-c", `chmod 0 "$PWD/.." && exec "$@"`, "-"}}, "pwd")
	if harness.Root() {
		r.Expect(t, 0, "exited") // nothing is closed to root
		return
	}
	r.Expect(t, 125, "start-failed")
	check.That(t, strings.Contains(string(r.Stderr), "current directory") || strings.Contains(string(r.Stderr), dir), "%s", r.Stderr)
}

// Root's -w in a file system without ID maps (mount_setattr(2)) is refused before anything starts:
// ramfs and overlay on every kernel, tmpfs before Linux 6.3. The hint works: give the directory to
// the sandbox, or run as its owner.
func TestIdmapRefused(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // an ordinary user owns the sandbox already, and nothing is mapped
	}
	for _, fs := range []struct{ name, mount, named string }{
		{"ramfs", `mount -t ramfs none "$PWD"`, "cannot be idmapped;"},
		{"overlay", `mkdir -p top && mount -t tmpfs none top && mkdir top/upper top/work && mount -t overlay -o lowerdir=/usr,upperdir=top/upper,workdir=top/work none "$PWD"`, "cannot be idmapped (overlay);"},
		{"tmpfs", `mount -t tmpfs none "$PWD"`, "cannot be idmapped (tmpfs, which can from Linux 6.3 on);"},
	} {
		t.Run(fs.name, func(t *testing.T) {
			t.Parallel()
			dir := harness.Dir(t)
			// In a mount namespace, which ends with the command. The directory belongs to owner.
			write := func(owner string, args ...string) *harness.Result {
				t.Helper()
				script := fs.mount + ` && cd "$PWD" && mkdir it && cd it || exit 99; chown ` + owner + ` . && "$@"; code=$?; stat -c %u:%g made 2>/dev/null; exit $code`
				wrap := []string{"unshare", "--mount", "sh", "-c", script, "-"}
				return harness.Start(t, harness.Options{Bare: true, Dir: dir, Wrap: wrap}, append(args, "-w", "touch", "made")...).Wait()
			}
			r := write("0:0")
			if fs.name == "tmpfs" && r.ExitCode == 0 {
				check.That(t, strings.HasPrefix(string(r.Stdout), "0:0\n"), "idmapped, and the file is %s", r.Stdout)
				return
			}
			place := filepath.Join(dir, "it")
			for _, want := range []string{"sbxrun: error: cannot let the sandbox, which runs as uid 65534, write to \"" + place + "\" as its owner: ", fs.named, "chown 65534:65534 " + place + ";"} {
				check.That(t, r.ExitCode == 125 && strings.Contains(string(r.Stderr), want) && len(r.Stdout) == 0,
					"exit code %d, stdout %q, stderr %q; want %q", r.ExitCode, r.Stdout, r.Stderr, want)
			}
			if r := write("1234:1235"); r.ExitCode != 125 || !strings.HasSuffix(string(r.Stderr), "; --user 1234:1235 runs the sandbox as the owner\n") {
				t.Errorf("another owner: exit code %d, stderr %q", r.ExitCode, r.Stderr)
			}
			write("1234:1235", "--user", "1234:1235").Exits(t, 0).Out(t, "1234:1235\n")
			write("65534:65534").Exits(t, 0).Out(t, "65534:65534\n")
		})
	}
}
