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
func rootTree(t *testing.T) string {
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
func libraries(t *testing.T, program string) []string {
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

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data := harness.ReadFile(t, from)
	check.Must(t, os.MkdirAll(filepath.Dir(to), 0o755))
	check.Must(t, os.WriteFile(to, data, 0o755))
}

// A root directory takes the place of the host's system, and no link in it redirects a mount.
func TestRootfs(t *testing.T) {
	t.Parallel()
	tree := rootTree(t)
	work := harness.SharedDir(t)
	check.Must(t, os.WriteFile(work+"/file", []byte("work\n"), 0o644))
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"its files":           {[]string{"/opt/bin/cat", "/etc/os-release"}, "NAME=tree\n"},
		"its programs":        {[]string{"script", "it"}, "script it\n"},
		"not the host's":      {[]string{"sh", "-c", "ls /usr/bin /etc/hostname /etc/alternatives 2>/dev/null; echo $?"}, "2\n"},
		"its top":             {[]string{"ls", "/"}, "bin\ndev\netc\nfixtures\nhome\nlib\nlib64\nopt\nproc\nrun\nsrv\nsys\ntmp\nvar\n"},
		"read-only":           {[]string{"sh", "-c", "{ echo x >/srv/x || echo x >/x || rm /bin || echo x >/run/x; } 2>/dev/null; echo $?"}, "2\n"},
		"PATH":                {[]string{"sh", "-c", "echo $PATH"}, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"},
		"home":                {[]string{"sh", "-c", "cd && echo x >f && cat /home/sandbox/f; ls /var/home"}, "x\n"},
		"tmp":                 {[]string{"sh", "-c", "echo x >/tmp/f; cat /tmp/f; ls /etc/f 2>/dev/null || :"}, "x\n"},
		"proc":                {[]string{"sh", "-c", "cat /proc/1/comm; ls /srv"}, "sbxrun-init\n"},
		"a mount in it":       {[]string{"--tmpfs", "/usr/lib/deep/er", "sh", "-c", "echo x >/usr/lib/deep/er/f; cat /usr/lib/deep/er/f"}, "x\n"},
		"a mount at a link":   {[]string{"--ro-bind", work + ":/home/w", "sh", "-c", "cat /home/w/file; ls /var/home"}, "work\n"},
		"a file over a file":  {[]string{"--ro-bind", work + "/file:/etc/os-release", "cat", "/etc/os-release"}, "work\n"},
		"a file put in":       {[]string{"--put", work + "/file:/tmp/put", "cat", "/tmp/put"}, "work\n"},
		"an overlay in it":    {[]string{"--overlay", work + ":/srv/w", "sh", "-c", "echo x >/srv/w/f; cat /srv/w/file /srv/w/f"}, "work\nx\n"},
		"the accounts":        {[]string{"--user", "1234:1234", "cat", "/etc/passwd"}, "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1234:1234:sandbox:/home/sandbox:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\napp:x:7:7::/srv:/bin/false\n"},
		"its root's name":     {[]string{"--user", "0:0", "id", "-un"}, "root\n"},
		"the host's resolver": {[]string{"--net", "host", "sh", "-c", "cat /etc/resolv.conf"}, readFile(t, "/etc/resolv.conf")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"--cwd", "none", "--rootfs", tree}, tt.args...)
			if strings.Contains(name, "overlay") {
				args = append(layer(t), args...)
			}
			harness.Run(t, harness.Options{}, args...).Expect(t, 0, "exited").Out(t, tt.want)
		})
	}
	t.Run("unchanged", func(t *testing.T) {
		names, err := filepath.Glob(tree + "/var/home/*")
		check.That(t, err == nil && len(names) == 0, "the root directory was changed: %q, %v", names, err)
	})
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

// The current directory is shown with a root directory, too, and a relative --rootfs starts there.
func TestRootfsWorkingDirectory(t *testing.T) {
	t.Parallel()
	tree := rootTree(t)
	work := filepath.Dir(tree) + "/work"
	check.Must(t, os.Mkdir(work, 0o755))
	r := harness.Run(t, harness.Options{Dir: work}, "--rootfs", "../tree", "-w", "sh", "-c", "echo x >out; ls; cat /etc/os-release").Expect(t, 0, "exited")
	got := string(r.Stdout)
	check.That(t, got == "out\nNAME=tree\n" && readFile(t, work+"/out") == "x\n", "printed %q", got)
}

// Execs in a started sandbox use its root directory.
func TestRootfsExec(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "--cwd", "none", "--rootfs", rootTree(t))
	b.Exec(harness.Options{}, nil, "script", "again").Expect(t, 0, "exited").Out(t, "script again\n")
}

