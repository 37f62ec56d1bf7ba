package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// everyday is a usual command line. It works with the given flags, or ends with one line that says what to do.
type everyday struct {
	name  string
	needs string   // a file that the machine may lack
	setup string   // script that prepares the directory, run by sh outside
	dir   string   // current directory, relative to it
	path  string   // in front of the usual PATH
	args  []string // HERE is that directory and TOP its parent, which also contains HOME

	code   int
	stdout string // regular expressions
	line   string // sbxrun's line on a terminal; "" for none
}

func TestEveryday(t *testing.T) {
	t.Parallel()
	const (
		writes  = `python3 -c "open('made', 'w').write('x')"`
		noWrite = `hint: if it tried to write to the current directory, it could not; -w lets it write there`
		noNet   = `hint: it tried to reach a network, and has none; --net allow=HOST lets it reach that host`
		repo    = `git init -q . && git -c user.name=me -c user.email=me@example.org commit -q --allow-empty -m first && mkdir -p sub lib && echo lib >lib/file`
		// program FILE COMMAND creates a program that executes another; link FILE TARGET.
		layout = `program() { mkdir -p "${1%/*}" && printf '#!/bin/sh\nexec %s "$@"\n' "$2" >"$1" && chmod 755 "$1"; }; link() { mkdir -p "${1%/*}" && ln -s "$2" "$1"; }; `
		venv   = layout + `program base/bin/python3 /usr/bin/python3; link venv/bin/python3 $PWD/base/bin/python3; echo "home = $PWD/base/bin" >venv/pyvenv.cfg`
		// The files that the tools create, with python3 and node instead of built or downloaded programs.
		pyenv = layout + `p=$HOME/.pyenv; program $p/versions/3.11.7/bin/python3 /usr/bin/python3; echo 3.11.7 >$p/version; mkdir -p $p/shims $p/libexec
			printf '#!/bin/sh\nexec "%s/libexec/pyenv" exec "${0##*/}" "$@"\n' $p >$p/shims/python3
			printf '#!/bin/sh\nshift; name=$1; shift; exec "$PYENV_ROOT/versions/$(cat $PYENV_ROOT/version)/bin/$name" "$@"\n' >$p/libexec/pyenv
			chmod 755 $p/shims/python3 $p/libexec/pyenv; link $p/bin/pyenv ../libexec/pyenv`
		uv = layout + `u=$HOME/.local/share/uv/python/cpython-3.12.1-linux-x86_64-gnu/bin; program $u/python3.12 /usr/bin/python3
			link .venv/bin/python $u/python3.12; link .venv/bin/python3 python; printf 'home = %s\nuv = 0.9.1\n' $u >.venv/pyvenv.cfg`
		rustup = layout + `program $HOME/.cargo/bin/rustup '"$RUSTUP_HOME/toolchains/stable-x86_64-unknown-linux-gnu/bin/${0##*/}"'; link $HOME/.cargo/bin/cargo rustup
			program $HOME/.rustup/toolchains/stable-x86_64-unknown-linux-gnu/bin/cargo 'echo cargo ran'; echo 'token = "secret"' >$HOME/.cargo/credentials.toml
			mkdir -p $HOME/.cargo/registry && echo crate >$HOME/.cargo/registry/crate`
	)
	sh := func(script string) []string { return []string{"sh", "-c", script} }
	tests := []everyday{
		// Commands that work without flags.
		{name: "python3 reads the directory", setup: `echo "print(open('data').read())" >job.py; echo 42 >data`, args: []string{"python3", "job.py"}, stdout: `^42`},
		{name: "a pipe", setup: `touch a b`, args: sh(`ls | wc -l`), stdout: `^2$`},
		{name: "nohup, setsid and the background", args: sh(`nohup true 2>/dev/null && setsid -w true && { sleep 0.01 & wait; } && echo all`), stdout: `^all$`},
		{name: "bash, and a process substitution", args: []string{"bash", "-c", "cat <(echo through)"}, stdout: `^through$`},
		{name: "make", setup: `printf 'all:\n\t@echo made\n' >Makefile`, args: []string{"make"}, stdout: `^made$`},
		{name: "git log at the root", setup: repo, args: []string{"git", "log", "--oneline"}, stdout: ` first$`},
		{name: "node", args: []string{"node", "-e", "console.log(1 + 1)"}, stdout: `^2$`},
		{name: "java H.java", setup: `echo 'class H { public static void main(String[] a) { System.out.println("java ran"); } }' >H.java`, args: []string{"java", "H.java"}, stdout: `^java ran$`},
		{name: "getservbyname", needs: "/etc/services", args: []string{"getent", "services", "http"}, stdout: `80/tcp`},

		// Commands that write to the current directory.
		{name: "a job that writes", args: sh(writes), code: 1, line: noWrite},
		{name: "a job that writes, -w", args: append([]string{"-w"}, sh(writes+" && cat made")...), stdout: `^x$`},
		{name: "a job that writes in a private directory", setup: `chmod 700 .`, args: append([]string{"-w"}, sh(writes+" && cat made")...), stdout: `^x$`},
		{name: "make that writes, -w", setup: `printf 'out:\n\techo x >out\n' >Makefile`, args: []string{"-w", "make", "-j2"}},
		{name: "gcc -o, -w", setup: `echo 'int main(void) { return 0; }' >a.c`, args: append([]string{"-w"}, sh("gcc -o a a.c && ./a && echo linked")...), stdout: `^linked$`},
		{name: "sqlite, -w", args: []string{"-w", "python3", "-c", "import sqlite3; c = sqlite3.connect('db'); c.execute('create table t (x)'); c.commit(); print('stored')"}, stdout: `^stored$`},
		{name: "npm install without network, -w", setup: `echo '{"name": "x", "version": "1.0.0"}' >package.json`, args: []string{"-w", "npm", "install", "--offline", "--no-audit", "--no-fund"}},
		{name: "git commit, -w", setup: repo, args: append([]string{"-w"}, sh("git -c user.name=me -c user.email=me@example.org commit -q --allow-empty -m second && git log --oneline | wc -l")...), stdout: `^2$`},
		{name: "tar and untar, -w", setup: `echo text >f`, args: append([]string{"-w"}, sh("tar -cf t.tar f && mkdir x && tar -xf t.tar -C x --no-same-owner && cat x/f")...), stdout: `^text$`},

		// Commands that need more of the host than the directory.
		{name: "git in a subdirectory", setup: repo, dir: "sub", args: []string{"git", "log", "--oneline"}, code: 128, line: `hint: the repository begins above the current directory, and is not shown; --cwd-root HERE shows all of it`},
		{name: "git in a subdirectory, --cwd-root", setup: repo, dir: "sub", args: []string{"--cwd-root", "..", "git", "log", "--oneline"}, stdout: ` first$`},
		{name: "a library beside", setup: repo, dir: "sub", args: []string{"cat", "../lib/file"}, code: 1, line: `hint: "HERE/lib/file" is not shown in the sandbox; --cwd-root HERE shows it and the current directory`},
		{name: "a library beside, --cwd-root", setup: repo, dir: "sub", args: []string{"--cwd-root", "..", "cat", "../lib/file"}, stdout: `^lib$`},
		{name: "a file elsewhere", setup: `mkdir ../other; echo text >../other/file`, args: []string{"--ro-bind", "TOP/other/file", "cat", "TOP/other/file"}, stdout: `^text$`},
		{name: "a file elsewhere, not shown", setup: `mkdir ../other; echo text >../other/file`, args: []string{"python3", "TOP/other/file"}, code: 2, line: `hint: "TOP/other/file" is not shown in the sandbox; --ro-bind TOP/other/file shows it`},
		{name: "a secret is not offered", setup: `mkdir -p $HOME/.ssh; echo key >$HOME/.ssh/key`, args: []string{"cat", "HOME/.ssh/key"}, code: 1, line: `hint: "HOME/.ssh/key" is not shown in the sandbox`},

		// Directories where cron and systemd start commands.
		{name: "from the home directory", dir: "../home", setup: `mkdir -p $HOME`, args: []string{"true"}, code: 125, line: `error: .* is a home directory, with its keys and tokens; --cwd none starts in an empty directory; --ro-bind NAME shows a file or a directory of it`},
		{name: "from the home directory, --cwd none", dir: "../home", setup: `mkdir -p $HOME`, args: []string{"--cwd", "none", "pwd"}, stdout: `^/home/sandbox$`},
		{name: "from the home directory, a file of it", dir: "../home", setup: `mkdir -p $HOME; echo text >$HOME/f`, args: []string{"--cwd", "none", "--ro-bind", "f", "cat", "HOME/f"}, stdout: `^text$`},
		{name: "nothing of the current directory", setup: `echo text >f`, args: []string{"--cwd", "none", "cat", "f"}, code: 1, line: `hint: if it tried to read the current directory, it could not: its home is empty; --ro-bind NAME .*`},

		// Programs found by PATH.
		{name: "a venv", setup: venv, path: "HERE/venv/bin", dir: "/usr", args: []string{"python3", "-c", ""}, line: `warning: python3 is /usr/bin/python3 in the sandbox, but HERE/venv/bin/python3 outside; use --tools for the latter, or give the full path`},
		{name: "the system's, although there is a venv", setup: venv, path: "HERE/venv/bin", dir: "/usr", args: []string{"/usr/bin/python3", "-c", ""}},
		{name: "a venv, --tools", setup: venv, path: "HERE/venv/bin", dir: "/usr", args: []string{"--tools", "sh", "-c", "command -v python3; python3 -c 'print(1)'"}, stdout: `^HERE/venv/bin/python3\n1$`},
		{name: "a venv that python3 has made, --tools", setup: `python3 -m venv --without-pip venv`, path: "HERE/venv/bin", dir: "/usr", args: []string{"--tools", "python3", "-c", "import sys; print(sys.prefix)"}, stdout: `^HERE/venv$`},
		{name: "a venv here, of a python3 elsewhere", setup: pyenv + `; link venv/bin/python3 $p/versions/3.11.7/bin/python3`, path: "HERE/venv/bin", args: []string{"python3", "-c", ""},
			line: `warning: python3 is /usr/bin/python3 in the sandbox, but HERE/venv/bin/python3 outside; .*`},
		{name: "python3 of pyenv", setup: pyenv, path: "HOME/.pyenv/shims", args: []string{"python3", "-c", ""}, line: `warning: python3 is /usr/bin/python3 in the sandbox, but HOME/.pyenv/shims/python3 outside; .*`},
		{name: "python3 of pyenv, --tools", setup: pyenv, path: "HOME/.pyenv/shims:HOME/.pyenv/bin", args: []string{"--tools", "sh", "-c", "command -v python3; python3 -c 'print(1)'"}, stdout: `^HOME/.pyenv/shims/python3\n1$`},
		{name: "python of uv, --tools", setup: uv, path: "HERE/.venv/bin", args: []string{"--tools", "sh", "-c", "command -v python; python -c 'print(1)'"}, stdout: `^HERE/.venv/bin/python\n1$`},
		{name: "python3 of conda, --tools", setup: layout + `program $HOME/miniconda3/bin/python3 /usr/bin/python3; mkdir $HOME/miniconda3/conda-meta; echo token >$HOME/miniconda3/.condarc`, path: "HOME/miniconda3/bin",
			args: []string{"--tools", "sh", "-c", "command -v python3; python3 -c 'print(1)'; cat HOME/miniconda3/.condarc"}, stdout: `^HOME/miniconda3/bin/python3\n1\n\s*\z`},
		{name: "cargo of rustup", setup: rustup, path: "HOME/.cargo/bin", args: []string{"cargo", "build"}, code: 127, line: `error: command "cargo" is at HOME/.cargo/bin/cargo, which is not visible in the sandbox; show it with: --tools`},
		{name: "cargo of rustup, --tools", setup: rustup, path: "HOME/.cargo/bin", args: []string{"--tools", "sh", "-c", "cargo build; cat HOME/.cargo/registry/crate HOME/.cargo/credentials.toml"}, stdout: `^cargo ran build\ncrate\n\s*\z`},
		{name: "node of volta, --tools", setup: layout + `program $HOME/.volta/tools/image/node/20.0.0/bin/node /usr/bin/node; program $HOME/.volta/bin/volta-shim '"$VOLTA_HOME/tools/image/node/20.0.0/bin/${0##*/}"'; link $HOME/.volta/bin/node volta-shim; touch $HOME/.volta/bin/volta; chmod 755 $HOME/.volta/bin/volta`,
			path: "HOME/.volta/bin", args: []string{"--tools", "sh", "-c", "command -v node; node -p 6*7"}, stdout: `^HOME/.volta/bin/node\n42$`},
		{name: "node of fnm, --tools", setup: layout + `program $HOME/.local/share/fnm/node-versions/v20.0.0/installation/bin/node /usr/bin/node; link $HOME/fnm_multishells/1_2 $HOME/.local/share/fnm/node-versions/v20.0.0/installation`,
			path: "HOME/fnm_multishells/1_2/bin", args: []string{"--tools", "node", "-p", "6*7"}, stdout: `^42$`},
		{name: "java of sdkman, --tools", setup: layout + `program $HOME/.sdkman/candidates/java/21.0.1-tem/bin/java 'echo java ran'; link $HOME/.sdkman/candidates/java/current 21.0.1-tem`, path: "HOME/.sdkman/candidates/java/current/bin",
			args: []string{"--tools", "java", "-version"}, stdout: `^java ran -version$`},
		{name: "go of ~/sdk and its modules, --tools", setup: layout + `program $HOME/sdk/go1.26.0/bin/go 'cat "$GOMODCACHE/module"'; mkdir -p $HOME/go/pkg/mod; echo module >$HOME/go/pkg/mod/module`, path: "HOME/sdk/go1.26.0/bin", args: []string{"--tools", "go"}, stdout: `^module$`},
		{name: "node of nvm, --tools", setup: `d=$HOME/.nvm/versions/node/v20.0.0/bin; mkdir -p $d; printf '#!/bin/sh\nexec /usr/bin/node "$@"\n' >$d/node; chmod 755 $d/node`, path: "HOME/.nvm/versions/node/v20.0.0/bin",
			args: []string{"--tools", "sh", "-c", "command -v node; node -p 6*7"}, stdout: `^HOME/.nvm/versions/node/v20.0.0/bin/node\n42$`},
		{name: "a program of ~/.local/bin", setup: `mkdir -p $HOME/.local/bin; printf '#!/bin/sh\necho ran\n' >$HOME/.local/bin/own; chmod 755 $HOME/.local/bin/own`, path: "HOME/.local/bin", args: []string{"own"}, code: 127,
			line: `error: command "own" is at HOME/.local/bin/own, which is not visible in the sandbox; show it with: --tools`},
		{name: "a program of ~/.local/bin, --tools", setup: `mkdir -p $HOME/.local/bin; printf '#!/bin/sh\necho ran\n' >$HOME/.local/bin/own; chmod 755 $HOME/.local/bin/own`, path: "HOME/.local/bin",
			args: []string{"--tools", "own"}, stdout: `^ran$`},
		{name: "a program of ~/bin in a script", setup: `mkdir -p $HOME/bin; printf '#!/bin/sh\necho ran\n' >$HOME/bin/own; chmod 755 $HOME/bin/own`, path: "HOME/bin", args: sh("own"), code: 127,
			line: `hint: a command may be in a directory of PATH that the sandbox does not show; --tools shows it`},
		{name: "pip install --user, --tools", setup: `d=$HOME/.local/lib/python$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages; mkdir -p $d; echo 'answer = 42' >$d/usermodule.py`,
			args: []string{"--tools", "python3", "-c", "import usermodule; print(usermodule.answer)"}, stdout: `^42$`},
		{name: "npm's global packages, --tools", setup: `mkdir -p $HOME/.npm-global/bin $HOME/.npm-global/lib/node_modules/own; printf '#!/usr/bin/env node\nconsole.log("global")\n' >$HOME/.npm-global/lib/node_modules/own/cli.js;
			chmod 755 $HOME/.npm-global/lib/node_modules/own/cli.js; ln -s ../lib/node_modules/own/cli.js $HOME/.npm-global/bin/own`, path: "HOME/.npm-global/bin", args: []string{"--tools", "own"}, stdout: `^global$`},

		// Commands that need a network.
		{name: "a download", args: []string{"python3", "-c", "import urllib.request; urllib.request.urlopen('http://example.org')"}, code: 1, line: noNet},
		{name: "an address", args: []string{"python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 80))"}, code: 1, line: noNet},
		{name: "a database of the host's", args: []string{"python3", "-c", "import socket; socket.create_connection(('localhost', 9))"}, code: 1, line: noNet},
		{name: "curl", args: []string{"curl", "-s", "http://example.org"}, code: 6, line: noNet},
		{name: "git clone", args: []string{"-w", "git", "clone", "-q", "https://example.org/x.git"}, code: 128, line: noNet},
		{name: "node fetches", args: []string{"node", "-e", "require('http').get('http://example.org')"}, code: 1, line: noNet},
	}
	tried := 0
	for _, tt := range tests {
		if !onThisMachine(tt) {
			continue
		}
		tried++
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.try(t)
		})
	}
	// The programs that README's set-up installs are enough for these.
	const least = 40
	check.That(t, tried >= least, "%d of %d commands could be tried, want at least %d", tried, len(tests), least)
}

