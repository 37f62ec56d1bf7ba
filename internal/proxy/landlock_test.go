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
	"testing"

	"golang.org/x/sys/unix"
)

// TestMain is also the process that [TestShut] shuts in.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "shut" {
		if err := tryShut(os.Args[2]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A proxy that was taken over reads no file of its user's and writes none, in whatever thread; it
// still resolves names, and connects.
func TestShut(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("/proc/self/exe", "shut", dir).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func tryShut(dir string) error {
	// The kernel's version of Landlock, 0 for none: nothing is forbidden then.
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		version = 0
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := shut(); err != nil {
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
