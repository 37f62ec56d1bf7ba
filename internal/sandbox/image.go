package sandbox

import (
	"context"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/values"
)

// UseImage makes an image the root of a sandbox, whose policy has its User already. It unpacks the image if necessary.
// With writable, changes go to a layer in the directory upper, or in memory. The image's configuration sets the identity
// inside the sandbox, and the working directory if the policy shows no current directory. UseImage returns the image's
// variables; the caller adds them before its own. ref is the name for the report.
func (p *Parts) UseImage(ctx context.Context, store *snapshots.Store, m *snapshots.Image, ref string, pol *room.Policy, c room.Caller, writable bool, upper string) (vars []values.Var, err error) {
	if err := runnable(m); err != nil {
		return nil, err
	}
	user := pol.Outside(c)
	if p.image, err = store.HoldImage(ctx, m, user.UID, user.GID); err != nil {
		return nil, err
	}
	p.Image = &result.ReportImage{Name: ref, Digest: m.Digest, Platform: m.Platform, Writable: writable}
	p.ImageCommand = slices.Concat(m.Config.Entrypoint, m.Config.Cmd)
	root := room.Mount{Kind: room.ReadOnly, Source: p.image.Path, Dest: "/", Image: m.Digest, Owned: true}
	if writable {
		root.Kind, root.Upper = room.Overlaid, upper
	}
	pol.Mounts = append(pol.Mounts, root)
	pol.Inside = imageUser(m.Config.User)
	if dir := path.Clean(m.Config.Workdir); pol.Cwd == room.CwdNone && pol.Workdir == "" && path.IsAbs(dir) && isDir(p.image.Path, dir) {
		pol.Workdir = dir
	}
	for _, pair := range m.Config.Env {
		v, err := values.ParsePair(pair)
		if err == nil && v.Name != "HOME" && v.Name != "USER" && v.Name != "LOGNAME" && v.Name != "PWD" && v.Name != "OLDPWD" {
			vars = append(vars, v)
		}
	}
	return vars, nil
}

// runnable returns an error for an image of another platform.
func runnable(m *snapshots.Image) error {
	os, arch, _ := strings.Cut(m.Platform, "/")
	arch, _, _ = strings.Cut(arch, "/")
	if os == "linux" && (arch == runtime.GOARCH || arch == "386" && runtime.GOARCH == "amd64") {
		return nil
	}
	return &result.Error{Code: "platform", Message: fmt.Sprintf("image %s is for %s, but this machine is linux/%s", m.Title(), m.Platform, runtime.GOARCH),
		Hint: "pull or import it for this platform"}
}

// imageUser returns the numeric USER of an image, UID[:GID], or nil for none and for a name.
func imageUser(text string) *room.User {
	uid, gid, found := strings.Cut(text, ":")
	if !found {
		gid = uid
	}
	u, err := strconv.ParseUint(uid, 10, 31)
	g, err2 := strconv.ParseUint(gid, 10, 31)
	if err != nil || err2 != nil {
		return nil
	}
	return &room.User{UID: uint32(u), GID: uint32(g)}
}

// isDir reports whether a path leads to a directory of a tree.
func isDir(tree, dir string) bool {
	root, err := os.Open(tree)
	if err != nil {
		return false
	}
	defer root.Close()
	fd, err := safeopen.InRoot(int(root.Fd()), dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false
	}
	return unix.Close(fd) == nil
}