// onThisMachine reports whether everything that a row needs is installed.
func onThisMachine(tt everyday) bool {
	if _, err := os.Stat(tt.needs); tt.needs != "" && err != nil {
		return false
	}
	for _, name := range []string{"make", "git", "java", "gcc", "npm", "curl"} {
		uses := regexp.MustCompile(`(^|[ ;&])` + name + `\b`)
		_, err := exec.LookPath("/usr/bin/" + name)
		if err != nil && (uses.MatchString(strings.Join(tt.args, " ")) || uses.MatchString(tt.setup)) {
			return false
		}
	}
	return true
}

func (tt everyday) try(t *testing.T) {
	top, err := filepath.EvalSymlinks(harness.Dir(t))
	check.Must(t, err)
	here, home := top+"/work", top+"/home"
	check.Must(t, os.Mkdir(here, 0o755))
	full := strings.NewReplacer("HERE", here, "HOME", home, "TOP", top).Replace
	pattern := strings.NewReplacer("HERE", regexp.QuoteMeta(here), "HOME", regexp.QuoteMeta(home), "TOP", regexp.QuoteMeta(top)).Replace
	if tt.setup != "" {
		setup := exec.Command("sh", "-c", "set -e; umask 022; "+tt.setup)
		setup.Dir = here
		setup.Env = []string{"PATH=" + harness.Path, "HOME=" + home}
		out, err := harness.Command(t, setup, harness.Bound)
		check.Require(t, err == nil, "setup: %v\n%s", err, out)
	}
	o := harness.Options{Bare: true, Dir: filepath.Join(here, tt.dir), Env: []string{"HOME=" + home, "PATH=" + harness.Path}}
	if filepath.IsAbs(tt.dir) {
		o.Dir = tt.dir
	}
	if tt.path != "" {
		o.Env[1] = "PATH=" + full(tt.path) + ":" + harness.Path
	}
	args := []string{"--env", harness.MarkerName}
	for _, arg := range tt.args {
		args = append(args, full(arg))
	}
	r, text := harness.Said(t, func(at harness.Options) *harness.Process {
		o.Stderr = at.Stderr
		return harness.Start(t, o, args...)
	})
	check.That(t, r.ExitCode == tt.code, "exit code %d, want %d", r.ExitCode, tt.code)
	want := pattern(tt.stdout)
	check.That(t, regexp.MustCompile(`(?m)`+want).Match(r.Stdout), "stdout %q, want %s", r.Stdout, want)
	want = pattern(tt.line)
	got := strings.Join(harness.Ours(text), "\n")
	check.That(t, regexp.MustCompile(`^(`+want+`)$`).MatchString(got), "sbxrun said %q, want %s\nstderr: %s\nstdout: %s", got, want, text, r.Stdout)
	// No hint is written to a pipe.
	if strings.HasPrefix(tt.line, "hint: ") && !strings.Contains(tt.line, "network") {
		o.Stderr = nil
		r := harness.Run(t, o, args...)
		check.That(t, r.ExitCode == tt.code && !strings.Contains(string(r.Stderr), "sbxrun: "), "into a pipe: exit code %d, %s", r.ExitCode, r.Stderr)
	}
}

