package room

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// protect adds a mount for each existing path of a repository, and for the directories above it.
func TestProtect(t *testing.T) {
	top := laidOut(t, "repo/.git/hooks/", "repo/.git/config", "repo/.git/config.worktree", "repo/sub/.git", "repo/sub/deep/", "empty/.git/config", "plain/a/b",
		"nothing/.git/HEAD", "bare/HEAD", "bare/objects/", "bare/refs/", "bare/config", "bare/hooks/", "linked/.git/hooks -> ../../x", "link/.git -> ../repo/.git")
	harness.Must(t, os.MkdirAll(top+"/worktree/.git", 0o755))
	harness.Must(t, os.WriteFile(top+"/worktree/.git/config", []byte("[extensions]\n\tworktreeConfig = true\n"), 0o644))
	tests := []struct {
		name, bind string
		workdir    string
		paths      []string
		want       []string // kind and place of what is added
		err        string
	}{
		{name: "repository", bind: "repo", want: []string{"1 /.git", "0 /.git/config", "0 /.git/config.worktree", "0 /.git/hooks"}},
		{name: "and below", bind: "repo", workdir: "/sub/deep", want: []string{"1 /.git", "0 /.git/config", "0 /.git/config.worktree", "0 /.git/hooks", "1 /sub", "0 /sub/.git"}},
		{name: "without hooks", bind: "empty", want: []string{"1 /.git", "0 /.git/config", "2 /.git/hooks"}},
		{name: "without a configuration", bind: "nothing", want: []string{"1 /.git", "3 /.git/config", "2 /.git/hooks"}},
		{name: "with a configuration of the worktree that is missing", bind: "worktree", want: []string{"1 /.git", "0 /.git/config", "3 /.git/config.worktree", "2 /.git/hooks"}},
		{name: "git directory", bind: "bare", want: []string{"0 /config", "0 /hooks"}},
		{name: "none", bind: "plain"},
		{name: "path", bind: "plain", paths: []string{"/m/a/b"}, want: []string{"1 /a", "0 /a/b"}},
		{name: "all of .git", bind: "repo", paths: []string{"/m/.git"}, want: []string{"0 /.git"}},
		{name: "twice", bind: "plain", paths: []string{"/m/a", "/m/a/b", "/m/a"}, want: []string{"0 /a"}},
		{name: "linked hooks", bind: "linked", err: fmt.Sprintf("cannot protect %q: it is a symbolic link", top+"/linked/.git/hooks")},
		{name: "linked repository", bind: "link", err: fmt.Sprintf("cannot protect %q: it is a symbolic link", top+"/link/.git")},
		{name: "missing", bind: "plain", paths: []string{"/m/x"}, err: fmt.Sprintf("cannot protect %q: no such file or directory", top+"/plain/x")},
		{name: "the bind itself", bind: "plain", paths: []string{"/m"}, err: `--protect "/m": it is not below a directory of the host that the command may write to`},
		{name: "elsewhere", bind: "plain", paths: []string{"/usr/bin"}, err: `--protect "/usr/bin": it is not below a directory of the host that the command may write to`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := Policy{Mounts: []Mount{{Kind: ReadWrite, Git: true, Source: top + "/" + tt.bind, Dest: "/m"}}, Protect: tt.paths}
			err := p.protect("/m" + tt.workdir)
			if tt.err != "" {
				var e *result.Error
				if !errors.As(err, &e) || e.Message != tt.err || e.Hint == "" {
					t.Errorf("got %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range p.Mounts[1:] {
				rel := m.Dest[len("/m"):]
				if m.Kind != Tmpfs && m.Kind != Empty && m.Source != top+"/"+tt.bind+rel {
					t.Errorf("%s shows %s", m.Dest, m.Source)
				}
				got = append(got, fmt.Sprint(int(m.Kind), " ", rel))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
