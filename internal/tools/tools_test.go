package tools

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
)

// host makes a host's files: "dir/", "program*", "name -> target", or a file with the rest
// as text. TOP is the directory that it returns.
func host(t *testing.T, entries ...string) string {
	t.Helper()
	top, err := filepath.EvalSymlinks(t.TempDir())
	check.Must(t, err)
	for _, e := range entries {
		e = strings.ReplaceAll(e, "TOP", top)
		link, target, isLink := strings.Cut(e, " -> ")
		name, text, _ := strings.Cut(link, "=")
		name = filepath.Join(top, strings.TrimPrefix(strings.TrimRight(name, "*/"), top))
		err := os.MkdirAll(filepath.Dir(name), 0o755)
		if err == nil {
			switch {
			case isLink:
				err = os.Symlink(target, name)
			case strings.HasSuffix(e, "/"):
				err = os.MkdirAll(name, 0o755)
			case strings.HasSuffix(e, "*"):
				err = os.WriteFile(name, []byte("#!/bin/sh\n"), 0o755)
			default:
				err = os.WriteFile(name, []byte(text), 0o755)
			}
		}
		check.Must(t, err)
	}
	return top
}

func TestFind(t *testing.T) {
	tests := []struct {
		name  string
		files []string
		path  string
		env   map[string]string
		shown string // below this everything is shown anyway

		want []string // shown, and covered with a - before it
		vars []string
		dirs string // PATH; "" for path
	}{
		{name: "nothing", path: "/usr/bin:/bin"},
		{name: "pyenv", files: []string{"me/.pyenv/shims/python3*", "me/.pyenv/versions/3.12/bin/python3*", "me/.pyenv/bin/pyenv*", "me/.ssh/id"}, path: "TOP/me/.pyenv/shims:TOP/me/.pyenv/bin:/usr/bin",
			env: map[string]string{"PYENV_VERSION": "3.12"}, want: []string{"me/.pyenv"}, vars: []string{"PYENV_ROOT=TOP/me/.pyenv", "PYENV_VERSION=3.12"}},
		{name: "a venv of a pyenv python", path: "TOP/me/work/.venv/bin:/usr/bin",
			files: []string{"me/work/.venv/bin/python -> python3", "me/work/.venv/bin/python3 -> TOP/me/.pyenv/versions/3.12/bin/python3", "me/work/.venv/pyvenv.cfg=home = TOP/me/.pyenv/versions/3.12/bin\n",
				"me/work/.venv/pip.conf=token", "me/work/.env=token", "me/.pyenv/versions/3.12/bin/python3 -> python3.12", "me/.pyenv/versions/3.12/bin/python3.12*"},
			env: map[string]string{"VIRTUAL_ENV": "TOP/me/work/.venv"}, want: []string{"me/.pyenv/versions/3.12", "me/work/.venv", "-me/work/.venv/pip.conf"}, vars: []string{"VIRTUAL_ENV=TOP/me/work/.venv"}},
		{name: "a venv in what is shown", path: "TOP/me/work/.venv/bin:/usr/bin", shown: "me/work",
			files: []string{"me/work/.venv/bin/python3 -> TOP/me/.local/share/uv/python/cpython-3.12/bin/python3.12", "me/work/.venv/pyvenv.cfg=", "me/.local/share/uv/python/cpython-3.12/bin/python3.12*", "me/.local/share/uv/python/cpython-3.12/lib/x"},
			want:  []string{"me/.local/share/uv/python/cpython-3.12/bin", "me/.local/share/uv/python/cpython-3.12/lib"}},
		{name: "a link from what is shown to a directory of the user's", path: "TOP/me/work/bin:TOP/me/work/.venv/bin:TOP/me/work/node_modules/.bin", shown: "me/work",
			env:   map[string]string{"VIRTUAL_ENV": "TOP/me/work/.venv"},
			files: []string{"me/notes/python*", "me/notes/bin/x*", "me/work/bin -> ../notes", "me/work/.venv -> ../notes", "me/work/node_modules/.bin -> ../../notes"}},
		{name: "links from what is shown to programs of the user's", path: "TOP/me/work/bin:TOP/me/work/.venv/bin", shown: "me/work",
			files: []string{"me/infra/deploy*", "me/infra/bin/run*", "me/work/bin/deploy -> TOP/me/infra/deploy", "me/work/bin/run -> ../../infra/bin/run", "me/work/bin/script=#!TOP/me/infra/bin/run\n",
				"me/work/.venv/pyvenv.cfg=home = TOP/me/infra\n", "me/work/.venv/bin/x*", "me/infra/python3 -> deploy"}},
		{name: "a link from what is shown to a toolchain", path: "TOP/me/work/bin", shown: "me/work", files: []string{"me/.nvm/versions/v20/bin/node*", "me/work/bin/node -> TOP/me/.nvm/versions/v20/bin/node"},
			want: []string{"me/.nvm/versions/v20"}},
		{name: "nvm", files: []string{"me/.nvm/versions/node/v20/bin/node*", "me/.nvm/versions/node/v20/etc/npmrc=token", "me/.npmrc=token"}, path: "TOP/me/.nvm/versions/node/v20/bin:/usr/bin",
			want: []string{"me/.nvm/versions/node/v20", "-me/.nvm/versions/node/v20/etc/npmrc"}},
		{name: "fnm", files: []string{"run/multishell -> TOP/me/.local/share/fnm/node-versions/v20/installation", "me/.local/share/fnm/node-versions/v20/installation/bin/node*", "me/.local/share/fnm/node-versions/v20/installation/include/node/node.h", "me/.local/share/keyrings/x"},
			path: "TOP/run/multishell/bin:/usr/bin", want: []string{"me/.local/share/fnm/node-versions/v20/installation"}, dirs: "TOP/me/.local/share/fnm/node-versions/v20/installation/bin:/usr/bin"},
		{name: "volta", files: []string{"me/.volta/bin/node -> volta-shim", "me/.volta/bin/volta-shim*", "me/.volta/tools/image/"}, path: "TOP/me/.volta/bin", want: []string{"me/.volta"}, vars: []string{"VOLTA_HOME=TOP/me/.volta"}},
		{name: "rustup", files: []string{"me/.cargo/bin/cargo*", "me/.cargo/bin/rustup*", "me/.cargo/credentials.toml=token", "me/.rustup/toolchains/stable/bin/rustc*"}, path: "TOP/me/.cargo/bin",
			want: []string{"me/.cargo", "me/.rustup", "-me/.cargo/credentials.toml"}, vars: []string{"RUSTUP_HOME=TOP/me/.rustup", "CARGO_HOME=TOP/me/.cargo"}},
		{name: "go", files: []string{"sdk/go/bin/go*", "sdk/go/VERSION=go1.25", "me/go/pkg/mod/cache/x", "me/go/src/secret"}, path: "TOP/sdk/go/bin", env: map[string]string{"GOROOT": "TOP/sdk/go"},
			want: []string{"me/go/pkg/mod", "sdk/go"}, vars: []string{"GOMODCACHE=TOP/me/go/pkg/mod", "GOROOT=TOP/sdk/go"}},
		{name: "sdkman", files: []string{"me/.sdkman/candidates/java/current -> 17", "me/.sdkman/candidates/java/17/bin/java*", "me/.sdkman/candidates/java/17/conf/x", "me/.sdkman/candidates/java/17/release=JAVA_VERSION=\"17\""}, path: "TOP/me/.sdkman/candidates/java/current/bin",
			env: map[string]string{"JAVA_HOME": "TOP/me/.sdkman/candidates/java/current"}, want: []string{"me/.sdkman/candidates/java/17"}, vars: []string{"JAVA_HOME=TOP/me/.sdkman/candidates/java/17"},
			dirs: "TOP/me/.sdkman/candidates/java/17/bin"},
		{name: "conda", files: []string{"me/mini/bin/conda*", "me/mini/conda-meta/", "me/mini/lib/x", "me/mini/.condarc=token"}, path: "TOP/me/mini/bin", env: map[string]string{"CONDA_PREFIX": "TOP/me/mini"},
			want: []string{"me/mini", "-me/mini/.condarc"}, vars: []string{"CONDA_PREFIX=TOP/me/mini"}},
		{name: "pipx and pip --user", path: "TOP/me/.local/bin:/usr/bin",
			files: []string{"me/.local/bin/tool -> TOP/me/.local/share/pipx/venvs/tool/bin/tool", "me/.local/share/pipx/venvs/tool/bin/tool=#!TOP/me/.local/share/pipx/venvs/tool/bin/python\n",
				"me/.local/share/pipx/venvs/tool/bin/python -> /usr/bin/python3", "me/.local/share/pipx/venvs/tool/pyvenv.cfg=", "me/.local/share/keyrings/x", "me/.local/lib/python3.11/site-packages/x", "me/.local/bin/python3*"},
			want: []string{"me/.local/bin", "me/.local/lib", "me/.local/share/pipx/venvs/tool"}, vars: []string{"PYTHONUSERBASE=TOP/me/.local"}},
		{name: "an interpreter elsewhere", files: []string{"me/bin/script=#!TOP/lang/v1/bin/lang -x\n", "lang/v1/bin/lang*", "me/.netrc"}, path: "TOP/me/bin", want: []string{"lang/v1/bin", "me/bin"}},
		{name: "another tool's home has more than tools", files: []string{"me/.fly/bin/fly*", "me/.fly/config.yml=token", "me/.fly/lib/x"}, path: "TOP/me/.fly/bin", want: []string{"me/.fly/bin", "me/.fly/lib"}},
		{name: "the user's own work", files: []string{"me/src/project/bin/run*", "me/src/project/.git/config", "me/src/project/lib/x"}, path: "TOP/me/src/project/bin", want: []string{"me/src/project/bin", "me/src/project/lib"}},
		{name: "a home directory as PATH", files: []string{"me/tool*", "me/.ssh/id"}, path: "TOP/me:TOP:/"},
		{name: "a link to a home directory", files: []string{"me/.ssh/id", "x/bin/home -> TOP/me", "x/bin/key -> TOP/me/.ssh/id"}, path: "TOP/x/bin", want: []string{"x/bin"}},
		{name: "a secret place as PATH", files: []string{"me/.ssh/bin/tool*", "me/.config/tool/bin/tool*", "me/bin/tool -> TOP/me/.config/tool/bin/tool"}, path: "TOP/me/.ssh/bin:TOP/me/bin", want: []string{"me/bin"}},
		{name: "relative and missing ones", files: []string{"me/x"}, path: ".::TOP/none", dirs: "TOP/none"},
		{name: "a covered link", files: []string{"x/y/bin/a*", "x/y/pyvenv.cfg=", "x/y/.npmrc -> TOP/x/y/real", "x/y/real=token", "x/y/.config/z"}, path: "TOP/x/y/bin", want: []string{"x/y", "-x/y/.config", "-x/y/real"}},
		{name: "a project without a repository", files: []string{"me/src/infra/bin/run*", "me/src/infra/lib/x", "me/src/infra/keys/id_rsa=key", "me/src/infra/terraform.tfstate=token", "me/src/infra/share/x"}, path: "TOP/me/src/infra/bin",
			want: []string{"me/src/infra/bin", "me/src/infra/lib", "me/src/infra/share"}},
		{name: "below a repository", files: []string{"me/src/.git/config", "me/src/infra/bin/run*", "me/src/infra/libexec/x", "me/src/infra/share/x", "me/src/infra/include/x"}, path: "TOP/me/src/infra/bin",
			want: []string{"me/src/infra/bin", "me/src/infra/libexec"}},
		{name: "a venv that is a repository", files: []string{"me/src/infra/.git/config", "me/src/infra/pyvenv.cfg=", "me/src/infra/bin/run*", "me/src/infra/keys/x"}, path: "TOP/me/src/infra/bin", want: []string{"me/src/infra/bin"}},
		{name: "a directory with programs and more", files: []string{"me/src/infra/run*", "me/src/infra/keys/x", "me/src/infra/lib/y", "me/src/infra/id_ed25519=key"}, path: "TOP/me/src/infra",
			want: []string{"me/src/infra", "-me/src/infra/id_ed25519", "-me/src/infra/keys"}},
		{name: "a program that a link leads to", files: []string{"me/bin/run -> TOP/me/src/infra/tools/run", "me/src/infra/tools/run*", "me/src/infra/tools/key=x", "me/bin/ps -> TOP/opt/ps/7/pwsh", "opt/ps/7/pwsh*", "opt/ps/7/pwsh.deps.json", "opt/ps/7/Modules/x"},
			path: "TOP/me/bin", want: []string{"me/bin", "opt/ps/7", "me/src/infra/tools/run"}},
		{name: "a link into a covered directory", files: []string{"me/src/x/run -> tools/run", "me/src/x/tools/run*", "me/src/x/tools/key=x"}, path: "TOP/me/src/x", want: []string{"me/src/x", "-me/src/x/tools", "me/src/x/tools/run"}},
		{name: "secrets at every depth", path: "TOP/me/.pyenv/shims:TOP/me/.dotnet:TOP/me/.cargo/bin",
			files: []string{"me/.pyenv/shims/python3*", "me/.pyenv/versions/3.12/pip.conf=token", "me/.pyenv/versions/3.12/lib/python3.12/test/key.pem=PRIVATE KEY", "me/.pyenv/.git/config", "me/.pyenv/plugins/x/.git/config", "me/.pyenv/plugins/x/a/b/c/.netrc",
				"me/.dotnet/dotnet*", "me/.dotnet/corefx/cryptography/x509stores/my/A.pfx", "me/.dotnet/tools/deep/er/NuGet.Config", "me/.dotnet/tools/key.pem=x PRIVATE KEY", "me/.dotnet/tools/ca.pem=CERTIFICATE", "me/.dotnet/tools/id_rsa", "me/.dotnet/tools/id_rsa.pub",
				"me/.cargo/bin/cargo*", "me/.cargo/config.toml=token", "me/.cargo/config=token", "me/.cargo/registry/src/x/config.toml"},
			want: []string{"me/.cargo", "me/.dotnet", "me/.pyenv", "-me/.cargo/config", "-me/.cargo/config.toml", "-me/.dotnet/corefx/cryptography/x509stores", "-me/.dotnet/tools/deep/er/NuGet.Config", "-me/.dotnet/tools/id_rsa", "-me/.dotnet/tools/key.pem",
				"-me/.pyenv/.git", "-me/.pyenv/plugins/x/.git", "-me/.pyenv/plugins/x/a/b/c/.netrc", "-me/.pyenv/versions/3.12/pip.conf"},
			vars: []string{"CARGO_HOME=TOP/me/.cargo", "PYENV_ROOT=TOP/me/.pyenv"}},
		{name: "modules of node", files: []string{"me/src/app/node_modules/.bin/tsc -> ../typescript/bin/tsc", "me/src/app/node_modules/typescript/bin/tsc*", "me/src/app/secret"}, path: "TOP/me/src/app/node_modules/.bin", want: []string{"me/src/app/node_modules"}},
		{name: "a venv whose interpreter is somewhere else", files: []string{"me/src/app/bin/run*", "me/src/app/pyvenv.cfg=home = TOP/me/keys", "me/keys/x"}, path: "TOP/me/src/app/bin", want: []string{"me/src/app"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			top := host(t, append(tt.files, "me/")...)
			full := func(s string) string { return strings.ReplaceAll(s, "TOP", top) }
			c := room.Caller{Path: full(tt.path), Home: top + "/me"}
			lookup := func(name string) (string, bool) {
				value, ok := tt.env[name]
				return full(value), ok
			}
			shown := func(dir string) bool {
				return strings.HasPrefix(dir, "/usr") || tt.shown != "" && values.Within(dir, filepath.Join(top, tt.shown))
			}
			set := Find(c, lookup, shown)
			var got, vars []string
			for _, m := range set.Mounts {
				name := strings.TrimPrefix(m.Dest, top+"/")
				if m.Kind != room.ReadOnly {
					name = "-" + name
				} else if m.Source != m.Dest {
					t.Errorf("%s is shown at %s", m.Source, m.Dest)
				}
				got = append(got, name)
			}
			for _, v := range set.Vars {
				vars = append(vars, v.Name+"="+v.Value)
			}
			check.NoDiff(t, cmp.Diff(tt.want, got), "shown (-want +got)")
			var want []string
			for _, v := range tt.vars {
				want = append(want, full(v))
			}
			check.NoDiff(t, cmp.Diff(want, vars), "variables (-want +got)")
			dirs := tt.dirs
			if dirs == "" {
				dirs = tt.path
			}
			check.That(t, set.Path == full(dirs), "PATH %s, want %s", set.Path, full(dirs))
		})
	}
}

