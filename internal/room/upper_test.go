package room

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// What a kill has left unfinished is finished by the next start, and belongs to whom it should.
func TestMakeOwnUnfinished(t *testing.T) {
	top := t.TempDir()
	if err := os.Mkdir(filepath.Join(top, "x.new"), 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(top)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	p, owner := &Plan{}, os.Getuid()
	if owner == 0 {
		owner = 12345
		p.cred = &proc.Cred{UID: 12345, GID: 12345}
	}
	for range 2 {
		fd, err := p.makeOwn(int(dir.Fd()), "x", 0o751)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		info, err := os.Lstat(filepath.Join(top, "x"))
		if err != nil || info.Mode().Perm() != 0o751 || int(info.Sys().(*syscall.Stat_t).Uid) != owner {
			t.Errorf("%v, %v", info, err)
		}
	}
	if names, err := dir.Readdirnames(-1); err != nil || len(names) != 1 {
		t.Errorf("%q, %v", names, err)
	}
}
