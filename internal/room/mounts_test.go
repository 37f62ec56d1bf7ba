package room

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A link that a payload leaves in a writable bind is not followed when the next run mounts something there. Otherwise
// bwrap would create directories and files on the host.
func TestPrepareLinkPlantedAtAMount(t *testing.T) {
	top := laidOut(t,
		"host/there/", "file",
		"w/dir/sub/", "w/dir/to-host -> TOP/host", "w/dir/sub/up -> ../..",
		"w/absolute -> TOP/host", "w/relative -> ../host", "w/inside -> dir", "w/dangling -> none", "w/loop -> loop", "w/old -> /oldroot/tmp", "w/file -> TOP/file",
		"w/sbxrun -> ../file", "w/\x1b[2J -> dir",
		"ro/dir/", "ro/link -> dir",
	)
	w := Mount{Kind: ReadWrite, Source: top + "/w", Dest: "/w"}
	ro := Mount{Kind: ReadOnly, Source: top + "/ro", Dest: "/ro"}
	kinds := []Mount{{Kind: Tmpfs}, {Kind: ReadOnly, Source: top + "/host"}, {Kind: ReadWrite, Source: top + "/host"}, {Kind: ReadOnly, Source: top + "/file"}}
	tests := []struct {
		dest string
		link string // rejected link, as in the message
		in   []Mount
	}{
		{"/w/absolute", top + "/w/absolute", []Mount{w}},
		{"/w/absolute/new", top + "/w/absolute", []Mount{w}},
		{"/w/absolute/there", top + "/w/absolute", []Mount{w}},
		{"/w/absolute/there/new/deep", top + "/w/absolute", []Mount{w}},
		{"/w/relative/new", top + "/w/relative", []Mount{w}},
		{"/w/inside", top + "/w/inside", []Mount{w}}, // may lead elsewhere by the time of the mount
		{"/w/inside/sub", top + "/w/inside", []Mount{w}},
		{"/w/dangling", top + "/w/dangling", []Mount{w}},
		{"/w/dangling/new", top + "/w/dangling", []Mount{w}},
		{"/w/loop/new", top + "/w/loop", []Mount{w}},
		{"/w/old/new", top + "/w/old", []Mount{w}},
		{"/w/file", top + "/w/file", []Mount{w}},
		{"/w/dir/to-host/new", top + "/w/dir/to-host", []Mount{w}},
		{"/w/dir/sub/up/new", top + "/w/dir/sub/up", []Mount{w}},
		{"/w/\x1b[2J/new", top + "/w/\x1b[2J", []Mount{w}},
		// In a writable bind that is itself in another mount.
		{"/x/in/w/absolute/new", top + "/w/absolute", []Mount{{Kind: Tmpfs, Dest: "/x"}, {Kind: ReadWrite, Source: top + "/w", Dest: "/x/in/w"}}},
		{"/ro/dir/absolute/new", top + "/w/absolute", []Mount{ro, {Kind: ReadWrite, Source: top + "/w", Dest: "/ro/dir"}}},
		// A mount is rejected if its destination is visible only through another mount.
		{"/w/dir/absolute", top + "/w/absolute", []Mount{w, {Kind: ReadWrite, Source: top + "/w", Dest: "/w/dir"}}},
		{"/ro/link", top + "/ro/link", []Mount{ro}},
		{"/ro/link/new", top + "/ro/link", []Mount{ro}},
	}
	for _, tt := range tests {
		for _, m := range kinds {
			m.Dest = tt.dest
			for _, uid := range []int{1000, 0} {
				plan, err := Prepare(Policy{Command: []string{"true"}, Workdir: "/tmp", Mounts: append([]Mount{m}, tt.in...)}, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: uid, GID: uid})
				var e *result.Error
				want := fmt.Sprintf("cannot mount at %q: %q is a symbolic link", tt.dest, tt.link)
				check.That(t, plan == nil && errors.As(err, &e) && e.Code == "bind-destination" && e.Message == want && e.Hint != "",
					"kind %d, uid %d: got %v, %v; want %s", m.Kind, uid, plan, err, want)
			}
		}
	}
	check.Equal(t, filesBelow(t, top+"/host"), "there", "made on the host")
}

// Links that bwrap creates, such as /bin, are rejected as well.
func TestCheckDestsLinkOfBwrap(t *testing.T) {
	ops := []op{
		{kind: opSymlink, dst: "/bin", src: "usr/bin"},
		{kind: opSymlink, dst: "/lib", src: "/usr/lib"},
		{kind: opBind, dst: "/usr", src: "/usr"},
		{kind: opTmpfs, dst: "/tmp"},
	}
	for dest, link := range map[string]string{
		"/bin/x": "/bin", "/bin/x/y": "/bin", "/bin/sh": "/bin", "/lib/x": "/lib",
		"/tmp/x": "", "/binary": "", "/x/bin": "", "/usr/bin": "",
	} {
		for _, kind := range []opKind{opBind, opBindRW, opTmpfs} {
			all := append(ops[:len(ops):len(ops)], op{kind: kind, dst: dest, src: "/usr"})
			err := checkDests(all, all)
			var e *result.Error
			switch {
			case link == "" && err != nil:
				t.Errorf("%s: %v", dest, err)
			case link != "" && (!errors.As(err, &e) || e.Code != "bind-destination" || !strings.Contains(e.Message, link+" is a symbolic link in the sandbox")):
				t.Errorf("%s: got %v, want that %s is a link", dest, err, link)
			}
		}
	}
}

// filesBelow lists the files below a directory, separated by blanks.
func filesBelow(t *testing.T, dir string) string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if path != dir {
			names = append(names, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	check.Must(t, err)
	return strings.Join(names, " ")
}