// A named pipe that an earlier command has left in a directory of PATH, or in its place, does not block.
func TestFindPipes(t *testing.T) {
	top := host(t, "venv/bin/x*")
	pipes := []string{top + "/venv/pyvenv.cfg", top + "/bin"}
	for _, name := range pipes {
		check.Must(t, unix.Mkfifo(name, 0o644))
	}
	found := make(chan Set, 1)
	go func() {
		found <- Find(room.Caller{Path: top + "/venv/bin:" + top + "/bin"}, func(string) (string, bool) { return "", false }, func(string) bool { return false })
	}()
	select {
	case set := <-found:
		check.That(t, len(set.Mounts) == 1 && set.Mounts[0].Source == top+"/venv", "%v", set.Mounts)
	case <-time.After(30 * time.Second):
		t.Error("it waits for a pipe")
		for _, name := range pipes { // so that the goroutine ends
			if fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
				defer unix.Close(fd)
			}
		}
	}
}

// What cannot be searched within bounds is not shown.
func TestFindBounded(t *testing.T) {
	var files []string
	for i := range 2 * manySecrets {
		files = append(files, fmt.Sprintf("me/.volta/%d/%d/.npmrc", i%2, i))
	}
	for i := range 2 * manyCovers {
		files = append(files, fmt.Sprintf("me/.nvm/%d/.git/config", i))
	}
	top := host(t, append(files, "me/.volta/bin/node*", "me/.nvm/bin/node*")...)
	c := room.Caller{Path: top + "/me/.volta/bin:" + top + "/me/.nvm/bin", Home: top + "/me"}
	set := Find(c, func(string) (string, bool) { return "", false }, func(dir string) bool { return strings.HasPrefix(dir, "/usr") })
	covered := func(name string) bool {
		visible := false
		for _, m := range set.Mounts {
			if values.Within(name, m.Dest) {
				visible = m.Kind == room.ReadOnly
			}
		}
		return !visible
	}
	for _, name := range files {
		check.Require(t, covered(filepath.Join(top, name)), "%s is shown", name)
	}
	check.That(t, len(set.Mounts) <= manyCovers+10, "%d mounts", len(set.Mounts))
	check.That(t, !covered(top+"/me/.volta/bin/node"), "a program is not shown")
}
