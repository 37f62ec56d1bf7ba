package tests

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
			check.Must(t, os.Mkdir(dir, 0o755))
			check.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
			r := harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "pwd; cat file; touch new 2>/dev/null && echo writable").Expect(t, 1, "exited")
			got, want := string(r.Stdout), dir+"\ncontent"
			check.That(t, got == want, "%q, want %q", got, want)
			// The same when it is bound by name.
			escaped := strings.NewReplacer(`\`, `\\`, ":", `\:`).Replace(dir)
			harness.Run(t, harness.Options{Dir: "/usr"}, "--ro-bind="+escaped+":/mnt/it", "cat", "/mnt/it/file").Expect(t, 0, "exited").Out(t, "content")
		})
	}
}

// A directory that only its owner can enter is visible. For root it belongs to another user, and
// the sandbox, which runs as a third one, sees it as far as the permissions inside allow.
func TestCurrentDirectoryPrivate(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(harness.Dir(t), "private")
	dir := filepath.Join(parent, "dir")
	check.Must(t, os.Mkdir(parent, 0o700))
	check.Must(t, os.Mkdir(dir, 0o755))
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
	if harness.Root() {
		check.Must(t, os.Chown(parent, 1234, 1234))
		check.Must(t, os.Chown(dir, 1234, 1234))
	}
	harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "pwd; cat file").Expect(t, 0, "exited").Out(t, dir+"\ncontent")
	// Also with binds of the directory and of a file in it, next to a path that everybody can reach.
	r := harness.Run(t, harness.Options{Dir: "/usr"}, "--ro-bind", dir+":/mnt/d", "--ro-bind", dir+"/file:/mnt/f", "cat", "/mnt/d/file", "/mnt/f", "/fixtures/README.md")
	r.Expect(t, 0, "exited")
	check.That(t, strings.HasPrefix(string(r.Stdout), "contentcontent# Fixtures"), "%.100q", r.Stdout)

	// Root's mounts for these binds appear nowhere else, even if mounts are shared between namespaces, as under systemd.
	if harness.Root() {
		const shared = `mount --make-rshared / && before=$(wc -l </proc/self/mountinfo) && "$@"; code=$?
			[ "$(wc -l </proc/self/mountinfo)" = "$before" ] || cat /proc/self/mountinfo; exit $code`
		o := harness.Options{Dir: dir, Wrap: []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", shared, "sh"}}
		harness.Run(t, o, "cat", "file").Expect(t, 0, "exited").Out(t, "content")
	}

	// When the directory itself is closed, the command starts in it or an error names it.
	check.Must(t, os.Chmod(dir, 0o700))
	r = harness.Run(t, harness.Options{Dir: dir}, "sh", "-c", "cat file && echo shown")
	shown := strings.Contains(string(r.Stdout), "shown")
	named := strings.Contains(string(r.Stderr), dir)
	check.That(t, shown != harness.Root() && (!harness.Root() || named), "as root %v: exit code %d, stdout %q, stderr %q", harness.Root(), r.ExitCode, r.Stdout, r.Stderr)
}

// A directory that the caller itself can no longer reach is an error.
func TestCurrentDirectoryClosed(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(harness.Dir(t), "closed")
	dir := filepath.Join(parent, "dir")
	check.Must(t, os.MkdirAll(dir, 0o755))
	r := harness.Run(t, harness.Options{Dir: dir, Wrap: []string{"sh", "-c", `chmod 0 "$PWD/.." && exec "$@"`, "-"}}, "pwd")
	if harness.Root() {
		r.Expect(t, 0, "exited") // nothing is closed to root
		return
	}
	r.Expect(t, 125, "start-failed")
	check.That(t, strings.Contains(string(r.Stderr), "current directory") || strings.Contains(string(r.Stderr), dir), "%s", r.Stderr)
}

// Root's -w in a file system without ID maps (mount_setattr(2)) is refused before anything starts: ramfs and overlay on
// every kernel, tmpfs before Linux 6.3. The hint works: give the directory to the sandbox, or run as its owner.
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

// exchange exchanges two names until stop is called. Each state lasts for a moment.
func exchange(t *testing.T, a, b string) (stop func()) {
	t.Helper()
	stop = harness.Meanwhile(func() {
		time.Sleep(400 * time.Microsecond)
		_ = unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) // the test sees the result
	})
	t.Cleanup(stop)
	return stop
}

// When another process exchanges a directory on the way with a link to the host's root, as bwrap
// sees it, mount points appear only inside the sandbox's own directories (CVE-2026-87766).
func TestMountRace(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"tmpfs":          {"--tmpfs", "P/cache/x"},
		"file":           {"--ro-bind", "/etc/hostname:P/cache/x"},
		"directory":      {"--bind", "S:P/cache/x"},
		"deep":           {"--ro-bind", "S:P/cache/x/y/z"},
		"in another":     {"--bind", "S:P/cache", "--tmpfs", "P/cache/x"},
		"in a read-only": {"--ro-bind", "P:/mnt/ro", "--tmpfs", "/mnt/ro/cache/there"},
		"overlay":        layer(t, "--overlay", "S:P/cache/x"),
		"upper":          {"--overlay", "S:P/cache/x", "--upper", "U"},
		"volume":         {"--volume", "v:P/cache/x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			top := harness.SharedDir(t)
			// Not below /tmp: where root's own paths are bound, bwrap does not see the host's.
			outside, err := os.MkdirTemp("/var/tmp", "sbxrun-test-")
			check.Must(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(outside) })
			project, source := top+"/project", top+"/source"
			for _, dir := range []string{project, project + "/cache", project + "/cache/there", source} {
				check.Must(t, os.Mkdir(dir, 0o755))
			}
			for _, dir := range []string{project, project + "/cache", project + "/cache/there", source, outside} {
				check.Must(t, os.Chmod(dir, 0o777)) // bwrap may run as another user
			}
			check.Must(t, os.Symlink("/oldroot"+outside, project+"/link"))
			state := "SBXRUN_STATE_DIR=" + top + "/state"
			args := []string{"run", "-w"}
			for _, f := range flags {
				if rest, ok := strings.CutPrefix(f, "P"); ok {
					f = project + rest
				}
				f = strings.Replace(strings.Replace(f, "S:", source+":", 1), ":P/", ":"+project+"/", 1)
				if f == "U" {
					f = top + "/upper"
				}
				args = append(args, f)
			}
			args = append(args, "true")
			run := func() *harness.Result {
				return harness.Run(t, harness.Options{Dir: project, Env: []string{state, "SBXRUN_DATA_DIR=" + top + "/data"}}, args...)
			}
			r := run()
			check.Require(t, r.ExitCode == 0, "with nobody in its way: %d, %s", r.ExitCode, r.Stderr)
			stop := exchange(t, project+"/cache", project+"/link")
			failed := 0
			for range max(20, harness.Soak(t)) {
				r := run()
				if r.ExitCode != 0 {
					failed++
				}
				check.That(t, (r.ExitCode == 0 || r.ExitCode == 125) && bytes.Count(r.Stderr, []byte("\n")) <= 2, "exit code %d: %s", r.ExitCode, r.Stderr)
				names, _ := filepath.Glob(outside + "/*")
				check.Require(t, len(names) == 0, "made outside of the sandbox: %q", names)
			}
			t.Logf("%d failed", failed)
			stop()
		})
	}
}

// When another process exchanges the current directory with one that only sbxrun's caller may
// enter, the sandbox shows the directory that was current at sbxrun's start, or does not start.
func TestCurrentDirectoryExchanged(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{
		{"-w"}, {"--cwd", "ro"}, {"--cwd", "overlay"},
		{"--bind", ".:/mnt/x", "--workdir", "/mnt/x"}, {"--ro-bind", ".:/mnt/x", "--workdir", "/mnt/x"}, {"--overlay", ".:/mnt/x", "--workdir", "/mnt/x"},
	} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			t.Parallel()
			top := harness.Dir(t) + "/top"
			mine, secret := top+"/mine", top+"/secret"
			for _, dir := range []string{top, mine, secret} {
				check.Must(t, os.Mkdir(dir, 0o755))
			}
			check.Must(t, os.WriteFile(mine+"/mark", []byte("mine"), 0o644))
			check.Must(t, os.WriteFile(secret+"/mark", []byte("secret"), 0o600))
			check.Must(t, os.Chmod(secret, 0o700))
			if harness.Root() {
				const owner = 12345
				check.Must(t, os.Chown(top, owner, owner))
				check.Must(t, os.Chown(mine, owner, owner))
			}
			dir, err := os.Open(mine)
			check.Must(t, err)
			defer dir.Close()
			stop := exchange(t, mine, secret)
			right := 0
			for range max(30, harness.Soak(t)) {
				// The directory itself, whatever its name is now.
				r := harness.Run(t, harness.Options{Dir: fmt.Sprintf("/proc/self/fd/%d", dir.Fd())}, append(flags, "cat", "mark")...)
				switch {
				case r.ExitCode == 0 && string(r.Stdout) == "mine":
					right++
				case bytes.Contains(append(r.Stdout, r.Stderr...), []byte("secret\n")), r.ExitCode == 0, r.ExitCode != 125:
					t.Errorf("exit code %d, %q: %s", r.ExitCode, r.Stdout, r.Stderr)
				}
			}
			t.Logf("%d showed the directory", right)
			stop()
		})
	}
}

// If the path of the current directory contains symbolic links, the sandbox has them, too.
func TestLinkedWorkdir(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	check.Must(t, errors.Join(os.MkdirAll(filepath.Join(dir, "var/home/me/project"), 0o755), os.Symlink("var/home", filepath.Join(dir, "home")), os.Symlink(dir+"/home/me", filepath.Join(dir, "me"))))
	for _, name := range []string{"home/me/project", "me/project"} {
		at := filepath.Join(dir, name)
		o := harness.Options{Wrap: []string{"sh", "-c", `cd "$0" && exec "$@"`, at}}
		for _, flags := range [][]string{nil, {"--cwd", "ro", "--workdir", at}, layer(t, "--cwd", "overlay")} {
			r := harness.Run(t, o, append(flags, "sh", "-c", `cd "$0" && pwd -P`, at)...).Expect(t, 0, "exited")
			got := strings.TrimSpace(string(r.Stdout))
			check.That(t, got == dir+"/var/home/me/project", "%s, %q: %s%s", name, flags, got, r.Stderr)
		}
	}
}

// If /home is a symbolic link, $PWD in it leads to the current directory in the sandbox, too, although the sandbox has
// its own /home.
func TestLinkedHome(t *testing.T) {
	t.Parallel()
	dir, tree := harness.SharedDir(t), rootTree(t)
	for _, name := range []string{"me/project", "sandbox/project"} {
		check.Must(t, errors.Join(os.MkdirAll(filepath.Join(dir, name), 0o755), os.WriteFile(filepath.Join(dir, name, "file"), []byte("text\n"), 0o644)))
	}
	check.Must(t, errors.Join(os.Symlink("/home/me/project", filepath.Join(dir, "me/link")), os.Mkdir(filepath.Join(tree, "usr"), 0o755)))
	for _, link := range []string{"/var/home", "var/home", "usr/../var/home"} {
		for at, real := range map[string]string{"/home/me/project": "/var/home/me/project", "/home/sandbox/project": "/var/home/sandbox/project", "/home/me/link": "/var/home/me/project"} {
			o := bareHost(t, "--dir", "/tmp", "--bind", dir, "/var/home", "--ro-bind", tree, "/tree", "--symlink", link, "/home")
			o.Wrap = append(o.Wrap, "sh", "-c", `cd "$0" && shift && exec /sbxrun "$@"`, at)
			for _, flags := range [][]string{nil, {"--cwd", "ro", "--workdir", at}, {"--rootfs", "/tree", "--cwd", "ro", "--workdir", at}} {
				r := harness.Start(t, o, append(flags, "sh", "-c", `cat "$0/file" && pwd -P && ls "$HOME"`, at)...).Wait()
				want := "text\n" + real + "\n"
				if at == "/home/sandbox/project" {
					want += "project\n" // in the sandbox's own home
				}
				check.That(t, r.ExitCode == 0 && string(r.Stdout) == want, "%s, %s, %q: exit code %d, %s%s", link, at, flags, r.ExitCode, r.Stdout, r.Stderr)
			}
		}
	}
}
