package room

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// protect adds a mount for each existing path of a repository, and for the directories above it.
func TestProtect(t *testing.T) {
	top := laidOut(t, "repo/.git/hooks/", "repo/.git/config", "repo/.git/config.worktree", "repo/sub/.git", "repo/sub/deep/", "empty/.git/config", "plain/a/b",
		"nothing/.git/HEAD", "bare/HEAD", "bare/objects/", "bare/refs/", "bare/config", "bare/hooks/", "linked/.git/hooks -> ../../x", "link/.git -> ../repo/.git")
	check.Must(t, os.MkdirAll(top+"/worktree/.git", 0o755))
	check.Must(t, os.WriteFile(top+"/worktree/.git/config", []byte("[extensions]\n\tworktreeConfig = true\n"), 0o644))
	tests := []struct {
		name, bind string
		workdir    string
		paths      []string
		want       []string // kind and place of the added mounts
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
				check.That(t, errors.As(err, &e) && e.Message == tt.err && e.Hint != "", "got %v, want %s", err, tt.err)
				return
			}
			check.Must(t, err)
			var got []string
			for _, m := range p.Mounts[1:] {
				rel := m.Dest[len("/m"):]
				check.That(t, m.Kind == Tmpfs || m.Kind == Empty || m.Source == top+"/"+tt.bind+rel, "%s shows %s", m.Dest, m.Source)
				got = append(got, fmt.Sprint(int(m.Kind), " ", rel))
			}
			check.NoDiff(t, cmp.Diff(tt.want, got), "(-want +got)")
		})
	}
}

// The repository that a file .git names is protected if it is below the bind as well.
func TestProtectNamed(t *testing.T) {
	top := laidOut(t, "m/main/.git/HEAD", "m/main/.git/config", "m/main/.git/hooks/", "m/main/.git/objects/", "m/main/.git/worktrees/wt/HEAD", "m/main/.git/modules/sub/HEAD", "m/main/.git/modules/sub/config", "m/main/.git/modules/sub/hooks/", "out/HEAD")
	for name, text := range map[string]string{"wt/.git": "gitdir: " + top + "/m/main/.git/worktrees/wt\n", "main/.git/worktrees/wt/commondir": "../..\n", "sub/.git": "gitdir: ../main/.git/modules/sub\n",
		"away/.git": "gitdir: ../../out\n", "none/.git": "gitdir: ../main/.git/none\n", "odd/.git": "x"} {
		check.Must(t, os.MkdirAll(filepath.Dir(top+"/m/"+name), 0o755))
		check.Must(t, os.WriteFile(top+"/m/"+name, []byte(text), 0o644))
	}
	for workdir, want := range map[string][]string{
		"wt":   {"1 /wt", "0 /wt/.git", "1 /main", "1 /main/.git", "1 /main/.git/worktrees", "1 /main/.git/worktrees/wt", "0 /main/.git/worktrees/wt/commondir", "0 /main/.git/config", "0 /main/.git/hooks"},
		"sub":  {"1 /sub", "0 /sub/.git", "1 /main", "1 /main/.git", "1 /main/.git/modules", "1 /main/.git/modules/sub", "0 /main/.git/modules/sub/config", "0 /main/.git/modules/sub/hooks"},
		"away": {"1 /away", "0 /away/.git"}, "none": {"1 /none", "0 /none/.git"}, "odd": {"1 /odd", "0 /odd/.git"},
	} {
		p := Policy{Mounts: []Mount{{Kind: ReadWrite, Git: true, Source: top + "/m", Dest: "/m"}}}
		check.Must(t, p.protect("/m/"+workdir))
		var got []string
		for _, m := range p.Mounts[1:] {
			got = append(got, fmt.Sprint(int(m.Kind), " ", m.Dest[len("/m"):]))
		}
		check.NoDiff(t, cmp.Diff(want, got), "%s (-want +got)", workdir)
	}
}