// With --overlay / the root is writable, the root directory stays as it is, and diff, snapshot and --from
// work as with every overlay.
func TestRootfsWritable(t *testing.T) {
	t.Parallel()
	tree := rootTree(t)
	flags := layer(t, "--cwd", "none", "--rootfs", tree, "--overlay", "/")
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, append([]string{"--name", "box"}, flags...)...)
	const change = "echo x >/opt/bin/new && rm /etc/os-release && mkdir /made && mv /srv /moved && mkdir /home/dir && cat /etc/hosts >/etc/copy && echo 1.2.3.4 x >/etc/hosts.new && mv /etc/hosts.new /etc/hosts && ls /"
	r := b.Exec(harness.Options{}, nil, "sh", "-c", change).Expect(t, 0, "exited")
	got := string(r.Stdout)
	check.That(t, got == "bin\ndev\netc\nfixtures\nhome\nlib\nlib64\nmade\nmoved\nopt\nproc\nrun\nsys\ntmp\nvar\n", "printed %q; %s", got, r.Stderr)
	names, err := filepath.Glob(tree + "/*/*/new")
	check.That(t, err == nil && len(names) == 0, "the root directory was changed: %q, %v", names, err)
	r = s.Start(harness.Options{}, "diff", "box").Wait()
	got = string(r.Stdout)
	check.That(t, got == "A etc/copy\nA etc/hosts\nD etc/os-release\nM home/ (was a link)\nA home/dir/\nA made/\nA moved/\nA opt/bin/new\nD srv/\n", "diff printed %q; %s", got, r.Stderr)
	s.Start(harness.Options{}, "apply", "box").Wait().Exits(t, 125).ErrHas(t, "changes to a root directory cannot be applied")
	snapshot(t, s, "box", "--name", "snap")
	for _, again := range [][]string{{"--rootfs", tree}, nil} {
		args := append(layer(t, "--cwd", "none", "--from", "snap"), again...)
		s.Start(harness.Options{}, append(args, "cat", "/opt/bin/new")...).Wait().Exits(t, 0).Out(t, "x\n")
	}
}

// A sandbox of root's does not get a root directory by a link that an earlier command may have created.
func TestRootfsPlantedLink(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		return // only root's sandboxes have another identity
	}
	dir := harness.SharedDir(t)
	check.Must(t, errors.Join(os.Mkdir(dir+"/open", 0o755), os.Symlink(rootTree(t), dir+"/open/link"), os.Chown(dir+"/open", 65534, 65534), os.Lchown(dir+"/open/link", 65534, 65534)))
	harness.Run(t, harness.Options{}, "--cwd", "none", "--rootfs", dir+"/open/link", "true").Exits(t, 125).ErrHas(t, "is a symbolic link that others could have put there")
}

// The errors for an unusable root directory, and for a command that is not in it, name the cause and give no advice about
// the host's programs.
func TestRootfsErrors(t *testing.T) {
	t.Parallel()
	tree := rootTree(t)
	for name, tt := range map[string]struct {
		args []string
		code int
		want string
	}{
		"missing":         {[]string{"--rootfs", tree + "/none", "true"}, 125, "no such file or directory"},
		"a file":          {[]string{"--rootfs", tree + "/etc/passwd", "true"}, 125, "not a directory"},
		"the host's":      {[]string{"--rootfs", "/usr/..", "true"}, 125, "is the host's"},
		"a home":          {[]string{"--rootfs", "/root", "true"}, 125, `root directory "/root" holds the home directory "/root", with its keys and tokens`},
		"empty":           {[]string{"--rootfs", "", "true"}, 125, "the value is empty"},
		"overlay alone":   {[]string{"--overlay", "/", "true"}, 125, "goes with --image or --rootfs"},
		"apply":           {[]string{"--rootfs", tree, "--overlay", "/", "--apply", "true"}, 125, "are not applied"},
		"print":           {[]string{"--rootfs", tree, "--print-command", "true"}, 125, "no bwrap command does the same"},
		"its own layer":   {[]string{"--rootfs", tree, "--overlay", "/", "--upper", tree + "/srv", "true"}, 125, "the layer must lie elsewhere"},
		"with tools":      {[]string{"--rootfs", tree, "--tools", "true"}, 125, "leave it out with --rootfs"},
		"not found":       {[]string{"--rootfs", tree, "gzip"}, 127, `command "gzip" not found in the sandbox's PATH /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin` + "\n"},
		"by a path":       {[]string{"--rootfs", tree, "/usr/bin/gzip"}, 127, `command "/usr/bin/gzip": no such file` + "\n"},
		"not executable":  {[]string{"--rootfs", tree, "closed"}, 126, "permission denied\n"},
		"no interpreter":  {[]string{"--rootfs", tree, "lost"}, 126, `its interpreter "/usr/bin/python3" does not exist in the sandbox` + "\n"},
		"reserved":        {[]string{"--rootfs", tree, "--tmpfs", "/.root/x", "true"}, 125, "cannot be replaced"},
		"no such workdir": {[]string{"--rootfs", tree, "--workdir", "/usr/bin", "true"}, 125, "does not exist in the sandbox"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			harness.Run(t, harness.Options{}, append([]string{"--cwd", "none"}, tt.args...)...).Exits(t, tt.code).ErrHas(t, tt.want)
		})
	}
}

// In a writable root directory, programs such as groupadd(8) can write to the list of groups in place.
func TestRootfsAccounts(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, layer(t, "--cwd", "none", "--user", "0:0", "--rootfs", rootTree(t), "--overlay", "/", "sh", "-c", "echo new:x:9: >>/etc/group && cat /etc/group")...)
	r.Expect(t, 0, "exited")
	got := string(r.Stdout)
	check.That(t, strings.HasSuffix(got, "\nnew:x:9:\n"), "printed %q", got)
}
