package tests

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// cdiSpec creates a directory with a CDI specification of v.com/thing=all, and returns the variable that names it.
func cdiSpec(t *testing.T, edits string) (variable string) {
	t.Helper()
	dir := harness.Dir(t)
	text := "cdiVersion: 0.5.0\nkind: v.com/thing\ndevices:\n- name: all\n  containerEdits:" + strings.ReplaceAll(edits, "\n", "\n    ") + "\n"
	check.Must(t, os.WriteFile(dir+"/thing.yaml", []byte(text), 0o644))
	return "SBXRUN_CDI_DIRS=" + dir
}

// node creates a node of the zero device. It returns false if this user or machine cannot.
func node(t *testing.T, name string, gid int, mode uint32) bool {
	t.Helper()
	const zero = 1<<8 | 5
	err := unix.Mknod(name, unix.S_IFCHR|0o600, zero)
	if errors.Is(err, unix.EPERM) {
		return false
	}
	check.Must(t, err)
	check.Must(t, os.Chown(name, 0, gid))
	check.Must(t, unix.Chmod(name, mode))
	return true
}

// The files, links and libraries of a CDI device are shown in a root directory, without covering its links. With the
// host's root they are there already.
func TestDevicesFiles(t *testing.T) {
	t.Parallel()
	library := libraryOf(t, "sh")
	dir := harness.Dir(t)
	check.Must(t, os.WriteFile(dir+"/conf", []byte("conf\n"), 0o644))
	copyFile(t, library, dir+"/libthing.so.9.9")
	tree := rootTree(t)
	check.Must(t, os.Mkdir(tree+"/opt/lib", 0o755))
	check.Must(t, os.Symlink("opt/lib", tree+"/linked"))
	spec := cdiSpec(t, fmt.Sprintf(`
deviceNodes:
- path: /dev/zero
mounts:
- hostPath: %[1]s/libthing.so.9.9
  containerPath: /linked/libthing.so.9.9
  options: [rw]
- hostPath: %[1]s/conf
  containerPath: /etc/thing/conf
- hostPath: %[2]s
  containerPath: %[2]s
hooks:
- hookName: createContainer
  path: /usr/bin/nvidia-cdi-hook
  args: [nvidia-cdi-hook, update-ldcache, --folder, /linked, --folder, /usr/lib]
- hookName: createContainer
  path: /usr/bin/nvidia-cdi-hook
  args: [nvidia-cdi-hook, create-symlinks, --link, libthing.so.9.9::/linked/libthing.so, --link, x::/usr/lib/not-on-the-host]`, dir, library))
	r := harness.Run(t, harness.Options{Env: []string{spec}}, "--cwd", "none", "--rootfs", tree, "--device", "v.com/thing=all", "--env", "LD_LIBRARY_PATH=/mine", "sh", "-c",
		"cat /etc/thing/conf && ls -l /linked/ && ls -ld /opt /opt/lib && ls -d /linked/../bin && echo $LD_LIBRARY_PATH; { echo x >/opt/lib/libthing.so.9.9 || echo read-only; } 2>/dev/null")
	r.Expect(t, 0, "exited")
	out := string(r.Stdout)
	for _, want := range []string{"conf\n", "libthing.so -> libthing.so.9.9\n", filepath.Base(library) + " -> libthing.so.9.9\n", "/linked/../bin\n", "/mine:/linked:/usr/lib\n", "read-only\n"} {
		check.That(t, strings.Contains(out, want), "printed %q, without %q; %s", out, want, r.Stderr)
	}
	check.That(t, !strings.Contains(out, "drwx------"), "the parents of a mount are closed: %q", out)
	r = harness.Run(t, harness.Options{Env: []string{spec}}, "--cwd", "none", "--device", "v.com/thing=all", "sh", "-c", "cat /etc/thing/conf; ls /linked; echo $LD_LIBRARY_PATH; ls /usr/lib/not-on-the-host 2>/dev/null || echo none")
	r.Expect(t, 0, "exited")
	got, want := string(r.Stdout), "conf\n"+filepath.Base(library)+"\nlibthing.so\nlibthing.so.9.9\n/linked\nnone\n"
	check.That(t, got == want, "with the host's root, printed %q, want %q; %s", got, want, r.Stderr)
}

// libraryOf returns the path of the C library that a program of the host uses.
func libraryOf(t *testing.T, program string) string {
	t.Helper()
	found, err := exec.LookPath(program)
	check.Must(t, err)
	paths := libraries(t, found)
	i := slices.IndexFunc(paths, func(path string) bool { return strings.HasPrefix(filepath.Base(path), "libc.") })
	check.Require(t, i >= 0, "%s has no libc: %q", program, paths)
	return paths[i]
}

// Root's sandboxes get the group of a device node, also in execs, but never root's group. An ordinary user's sandboxes
// keep the user's groups.
func TestDevicesGroups(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	const group = 4321
	if os.Geteuid() != 0 || !node(t, dir+"/group", group, 0o660) {
		return // only root can make device nodes
	}
	node(t, dir+"/root", 0, 0o660)
	node(t, dir+"/closed", group, 0o600)
	const open = "echo x >%s/%s && echo written"
	run := func(o harness.Options, name, want string) {
		t.Helper()
		r := harness.Run(t, o, "--cwd", "none", "--device", dir+"/"+name, "sh", "-c", fmt.Sprintf(open, dir, name))
		got := string(r.Stdout) + string(r.Stderr)
		check.That(t, strings.Contains(got, want), "%s: exit code %d: %s", name, r.ExitCode, got)
	}
	run(harness.Options{}, "group", "written\n")
	run(harness.Options{}, "root", "uid 65534 cannot open it; it belongs to uid 0 and group 0, with mode 0660\n")
	run(harness.Options{}, "closed", "uid 65534 cannot open it")
	both := cdiSpec(t, fmt.Sprintf("\ndeviceNodes:\n- path: /dev/open\n  hostPath: /dev/zero\n- path: /dev/closed\n  hostPath: %s/closed", dir))
	r := harness.Run(t, harness.Options{Env: []string{both}}, "--cwd", "none", "--device", "v.com/thing=all", "sh", "-c", "echo x >/dev/open; ls /dev/open /dev/closed 2>/dev/null; :")
	r.Expect(t, 0, "exited")
	if got, err := string(r.Stdout), string(r.Stderr); got != "/dev/open\n" || !strings.Contains(err, `left out: device "v.com/thing=all: `+dir+`/closed": uid 65534 cannot open it`) {
		t.Errorf("with one closed node, printed %q: %s", got, err)
	}
	all := cdiSpec(t, fmt.Sprintf("\ndeviceNodes:\n- path: /dev/closed\n  hostPath: %s/closed", dir))
	harness.Run(t, harness.Options{Env: []string{all}}, "--cwd", "none", "--device", "v.com/thing=all", "true").Exits(t, 125).ErrHas(t, "uid 65534 cannot open it")
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "box", "--cwd", "none", "--device", dir+"/group")
	s.Start(harness.Options{}, "inspect", "box", "--json").Wait().OutHas(t, `"devices":["`+dir+`/group"]`)
	b.Exec(harness.Options{}, nil, "sh", "-c", fmt.Sprintf(open, dir, "group")).Expect(t, 0, "exited")
}
