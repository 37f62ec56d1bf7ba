package room

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestSwap(t *testing.T) {
	const all = 1<<32 - 1
	for _, tt := range []struct {
		a, b uint32
		want []syscall.SysProcIDMap
	}{
		{0, 65534, []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}, {ContainerID: 1, HostID: 1, Size: 65533}, {ContainerID: 65534, HostID: 0, Size: 1},
			{ContainerID: 65535, HostID: 65535, Size: all - 65535}}},
		{65534, 1000, []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1000}, {ContainerID: 1000, HostID: 65534, Size: 1}, {ContainerID: 1001, HostID: 1001, Size: 64533},
			{ContainerID: 65534, HostID: 1000, Size: 1}, {ContainerID: 65535, HostID: 65535, Size: all - 65535}}},
		{7, 8, []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 7}, {ContainerID: 7, HostID: 8, Size: 1}, {ContainerID: 8, HostID: 7, Size: 1}, {ContainerID: 9, HostID: 9, Size: all - 9}}},
		{0, all - 1, []syscall.SysProcIDMap{{ContainerID: 0, HostID: all - 1, Size: 1}, {ContainerID: 1, HostID: 1, Size: all - 2}, {ContainerID: all - 1, HostID: 0, Size: 1}}},
		{5, 5, []syscall.SysProcIDMap{{Size: all}}},
	} {
		check.NoDiff(t, cmp.Diff(tt.want, swap(tt.a, tt.b)), "swap(%d, %d) (-want +got)", tt.a, tt.b)
	}
}

// Root's writable binds of other owners are idmapped, unless the user chose the sandbox's identity.
func TestPrepareMapsOwners(t *testing.T) {
	top := laidOut(t, "dir/")
	dir := top + "/dir"
	owner := proc.Cred{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	for _, tt := range []struct {
		name string
		kind MountKind
		user *User
		want *proc.Cred
	}{
		{"writable", ReadWrite, nil, &owner},
		{"as root inside", ReadWrite, &User{}, &owner},
		{"as the owner", ReadWrite, &User{UID: max(1, owner.UID), GID: owner.GID}, nil},
		{"as somebody", ReadWrite, &User{UID: 4711, GID: 4711}, nil},
		{"read-only", ReadOnly, nil, nil},
	} {
		mounts := []Mount{{Kind: tt.kind, Source: dir, Dest: "/out"}}
		plan := prepare(t, Policy{Command: []string{"true"}, Workdir: "/tmp", Mounts: mounts, User: tt.user}, 0)
		for _, o := range plan.ops {
			if o.dst == "/out" {
				check.NoDiff(t, cmp.Diff(tt.want, o.owner), "%s (-want +got)", tt.name)
			}
		}
	}
	// Without the filter, a payload could leave setuid files with the owner's rights.
	_, err := Prepare(Policy{Command: []string{"true"}, Workdir: "/tmp", NoFilter: true, Mounts: []Mount{{Kind: ReadWrite, Source: dir, Dest: "/out"}}}, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH")})
	check.That(t, result.CodeOf(err) == "idmap" && strings.Contains(err.Error(), "setuid"), "without the filter: %v", err)
}

// A source that cannot be idmapped is an error with a hint, and nothing starts. /proc can never be idmapped, and only
// root can idmap mounts.
func TestDetachRefuses(t *testing.T) {
	for _, owner := range []proc.Cred{{}, {UID: 1000, GID: 1001}} {
		f, err := os.Open("/proc/sys")
		check.Must(t, err)
		defer f.Close()
		plan := &Plan{cred: &proc.Cred{UID: Nobody, GID: Nobody}, ops: []op{{src: f.Name(), from: f, mount: new(Mount), staged: true, owner: &owner}}}
		mounts, err := plan.detach()
		var e *result.Error
		want := fmt.Sprintf("--user %d:%d", owner.UID, owner.GID)
		if owner.UID == 0 {
			want = "name a directory below it that the sandbox is to write to"
		}
		check.That(t, errors.As(err, &e) && strings.Contains(e.Message, "/proc/sys") && strings.Contains(e.Hint, want), "owner %v: got %v, %#v; want the hint %s", owner, mounts, err, want)
		check.That(t, os.Getuid() != 0 || strings.Contains(err.Error(), "cannot be idmapped (proc)"), "as root: %v", err)
	}
	pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
	check.That(t, err == unix.ECHILD, "left behind: %d, %v", pid, err)
}

// A source within another bind, which the user did not name, is opened beneath that bind, and no link in its path is
// followed: another sandbox may have put the link there since the first look.
func TestOpenWithinBind(t *testing.T) {
	top := laidOut(t, "m/real/file", "m/link -> ../secret", "m/dir -> real", "secret/file")
	for _, cred := range []*proc.Cred{nil, {UID: Nobody, GID: Nobody}} {
		p := &Plan{cred: cred, ops: []op{{kind: opBindRW, src: top + "/m", dst: "/out", mount: new(Mount)}}}
		check.Must(t, p.open(&p.ops[0]))
		for name, want := range map[string]unix.Errno{"real": 0, "real/file": 0, "link": unix.ELOOP, "link/file": unix.ELOOP, "dir/file": unix.ELOOP, "none": unix.ENOENT} {
			o := op{kind: opBind, src: top + "/m/" + name, dst: "/out/" + name, mount: &Mount{In: "/out"}}
			err := p.open(&o)
			o.from.Close()
			check.That(t, want == 0 && err == nil || want != 0 && errors.Is(err, want) && result.CodeOf(err) == "bind-source", "%s: %v", name, err)
		}
		p.Close()
	}
}