// An exec has the same hints, and says that the flag belongs to start.
func TestEverydayExecHint(t *testing.T) {
	t.Parallel()
	work := filepath.Join(harness.SharedDir(t), "repo", "sub")
	s := harness.NewState(t)
	s.Work = work
	check.Must(t, os.MkdirAll(s.Work, 0o755))
	for _, name := range []string{"repo/.git", "repo/lib"} {
		check.Must(t, os.MkdirAll(filepath.Join(s.Work, "../..", name), 0o755))
	}
	check.Must(t, os.WriteFile(filepath.Join(s.Work, "f"), nil, 0o644))
	top := filepath.Dir(s.Work)
	b, w := s.Sandbox(harness.Options{}, "--name", "web"), s.Sandbox(harness.Options{}, "--cwd", "none", "--net", "none")
	for _, c := range []struct {
		in   *harness.Sandbox
		argv string
		want string // of the hint; "" for none
	}{
		{b, "touch new", "if it tried to write to the current directory, it could not; at sbxrun start, -w lets it write there"},
		{b, "ls ../lib", `"` + top + `/lib" is not shown in the sandbox; at sbxrun start, --cwd-root ` + top + " shows it and the current directory"},
		{b, "git log", "the repository begins above the current directory, and is not shown; at sbxrun start, --cwd-root " + top + " shows all of it"},
		{w, "python3 -c import('socket').create_connection(('192.0.2.1',9))", "it tried to reach a network, and has none; at sbxrun start, --net allow=HOST lets it reach that host"},
		{w, "cat f", "if it tried to read the current directory, it could not: its home is empty; at sbxrun start, --ro-bind NAME shows a file or a directory"},
		{b, "cat f", ""},
		{b, "grep x f", ""},
	} {
		argv := strings.Fields(strings.Replace(c.argv, "import(", "__import__(", 1))
		r, text := harness.Said(t, func(o harness.Options) *harness.Process { return c.in.StartExec(o, nil, argv...) })
		_, hint, _ := strings.Cut(text, "sbxrun: hint: ")
		check.That(t, strings.TrimSuffix(hint, "\n") == c.want && (r.ExitCode == 0) == (c.argv == "cat f" && c.in == b),
			"%q: exit code %d, hint %q, want %q: %s", argv, r.ExitCode, hint, c.want, text)
	}
	// No hint into a pipe.
	r := b.Exec(harness.Options{}, nil, "touch", "new")
	check.That(t, r.ExitCode != 0 && !strings.Contains(string(r.Stderr), "hint"), "into a pipe: exit code %d, %s", r.ExitCode, r.Stderr)
}

