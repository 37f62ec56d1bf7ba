package faults

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// mountEnv turns the test binary into a program that mounts a small tmpfs in its own mount
// namespace and then executes a shell: "OPTIONS DIR". OPTIONS may begin with "ro,".
const mountEnv = "SBXRUN_FAULTS_MOUNT"

func init() {
	if text := os.Getenv(mountEnv); text != "" {
		runtime.LockOSThread() // capabilities belong to a thread
		err := becomeShell(text)
		fmt.Fprintln(os.Stderr, "mount:", err)
		os.Exit(200)
	}
}

func becomeShell(text string) error {
	options, dir, _ := strings.Cut(text, " ")
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if rest, found := strings.CutPrefix(options, "ro,"); found {
		options, flags = rest, flags|unix.MS_RDONLY
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", options, dir, err)
	}
	if os.Getuid() != 0 {
		// Drop the capabilities. With an empty ambient set the exec leaves none.
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
			return err
		}
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			return err
		}
	}
	os.Unsetenv(mountEnv)
	return unix.Exec("/bin/sh", []string{"sh"}, os.Environ())
}

// shell is a shell in a mount namespace where the state directory is a small tmpfs. It is the
// parent of the commands that it runs.
type shell struct {
	e   *env
	c   *call
	in  io.WriteCloser
	out *bufio.Reader
	n   int
}

// mounted makes the state directory a tmpfs with these options.
func (e *env) mounted(options string) *shell {
	e.t.Helper()
	sh := &shell{e: e}
	self, err := os.Executable()
	check.Must(e.t, err)
	reader, writer, err := os.Pipe()
	check.Must(e.t, err)
	stdin, in, err := os.Pipe()
	check.Must(e.t, err)
	sh.in = in
	sh.out = bufio.NewReader(reader)
	c, err := e.command(func(cmd *exec.Cmd) {
		cmd.Stdin, cmd.Stdout = stdin, writer
		cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%s %s", mountEnv, options, e.state))
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
		if uid, gid := os.Getuid(), os.Getgid(); uid != 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  unix.CLONE_NEWNS | unix.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}},
				AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN},
			}
		}
	}, self)
	stdin.Close()
	writer.Close()
	check.Must(e.t, err)
	sh.c = c
	e.t.Cleanup(func() {
		in.Close() // ends the shell
		e.wait(c)
		reader.Close()
	})
	if s := sh.run("test -d " + e.state + " && echo ready"); s.stdout != "ready\n" {
		e.t.Fatalf("no shell with a small file system: %v; %v", s, e.wait(c))
	}
	return sh
}

// inside returns a path in the namespace, seen from outside.
func (sh *shell) inside(path ...string) string {
	return filepath.Join(append([]string{fmt.Sprintf("/proc/%d/root", sh.c.pid), sh.e.state}, path...)...)
}

// run makes the shell run a line.
func (sh *shell) run(line string) result {
	sh.e.t.Helper()
	sh.n++
	name := filepath.Join(sh.e.top, fmt.Sprintf("shell-%d", sh.n))
	begin := time.Now()
	_, err := fmt.Fprintf(sh.in, "{ %s\n} >%s.out 2>%s.err; echo done $?\n", line, name, name)
	check.Require(sh.e.t, err == nil, "the shell is gone: %v", err)
	type answer struct {
		line string
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		text, err := sh.out.ReadString('\n')
		answers <- answer{text, err}
	}()
	s := result{args: []string{line}}
	select {
	case a := <-answers:
		if _, err := fmt.Sscanf(a.line, "done %d", &s.code); err != nil || a.err != nil {
			sh.e.t.Fatalf("the shell said %q, %v; %v", a.line, a.err, sh.e.wait(sh.c))
		}
	case <-time.After(bound):
		_ = sh.c.cmd.Process.Kill() // gone reports what it waited for
		sh.e.t.Fatalf("%q still runs after %v", line, bound)
	}
	s.took = time.Since(begin)
	stdout := harness.ReadFile(sh.e.t, name+".out")
	stderr := harness.ReadFile(sh.e.t, name+".err")
	s.stdout, s.stderr = string(stdout), string(stderr)
	s.unpanicked(sh.e.t)
	return s
}

// do runs sbxrun in the namespace.
func (sh *shell) do(args ...string) result {
	sh.e.t.Helper()
	words := []string{harness.Binary(sh.e.t)}
	for _, arg := range args {
		words = append(words, "'"+strings.ReplaceAll(arg, "'", `'\''`)+"'")
	}
	return sh.run(strings.Join(words, " "))
}

// fill leaves that many free pages of 4 KiB.
func (sh *shell) fill(free int) {
	sh.e.t.Helper()
	name := sh.inside("filler")
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	check.Must(sh.e.t, err)
	page := make([]byte, 4096)
	size := int64(0)
	for {
		n, err := f.Write(page)
		size += int64(n)
		if err != nil {
			break
		}
	}
	check.Must(sh.e.t, f.Truncate(max(0, size-int64(free)*4096)))
	check.Must(sh.e.t, f.Close())
}

func (sh *shell) empty() {
	sh.e.t.Helper()
	check.Must(sh.e.t, os.Remove(sh.inside("filler")))
}

// listing returns the entries of the state directory, without those that are always there.
func (sh *shell) listing() (names []string) {
	sh.e.t.Helper()
	entries := harness.ReadDir(sh.e.t, sh.inside())
	for _, entry := range entries {
		switch entry.Name() {
		case "lock", "names", "filler":
		default:
			names = append(names, entry.Name())
		}
	}
	return names
}
