package obstacle

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The hint for a failed command names the most likely restriction and the flag that removes it.
func TestObstacle(t *testing.T) {
	top := laidOut(t, "repo/.git/", "repo/sub/", "repo/lib/file", "repo/.secret", "plain/", "homes/me/work/", "homes/me/.git/", "homes/me/.ssh/key", "homes/me/data")
	check.Must(t, errors.Join(os.Mkdir(top+"/setgid", 0o755), os.Chmod(top+"/setgid", 0o755|os.ModeSetgid)))
	caller := room.Caller{Path: "/usr/bin:/bin", Home: top + "/homes/me", UID: 1000, GID: 1000}
	const write, none = "-w lets it write there", "--ro-bind NAME shows"
	for _, tt := range []struct {
		name, dir string
		policy    room.Policy
		command   string
		failure   Failure
		path      string
		want      string // substring; "" for no hint
	}{
		{name: "read-only", dir: "plain", command: "make", failure: Failure{Code: 2}, want: write},
		{name: "writable", dir: "plain", policy: room.Policy{Cwd: room.CwdReadWrite}, command: "make", failure: Failure{Code: 2}},
		{name: "an answer", dir: "plain", command: "grep x y", failure: Failure{Code: 1}},
		{name: "what never writes", dir: "plain", command: "grep x y", failure: Failure{Code: 2}},
		{name: "what never writes, and cannot see anything", dir: "plain", policy: room.Policy{Cwd: room.CwdNone}, command: "cat x", failure: Failure{Code: 1}, want: none},
		{name: "a script that is nowhere", dir: "plain", command: "python3 none.py", failure: Failure{Code: 2}},
		{name: "a script that is there", dir: "repo/lib", command: "python3 file", failure: Failure{Code: 1}},
		{name: "a script from stdin", dir: "plain", command: "python3 -", failure: Failure{Code: 1}},
		{name: "inline code that writes", dir: "plain", command: "python3 -c open('x','w').write('')", failure: Failure{Code: 1}, want: write},
		{name: "inline code that reads", dir: "plain", command: "python3 -c open('x')", failure: Failure{Code: 1}},
		{name: "a redirection", dir: "plain", command: "sh -c date>x", failure: Failure{Code: 2}, want: write},
		{name: "a redirection to /dev/null", dir: "plain", command: "sh -c false>/dev/null", failure: Failure{Code: 1}},
		{name: "process substitution", dir: "plain", command: "diff /dev/fd/63 /dev/fd/62", failure: Failure{Code: 2}, want: "/dev/fd/63, as of <(COMMAND), is not passed"},
		{name: "standard descriptors", dir: "plain", command: "cat /dev/fd/0", failure: Failure{Code: 1}},
		{name: "git mv in an overlay", dir: "plain", policy: room.Policy{Cwd: room.CwdOverlay}, command: "git mv a b", failure: Failure{Code: 128}, want: "mv OLD NEW && git add -A"},
		{name: "git mv in a writable directory", dir: "plain", policy: room.Policy{Cwd: room.CwdReadWrite}, command: "git mv a b", failure: Failure{Code: 128}},
		{name: "cp in a setgid directory", dir: "setgid", policy: room.Policy{Cwd: room.CwdReadWrite}, command: "cp -a a b", failure: Failure{Code: 1}, want: "cp -a --no-preserve=mode"},
		{name: "cp elsewhere", dir: "plain", policy: room.Policy{Cwd: room.CwdReadWrite}, command: "cp -a a b", failure: Failure{Code: 1}},
		{name: "the system", dir: "/usr/share", command: "make", failure: Failure{Code: 2}},
		{name: "no network", dir: "plain", command: "make", failure: Failure{Code: 2, Network: true}, want: "--net allow=HOST"},
		{name: "no network but by a proxy", dir: "plain", command: "make", failure: Failure{Code: 2, Network: true, Listed: true}, want: "without the proxy"},
		{name: "tasks", dir: "plain", command: "sh", failure: Failure{Code: 2, Tasks: 4}, want: "the limit on tasks was reached (--pids 4); a larger one lets it start more"},
		{name: "nothing shown", dir: "plain", policy: room.Policy{Cwd: room.CwdNone}, command: "make", failure: Failure{Code: 2}, want: none},
		{name: "started elsewhere", dir: "plain", policy: room.Policy{Workdir: "/tmp"}, command: "make", failure: Failure{Code: 2}},
		{name: "PATH", dir: "plain", command: "sh", failure: Failure{Code: 127}, path: "TOP/repo/lib", want: "--tools"},
		{name: "PATH, all shown", dir: "plain", command: "sh", failure: Failure{Code: 127}, want: ""},
		{name: "PATH, nothing there", dir: "plain", command: "sh", failure: Failure{Code: 127}, path: "TOP/none", want: ""},
		{name: "PATH, the command was found", dir: "plain", command: "sh", failure: Failure{Code: 1}, path: "TOP/repo/lib", want: ""},
		{name: "beside", dir: "repo/sub", command: "cat ../lib/file", failure: Failure{Code: 1}, want: `TOP/repo/lib/file" is not shown in the sandbox; --cwd-root TOP/repo shows`},
		{name: "elsewhere", dir: "plain", command: "cat --in=TOP/repo/lib/file", failure: Failure{Code: 1}, want: `--ro-bind TOP/repo/lib/file`},
		{name: "nowhere", dir: "plain", command: "cp TOP/repo/none ../none", failure: Failure{Code: 1}, want: write},
		{name: "what could be a secret", dir: "plain", command: "cat TOP/repo/.secret", failure: Failure{Code: 1}, want: `TOP/repo/.secret" is not shown in the sandbox`},
		{name: "a key", dir: "homes/me/work", command: "cat ../.ssh/key", failure: Failure{Code: 1}, want: `TOP/homes/me/.ssh/key" is not shown in the sandbox`},
		{name: "of the home directory", dir: "homes/me/work", command: "cat ../data", failure: Failure{Code: 1}, want: `--ro-bind TOP/homes/me/data shows it`},
		{name: "the home directory", dir: "plain", command: "ls TOP/homes/me", failure: Failure{Code: 1}, want: "a home directory; " + none},
		{name: "git below the top", dir: "repo/sub", command: "git log", failure: Failure{Code: 128}, want: "--cwd-root TOP/repo "},
		{name: "git at the top", dir: "repo", command: "git commit", failure: Failure{Code: 128}, want: write},
		{name: "git of a home directory", dir: "homes/me/work", command: "git log", failure: Failure{Code: 128}, want: write},
	} {
		t.Run(tt.name, func(t *testing.T) {
			full := func(s string) string { return strings.ReplaceAll(s, "TOP", top) }
			if tt.dir[0] != '/' {
				tt.dir = top + "/" + tt.dir
			}
			t.Chdir(tt.dir)
			tt.policy.Command = append([]string{"true"}, strings.Fields(full(tt.command))[1:]...)
			c := caller
			if tt.path != "" {
				c.Path += ":" + full(tt.path)
			}
			real := c
			real.Path = os.Getenv("PATH") // where bwrap is
			if tt.path != "" {
				real.Path += ":" + full(tt.path)
			}
			plan, err := room.Prepare(tt.policy, real)
			check.Must(t, err)
			defer plan.Close()
			entry := plan.Entry()
			entry.Command[0] = strings.Fields(tt.command)[0]
			what, remedy := Find(entry, plan, tt.failure, c)
			got, want := strings.TrimSuffix(what+"; "+remedy, "; "), full(tt.want)
			check.That(t, (want != "" || got == "") && strings.Contains(got, want), "got %q, want %q", got, want)
			check.That(t, !strings.HasSuffix(want, "is not shown in the sandbox") || strings.HasSuffix(got, want), "got %q: it offers a secret", got)
			check.That(t, !strings.Contains(got, "--ro-bind "+c.Home+" ") && !strings.Contains(got, "--cwd-root "+c.Home+" "), "got %q: it offers a home directory", got)
		})
	}
}

// laidOut returns a directory with these empty files and, with a slash at the end, directories.
func laidOut(t *testing.T, names ...string) string {
	t.Helper()
	top, err := filepath.EvalSymlinks(t.TempDir())
	check.Must(t, err)
	for _, name := range names {
		p := filepath.Join(top, name)
		check.Must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		if strings.HasSuffix(name, "/") {
			check.Must(t, os.MkdirAll(p, 0o755))
		} else {
			check.Must(t, os.WriteFile(p, nil, 0o755))
		}
	}
	return top
}
