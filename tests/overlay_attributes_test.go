package tests

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// Attributes of overlayfs that a command has set through a writable bind hide no file in the
// directory below an overlay: files with metacopy are listed and refused (EPERM), others are
// unaffected. diff and apply work as without them.
func TestOverlayAttributes(t *testing.T) {
	t.Parallel()
	attributes := map[string]string{"opaque": "x", "whiteout": "y", "redirect": "/file", "origin": "x", "impure": "y", "metacopy": "", "overlay.opaque": "y"}
	for name, value := range attributes {
		dir, s := original(t), harness.NewState(t)
		for _, path := range []string{".", "file", "sub", "sub/deep"} {
			err := unix.Setxattr(filepath.Join(dir, path), "user.overlay."+name, []byte(value), 0)
			if errors.Is(err, unix.EOPNOTSUPP) {
				return // the file system has no user attributes
			}
			harness.Must(t, err)
		}
		b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
		r := b.Exec(harness.Options{}, nil, "sh", "-c", "ls . sub; cat file sub/deep; echo new >sub/new; rm -r sub/deep; mkdir made")
		got := string(r.Stdout)
		if !strings.HasPrefix(got, ".:\nfile\nsub\n\nsub:\ndeep\n") || !strings.HasSuffix(got, "old\ndeep\n") && (name != "metacopy" || !strings.Contains(string(r.Stderr), "Operation not permitted")) {
			t.Errorf("%s: %q, %s", name, got, r.Stderr)
		}
		want := "A made/\nD sub/deep\nA sub/new\n"
		if name == "metacopy" && strings.Contains(string(r.Stderr), "cannot remove") {
			want = "A made/\nA sub/new\n"
		}
		if got, _ := text(t, s, 0, "diff", "agent"); got != want {
			t.Errorf("%s: diff: %q, want %q", name, got, want)
		}
		text(t, s, 0, "apply", "agent", "--delete")
		holds(t, dir+"/file", "old\n")
		holds(t, dir+"/sub/new", "new\n")
		if _, err := os.Stat(dir + "/sub/deep"); (err == nil) != (want != "A made/\nD sub/deep\nA sub/new\n") {
			t.Errorf("%s: %v", name, err)
		}
		if n, err := unix.Getxattr(dir+"/sub/new", "user.overlay."+name, nil); err == nil {
			t.Errorf("%s: the applied file has the attribute, of %d bytes", name, n)
		}
	}
}