// A reached limit gives a hint, where one can be set.
func TestEverydayTasks(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Pids: 6}, "--pids", "6") {
		return
	}
	r, text := harness.Said(t, func(o harness.Options) *harness.Process {
		o.Bare = true
		return harness.Start(t, o, "--env", harness.MarkerName, "--pids", "6", "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; wait")
	})
	want := "hint: the limit on tasks was reached (--pids 6); a larger one lets it start more"
	check.That(t, r.ExitCode == 2 && strings.Contains(text, want), "exit code %d, %q, want %s", r.ExitCode, text, want)
}

// Root gets a hint for a bind that its command, another user, cannot read.
func TestEverydayClosed(t *testing.T) {
	t.Parallel()
	name := filepath.Join(harness.Dir(t), "key")
	check.Must(t, os.WriteFile(name, []byte("text\n"), 0o600))
	r := harness.Run(t, harness.Options{Bare: true}, "--env", harness.MarkerName, "--cwd", "none", "--ro-bind", name, "cat", name)
	warned := strings.Contains(string(r.Stderr), " in the sandbox cannot read \""+name+"\"; copy it with --put, ")
	root := os.Getuid() == 0
	check.That(t, warned == root && (r.ExitCode == 0) != root, "exit code %d, stderr %q", r.ExitCode, r.Stderr)
}

// There is no hint with --quiet or together with a report.
func TestEverydayNoHint(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{{"--quiet"}, {"--json"}, {"--report", "/dev/null"}} {
		r, text := harness.Said(t, func(o harness.Options) *harness.Process {
			return harness.Start(t, o, append(flags, "--env", harness.MarkerName, "touch", "new")...)
		})
		check.That(t, r.ExitCode == 1 && !strings.Contains(text, "hint"), "%v: exit code %d, %q", flags, r.ExitCode, text)
	}
}
