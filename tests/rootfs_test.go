package tests

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// rootTree creates a root directory with a few of the host's programs and the libraries that they need.
func rootTree(t harness.T) string {
	t.Helper()
	dir := filepath.Join(harness.SharedDir(t), "tree")
	for _, name := range []string{"/etc", "/opt/bin", "/srv", "/var/home"} {
		check.Must(t, os.MkdirAll(dir+name, 0o755))
	}
	for _, name := range []string{"sh", "cat", "ls", "id", "env", "mkdir", "rm", "mv"} {
		found, err := exec.LookPath(name)
		check.Must(t, err)
		copyFile(t, found, dir+"/opt/bin/"+name)
		for _, library := range libraries(t, found) {
			copyFile(t, library, dir+library)
		}
	}
	for name, text := range map[string]string{
		"/etc/os-release": "NAME=tree\n",
		"/etc/passwd":     "root:x:0:0:root:/root:/bin/sh\napp:x:7:7::/srv:/bin/false\nsandbox:x:8:8::/x:/bin/false\n",
		"/etc/group":      "root:x:0:\napp:x:7:\n",
	} {
		check.Must(t, os.WriteFile(dir+name, []byte(text), 0o644))
	}
	check.Must(t, os.WriteFile(dir+"/opt/bin/script", []byte("#!/opt/bin/sh\necho script \"$1\"\n"), 0o755))
	check.Must(t, os.WriteFile(dir+"/opt/bin/closed", []byte("#!/opt/bin/sh\n"), 0o644))
	check.Must(t, os.WriteFile(dir+"/opt/bin/lost", []byte("#!/usr/bin/python3\n"), 0o755))
	for link, target := range map[string]string{"/bin": "opt/bin", "/home": "/var/home", "/tmp": "/etc", "/proc": "/srv", "/run": "/var/home/run"} {
		check.Must(t, os.Symlink(target, dir+link))
	}
	return dir
}

var known sync.Map // programs' libraries

// libraries returns the paths of the libraries that a program of the host uses.
func libraries(t harness.T, program string) []string {
	t.Helper()
	if paths, ok := known.Load(program); ok {
		return paths.([]string)
	}
	ldd, err := harness.Command(t, exec.Command("ldd", program), harness.Bound)
	check.Must(t, err)
	paths := slices.DeleteFunc(strings.Fields(ldd), func(word string) bool { return !filepath.IsAbs(word) })
	known.Store(program, paths)
	return paths
}

func copyFile(t harness.T, from, to string) {
	t.Helper()
	data := harness.ReadFile(t, from)
	check.Must(t, os.MkdirAll(filepath.Dir(to), 0o755))
	check.Must(t, os.WriteFile(to, data, 0o755))
}

// A hostile root directory can neither delay a run nor show a file from outside.
func TestRootfsHostile(t *testing.T) {
	t.Parallel()
	const own = "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1234:1234:sandbox:/home/sandbox:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
	for name, tt := range map[string]struct {
		plant func(passwd string) error
		code  int
		want  string
	}{
		"pipe":      {func(passwd string) error { return unix.Mkfifo(passwd, 0o644) }, 0, own},
		"link":      {func(passwd string) error { return os.Symlink("../../../../../../../../etc/hosts", passwd) }, 0, own},
		"directory": {func(passwd string) error { return os.Mkdir(passwd, 0o755) }, 0, own},
		"loop":      {func(passwd string) error { return os.Symlink("passwd", passwd) }, 0, own},
		"process":   {func(passwd string) error { return os.Symlink("/proc/self/environ", passwd) }, 0, own},
		"large":     {func(passwd string) error { return os.WriteFile(passwd, make([]byte, 5<<20), 0o644) }, 125, "/etc/passwd: larger than 4 MiB\n"},
		"etc": {func(passwd string) error {
			etc := filepath.Dir(passwd)
			return errors.Join(os.RemoveAll(etc), os.Symlink("/root", etc))
		}, 0, own},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree := rootTree(t)
			check.Must(t, os.Remove(tree+"/etc/passwd"))
			check.Must(t, tt.plant(tree+"/etc/passwd"))
			r := harness.Run(t, harness.Options{}, "--cwd", "none", "--user", "1234:1234", "--rootfs", tree, "/opt/bin/cat", "/etc/passwd")
			got := string(r.Stdout) + string(r.Stderr)
			check.That(t, r.ExitCode == tt.code && strings.HasSuffix(got, tt.want), "exit code %d, printed %q, want %q at its end", r.ExitCode, got, tt.want)
		})
	}
}
