package proxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A restricted proxy can read /etc/hosts even if it is a link to another directory.
func TestRestrictLinks(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/file", []byte("192.0.2.1 linked.example.org\n"), 0o644))
	etc := t.TempDir()
	check.Must(t, os.Symlink(dir+"/file", etc+"/hosts"))
	cmd := exec.Command("/proc/self/exe", "links", etc)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil, "%v: %s", err, out)
}

func tryLinks(etc string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount(etc, "/etc", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := restrict(); err != nil {
		return err
	}
	list, err := lookup(context.Background(), "linked.example.org")
	if err == nil && len(list) != 1 {
		err = fmt.Errorf("%v", list)
	}
	return err
}

// TestMain is also the restricted process of [TestRestrict] and [TestRestrictLinks].
func TestMain(m *testing.M) {
	try := map[string]func(string) error{"shut": tryShut, "links": tryLinks}
	if len(os.Args) == 3 && try[os.Args[1]] != nil {
		if err := try[os.Args[1]](os.Args[2]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A compromised proxy can neither read nor write files of its user, in any thread. It can still resolve
// names and connect.
func TestRestrict(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/file", []byte("secret"), 0o600))
	out, err := exec.Command("/proc/self/exe", "shut", dir).CombinedOutput()
	check.That(t, err == nil, "%v: %s", err, out)
}

func tryShut(dir string) error {
	// The Landlock version of the kernel; with 0, nothing is denied.
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		version = 0
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := restrict(); err != nil {
		return err
	}
	forbidden := func(what string, err error, since uintptr) error {
		if denied := errors.Is(err, fs.ErrPermission); denied != (version >= since) {
			return fmt.Errorf("%s, with version %d: %v", what, version, err)
		}
		return nil
	}
	tries := make(chan error)
	const threads = 20
	for range threads {
		go func() {
			_, readErr := os.ReadFile(dir + "/file")
			_, listErr := os.ReadDir(dir)
			tries <- errors.Join(
				forbidden("read", readErr, 1),
				forbidden("list", listErr, 1),
				forbidden("make", os.WriteFile(dir+"/file"+strconv.Itoa(unix.Gettid()), nil, 0o600), 1),
				forbidden("execute", exec.Command("/proc/self/exe", "shut").Start(), 1),
				forbidden("truncate", os.Truncate(dir+"/file", 0), 3),
				forbidden("signal", unix.Kill(os.Getppid(), 0), 6))
		}()
	}
	for range threads {
		if err := <-tries; err != nil {
			return err
		}
	}
	if _, err := os.ReadFile("/etc/hosts"); err != nil {
		return err
	}
	if _, err := lookup(context.Background(), "localhost"); err != nil {
		return err
	}
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	return conn.Close()
}
