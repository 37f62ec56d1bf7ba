package tests

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// If /home is a symbolic link, $PWD in it leads to the current directory in the sandbox, too, although the sandbox has a
// /home of its own.
func TestLinkedHome(t *testing.T) {
	t.Parallel()
	dir, tree := harness.SharedDir(t), rootTree(t)
	for _, name := range []string{"me/project", "sandbox/project"} {
		check.Must(t, errors.Join(os.MkdirAll(filepath.Join(dir, name), 0o755), os.WriteFile(filepath.Join(dir, name, "file"), []byte("text\n"), 0o644)))
	}
	check.Must(t, errors.Join(os.Symlink("/home/me/project", filepath.Join(dir, "me/link")), os.Mkdir(filepath.Join(tree, "usr"), 0o755)))
	for _, link := range []string{"/var/home", "var/home", "usr/../var/home"} {
		for at, real := range map[string]string{"/home/me/project": "/var/home/me/project", "/home/sandbox/project": "/var/home/sandbox/project", "/home/me/link": "/var/home/me/project"} {
			wrap := []string{"bwrap", "--dev-bind", "/dev", "/dev", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
				"--bind", "/proc", "/proc", "--ro-bind", harness.Binary(t), "/sbxrun", "--dir", "/run", "--dir", "/tmp", "--bind", dir, "/var/home", "--ro-bind", tree, "/tree", "--symlink", link, "/home", "--unshare-user",
				"sh", "-c", `cd "$0" && shift && exec /sbxrun "$@"`, at}
			for _, flags := range [][]string{nil, {"--cwd", "ro", "--workdir", at}, {"--rootfs", "/tree", "--cwd", "ro", "--workdir", at}} {
				o := harness.Options{Bare: true, Dir: "/usr", Wrap: wrap}
				if harness.Root() {
					o.Attr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 61000, Gid: 61000}}
				}
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
