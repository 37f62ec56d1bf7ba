package sandbox

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"golang.org/x/sys/unix"
)

// As a background process this program stops before it reads anything.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == BackgroundArgument {
		_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
		select {}
	}
	os.Exit(m.Run())
}

// Spawn kills a supervisor that is stopped before it has read its assignment.
func TestStoppedBeforeReading(t *testing.T) {
	failed := make(chan error, 1)
	go func() {
		_, err := Spawn("start", []string{strings.Repeat("x", 4<<20)}) // more than a socket buffers
		failed <- err
	}()
	select {
	case err := <-failed:
		check.That(t, err != nil && strings.Contains(err.Error(), "exited before reporting"), "%v", err)
	case <-time.After(2 * time.Minute):
		t.Fatal("it is still waited for")
	}
}
