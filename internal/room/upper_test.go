package room

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// If the owner of a layer replaces a directory with a link while it is created, the target of the link is unchanged.
func TestUpperRace(t *testing.T) {
	top := t.TempDir()
	outside, upper := filepath.Join(top, "outside"), filepath.Join(top, "layers/0/upper")
	must := func(err error) {
		t.Helper()
		check.Must(t, err)
	}
	must(os.Mkdir(outside, 0o700))
	must(os.Mkdir(filepath.Join(top, "layers"), 0o700))
	dir, err := unix.Open(filepath.Join(top, "layers"), unix.O_PATH|unix.O_CLOEXEC, 0)
	must(err)
	defer unix.Close(dir)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if unix.Rename(upper, top+"/away") == nil {
				_ = unix.Symlink(outside, upper) // fails if it exists again
				_ = unix.Rmdir(top + "/away")
			}
		}
	}()
	var p Plan
	for range 500 {
		o := &Overlay{mount: &enter.Overlay{Mode: 0o755}}
		_ = p.makeUpper(dir, 0, o) // may fail
		o.Close()
		_ = os.RemoveAll(filepath.Join(top, "layers/0")) // may fail because of a concurrent change; the next round retries
	}
	close(stop)
	<-stopped
	info, err := os.Stat(outside)
	must(err)
	check.That(t, info.Mode().Perm() == 0o700, "a directory outside has the mode %o", info.Mode().Perm())
}

// Only a record that was cut while it was written is written again, and not another file or one that cannot be read.
func TestLockUpper(t *testing.T) {
	list := []*Overlay{{Source: "/src"}}
	for text, want := range map[string]string{
		"": "", "[": "", `[{"source":"/sr`: "", `[{"source":"/other"}]`: "its layer belongs to /other, not /src",
		"{}": "is not a record", "[]": "is not a record", "[null]": "is not a record", `[{"id": 1}, {"id"`: "is not a record",
	} {
		top, err := os.Open(t.TempDir())
		check.Must(t, err)
		defer top.Close()
		file := filepath.Join(top.Name(), upperFile)
		check.Must(t, os.WriteFile(file, []byte(text), 0o600))
		_, lock, err := lockUpper(int(top.Fd()), list)
		lock.Close()
		check.That(t, (err == nil) == (want == "") && (err == nil || strings.Contains(err.Error(), want)), "%q: %v", text, err)
		now, err := os.ReadFile(file)
		check.That(t, err == nil && (want == "" || string(now) == text), "%q became %q, %v", text, now, err)
	}
	closed, err := os.CreateTemp(t.TempDir(), "")
	check.Must(t, err)
	closed.Close()
	known, err := readUpper(closed)
	check.That(t, known == nil && err != nil && err != errCut, "a file that cannot be read: %v, %v", known, err)
}

// The next start completes a layer that a kill left incomplete, with the right owner.
func TestMakeOwnUnfinished(t *testing.T) {
	top := t.TempDir()
	check.Must(t, os.Mkdir(filepath.Join(top, "x.new"), 0o700))
	dir, err := os.Open(top)
	check.Must(t, err)
	defer dir.Close()
	p, owner := &Plan{}, os.Getuid()
	if owner == 0 {
		owner = 12345
		p.cred = &proc.Cred{UID: 12345, GID: 12345}
	}
	for range 2 {
		fd, err := p.makeOwn(int(dir.Fd()), "x", 0o751)
		check.Must(t, err)
		unix.Close(fd)
		info, err := os.Lstat(filepath.Join(top, "x"))
		check.That(t, err == nil && info.Mode().Perm() == 0o751 && int(info.Sys().(*syscall.Stat_t).Uid) == owner, "%v, %v", info, err)
	}
	names, err := dir.Readdirnames(-1)
	check.That(t, err == nil && len(names) == 1, "%q, %v", names, err)
}

// A root without extended attributes for its layer is an error with a remedy.
func TestRootErrorAttributes(t *testing.T) {
	p := &Plan{ops: []op{{kind: opRoot, mount: &Mount{Image: "sha256:0123456789abcdef"}}}}
	err := p.rootError(&proc.StartError{Step: enter.StepXattr, Err: unix.EOPNOTSUPP})
	var e *result.Error
	check.That(t, errors.As(err, &e) && strings.HasPrefix(e.Message, "cannot mount image sha256:0123456789ab: its layer needs extended attributes") && strings.Contains(e.Hint, "--upper"), "%v", err)
}
