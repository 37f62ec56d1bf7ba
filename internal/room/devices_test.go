package room

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A sandbox of root gets the group of a node only if it cannot open the node otherwise, and never root's group.
func TestCheckDevice(t *testing.T) {
	fd, err := unix.Open("/dev/zero", unix.O_PATH|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	zero := os.NewFile(uintptr(fd), "zero")
	t.Cleanup(func() { zero.Close() })
	number := unix.Mkdev(1, 5)
	plan := &Plan{cred: &proc.Cred{UID: 65534, GID: 65534}}
	for name, tt := range map[string]struct {
		kind, mode, uid, gid uint32
		device, wanted       uint64
		group                uint32
		ok                   bool
	}{
		"everybody's":      {unix.S_IFCHR, 0o666, 0, 44, number, number, 0, true},
		"read by all":      {unix.S_IFCHR, 0o664, 0, 44, number, 0, 44, true},
		"group":            {unix.S_IFCHR, 0o660, 0, 44, number, 0, 44, true},
		"group reads":      {unix.S_IFCHR, 0o640, 0, 44, number, 0, 44, true},
		"root's group":     {unix.S_IFCHR, 0o660, 0, 0, number, 0, 0, false},
		"owner":            {unix.S_IFCHR, 0o600, 0, 44, number, 0, 0, false},
		"own":              {unix.S_IFCHR, 0o600, 65534, 44, number, 0, 0, true},
		"own, but closed":  {unix.S_IFCHR, 0o066, 65534, 44, number, 0, 0, false},
		"own group":        {unix.S_IFCHR, 0o060, 0, 65534, number, 0, 0, true},
		"own group closed": {unix.S_IFCHR, 0o606, 0, 65534, number, 0, 0, false},
		"another number":   {unix.S_IFCHR, 0o666, 0, 44, number, unix.Mkdev(1, 3), 0, false},
		"memory":           {unix.S_IFCHR, 0o666, 0, 44, unix.Mkdev(1, 1), 0, 0, false},
		"whiteout":         {unix.S_IFCHR, 0o666, 0, 44, 0, 0, 0, false},
		"block device":     {unix.S_IFBLK, 0o666, 0, 44, number, 0, 0, false},
		"file":             {unix.S_IFREG, 0o666, 0, 44, 0, 0, 0, false},
		"socket":           {unix.S_IFSOCK, 0o666, 0, 44, 0, 0, 0, false},
	} {
		o := &op{kind: opDevice, src: "/dev/x", from: zero, st: &unix.Stat_t{Mode: tt.kind | tt.mode, Uid: tt.uid, Gid: tt.gid, Rdev: tt.device}}
		group, err := plan.checkDevice(o, devices.Node{Name: "/dev/x", Source: "/dev/x", Number: tt.wanted})
		check.That(t, group == tt.group && (err == nil) == tt.ok && (err == nil || errors.As(err, new(*result.Error))), "%s: group %d, %v", name, group, err)
	}
}

// A path in a root directory is resolved there, as far as it exists, and never leaves it.
func TestInRoot(t *testing.T) {
	top := laidOut(t, "root/usr/lib/x/", "root/lib -> usr/lib", "root/abs -> /usr/lib", "root/up -> ../../../usr", "root/dev -> usr", "root/file", "root/loop -> loop", "root/dangling -> none")
	fd, err := unix.Open(top+"/root", unix.O_PATH|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	root := &op{from: os.NewFile(uintptr(fd), "root")}
	t.Cleanup(func() { root.from.Close() })
	for name, want := range map[string]string{
		"/usr/lib/x/a": "/usr/lib/x/a", "/lib/x/a": "/usr/lib/x/a", "/lib/y/z/a": "/usr/lib/y/z/a", "/abs/a": "/usr/lib/a", "/up/lib/a": "/usr/lib/a",
		"/none/a": "/none/a", "/lib": "/lib", "/dev/a": "/dev/a", "/file/a": "/file/a", "/loop/a": "/loop/a", "/dangling/a": "/dangling/a",
	} {
		check.Equal(t, inRoot(root, name), want, "%s", name)
	}
}
