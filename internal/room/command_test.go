package room

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// insteadOf returns the host's program if the sandbox runs another one.
func TestInsteadOf(t *testing.T) {
	top := laidOut(t, "shims/", "own/", "links/", "venv/bin/")
	for name, text := range map[string]string{"shims/cat": "#!/bin/sh\n", "own/other": "#!/bin/sh\n", "venv/pyvenv.cfg": ""} {
		check.Must(t, os.WriteFile(filepath.Join(top, name), []byte(text), 0o755))
	}
	cat, err := filepath.EvalSymlinks("/usr/bin/cat")
	check.Must(t, errors.Join(err, os.Symlink(cat, top+"/links/cat"), os.Symlink(cat, top+"/venv/bin/cat"), os.WriteFile(top+"/own/cat", nil, 0o644)))
	for _, tt := range []struct{ path, want string }{
		{"/usr/bin", ""},
		{"TOP/shims:/usr/bin", "TOP/shims/cat"},
		{"/usr/bin:TOP/shims", ""},
		{"TOP/own:/usr/bin", ""},   // not executable
		{"TOP/links:/usr/bin", ""}, // the same program
		{"TOP/venv/bin:/usr/bin", "TOP/venv/bin/cat"},
		{"TOP/none:relative::TOP/shims:/usr/bin", "TOP/shims/cat"},
	} {
		callers := strings.ReplaceAll(tt.path, "TOP", top)
		plan := prepare(t, Policy{Command: []string{"cat"}, Workdir: "/tmp"}, 1000)
		got, want := insteadOf(plan.ops, "/usr/bin/cat", sandboxPathOf(plan.ops, callers), callers), strings.ReplaceAll(tt.want, "TOP", top)
		check.That(t, got == want, "PATH=%s: got %q, want %q", tt.path, got, want)
	}
}

// A hint never suggests showing a home directory.
func TestBindFor(t *testing.T) {
	for _, tt := range []struct{ host, want string }{
		{"/opt/x/bin/tool", "/opt/x"},
		{"/opt/x/tool", "/opt/x"},
		{"/data/me/bin/tool", "/data/me/bin/tool"},
		{"/data/me/tool", "/data/me/tool"},
		{"/data/me/.pyenv/shims/tool", "/data/me/.pyenv"},
		{"/bin/tool", "/bin/tool"},
		{"/root/tool", "/root/tool"},
	} {
		check.Equal(t, bindFor(tt.host, "/data/me"), tt.want, "bindFor(%q)", tt.host)
	}
}

func TestCheckCommand(t *testing.T) {
	v, top := sample(t)
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		check.Must(t, os.WriteFile(filepath.Join(top, name), []byte(text), mode))
	}
	write("work/plain", "text", 0o644)
	write("usr/bin/plain", "text", 0o644)
	write("usr/bin/both", "text", 0o644)
	write("usr/lib/both", "\x7fELF", 0o755)
	write("work/script", "#!/usr/bin/prog -x\n", 0o755)
	write("work/linked", "#! /bin/awk\n", 0o755)
	write("work/tabs", "#!\t/usr/bin/prog\t\n", 0o755)
	write("work/missing", "#!/usr/bin/none -x\n", 0o755)
	write("work/env", "#!/opt/env prog\n", 0o755)
	write("work/hosts", "#!"+top+"/opt/prog\n", 0o755)
	write("work/venv", "#!"+top+"/work/python\n", 0o755)
	write("work/noline", "#!/usr/bin/none", 0o755)
	write("work/nothing", "#!", 0o755)
	write("work/blank", "#! \n", 0o755)
	write("work/relative", "#!prog\n", 0o755)
	write("work/a'b c", "text", 0o644)
	write("work/escape", "#!/no/\x1b[2J\a\x9b\n", 0o755)
	err := errors.Join(os.Symlink("/usr/lib", filepath.Join(top, "work/far")), os.Symlink(filepath.Join(top, "opt/prog"), filepath.Join(top, "work/python")), unix.Mkfifo(filepath.Join(top, "work/pipe"), 0o755),
		unix.Mkfifo(filepath.Join(top, "usr/bin/piped"), 0o755), os.Mkdir(filepath.Join(top, "work/tools"), 0o755))
	check.Must(t, err)
	write("work/tools/own", "\x7fELF", 0o755)
	write("usr/lib/piped", "\x7fELF", 0o755)
	write("work/steals", "#!"+filepath.Join(top, "me/.ssh/id_rsa")+"\n", 0o755)
	check.Must(t, os.MkdirAll(filepath.Join(top, "me/.ssh"), 0o755))
	write("me/.ssh/id_rsa", "", 0o755)
	tools := laidOut(t, "lib/pyenv/shims/tool", "tools/tool2", "lib/python/bin/tool3", "dirs/tool4/", "bin/both2")
	check.Must(t, os.WriteFile(filepath.Join(tools, "bin/notool"), nil, 0o644))

	notFound := func(message, hint string) *result.Error {
		return &result.Error{Code: "not-found", ExitCode: 127, Message: message, Hint: hint}
	}
	notExecutable := func(message, hint string) *result.Error {
		return &result.Error{Code: "not-executable", ExitCode: 126, Message: message, Hint: hint}
	}
	callers := strings.Join([]string{"/usr/bin", "relative", "", filepath.Join(tools, "lib/pyenv/shims"), filepath.Join(tools, "tools"),
		filepath.Join(tools, "lib/python/bin"), filepath.Join(tools, "dirs"), filepath.Join(tools, "bin")}, ":")
	tests := []struct {
		name, command, workdir, path string
		want                         *result.Error // TOP is the fake host, TOOLS a directory of further host programs
	}{
		{name: "by PATH", command: "prog"},
		{name: "by PATH and links", command: "awk"},
		{name: "by PATH, the first cannot be executed", command: "both", path: "/usr/bin:/usr/lib"},
		{name: "absolute", command: "/usr/bin/prog"},
		{name: "absolute by bwrap's link", command: "/bin/prog"},
		{name: "relative to the working directory", command: "./run"},
		{name: "relative, up", command: "../run", workdir: "/w/dir"},
		{name: "relative, up from a link", command: "../run", workdir: "/w/link"},
		{name: "dot-dot after a link, which leads elsewhere", command: "./far/../lib/real"}, // there is no /w/lib
		{name: "dot-dot after a link, absolute", command: "/w/far/../lib/real"},
		{name: "by an empty entry of PATH", command: "run", path: "/usr/bin:"},
		{name: "by an empty entry in the middle", command: "run", path: "/usr/bin::/usr/lib"},
		{name: "dot-dot without a link", command: "tools/../run"},
		{name: "by a relative entry of PATH", command: "own", path: "/usr/bin:tools"},
		{name: "by the entry .", command: "run", path: ".:/usr/bin"},
		{name: "by a relative entry over a link", command: "real", path: "far/../lib"},
		{name: "by PATH, the first is a named pipe", command: "piped", path: "/usr/bin:/usr/lib"},
		{name: "on a writable bind", command: "/w/run"},
		{name: "script", command: "./script"},
		{name: "script, interpreter by links", command: "./linked"},
		{name: "script, tabs", command: "./tabs"},
		{name: "script, no interpreter named", command: "./nothing"},
		{name: "script, blank interpreter", command: "./blank"},
		{name: "script, relative interpreter", command: "./relative"},

		{name: "empty", command: "", want: notFound("the command is an empty string", "")},
		{name: "nowhere", command: "none", want: notFound(`command "none" not found in the sandbox's PATH /usr/bin`, "")},
		{name: "nowhere, absolute", command: "/usr/bin/none", want: notFound(`command "/usr/bin/none": no such file`, "")},
		{name: "nowhere, below a file", command: "/usr/bin/prog/x", want: notFound(`command "/usr/bin/prog/x": no such file`, "")},
		{name: "dangling", command: "/usr/bin/dangling", want: notFound(`command "/usr/bin/dangling": no such file`, "")},
		{name: "odd name", command: "a\n\x1b\xff", want: notFound(`command "a\n\x1b\xff" not found in the sandbox's PATH /usr/bin`, "")},
		{name: "not by an empty PATH entry", command: "run", path: "/usr/bin:/usr/lib", want: notFound(`command "run" not found in the sandbox's PATH /usr/bin:/usr/lib`, "")},

		{name: "not where dot-dot leads by the text alone", command: "/w/far/../run", want: notFound(`command "/w/far/../run": no such file`, "")}, // that is /usr/run
		{name: "by PATH, only a named pipe", command: "piped", want: notFound(`command "piped" not found in the sandbox's PATH /usr/bin`, "")},
		{name: "a relative entry of PATH, from elsewhere", command: "own", path: "/usr/bin:tools", workdir: "/usr", want: notFound(`command "own" not found in the sandbox's PATH /usr/bin:tools`, "")},

		{name: "only on the host, by PATH", command: "tool",
			want: notFound(`command "tool" is at TOOLS/lib/pyenv/shims/tool, which is not visible in the sandbox`,
				"show it with: --tools")},
		{name: "only on the host, beside others", command: "tool2",
			want: notFound(`command "tool2" is at TOOLS/tools/tool2, which is not visible in the sandbox`,
				"show it with: --tools")},
		{name: "only on the host, with a prefix", command: "tool3",
			want: notFound(`command "tool3" is at TOOLS/lib/python/bin/tool3, which is not visible in the sandbox`,
				"show it with: --tools")},
		{name: "only a directory on the host", command: "tool4", want: notFound(`command "tool4" not found in the sandbox's PATH /usr/bin`, "")},
		{name: "not executable on the host", command: "notool", want: notFound(`command "notool" not found in the sandbox's PATH /usr/bin`, "")},
		{name: "only on the host, absolute", command: "TOOLS/lib/python/bin/tool3",
			want: notFound(`command "TOOLS/lib/python/bin/tool3" is not visible in the sandbox`, "show it with: --ro-bind TOOLS/lib/python")},
		{name: "a link of /proc", command: "/proc/self/exe", want: notFound(`command "/proc/self/exe" is not visible in the sandbox`, "")},
		{name: "link to what is only on the host", command: "/usr/bin/hidden", want: notFound(`command "/usr/bin/hidden": no such file`, "")},

		{name: "not executable", command: "./plain",
			want: notExecutable(`command "./plain" cannot be executed: permission denied`, "chmod +x TOP/work/plain")},
		{name: "not executable, to be quoted", command: "./a'b c",
			want: notExecutable(`command "./a'b c" cannot be executed: permission denied`, `chmod +x 'TOP/work/a'\''b c'`)},
		{name: "not executable, by PATH", command: "plain",
			want: notExecutable(`command "plain" cannot be executed: permission denied`, "chmod +x TOP/usr/bin/plain")},
		{name: "a copied file", command: "/etc/hosts", want: notExecutable(`command "/etc/hosts" cannot be executed: permission denied`, "")},
		{name: "a named pipe", command: "./pipe", want: notExecutable(`command "./pipe" cannot be executed: it is not a regular file`, "")},
		{name: "escape sequence as an interpreter", command: "./escape",
			want: notExecutable(`command "./escape" cannot be executed: its interpreter "/no/\x1b[2J\a\x9b" does not exist in the sandbox`, "")},
		{name: "a directory", command: "./dir", want: notExecutable(`command "./dir" cannot be executed: it is a directory`, "")},
		{name: "a directory of the sandbox's own", command: "/tmp", want: notExecutable(`command "/tmp" cannot be executed: it is a directory`, "")},
		{name: "a loop", command: "/usr/bin/loop", want: notExecutable(`command "/usr/bin/loop" cannot be executed: too many levels of symbolic links`, "")},
		{name: "bad interpreter", command: "./missing",
			want: notExecutable(`command "./missing" cannot be executed: its interpreter "/usr/bin/none" does not exist in the sandbox`, "")},
		{name: "bad interpreter, no newline", command: "./noline",
			want: notExecutable(`command "./noline" cannot be executed: its interpreter "/usr/bin/none" does not exist in the sandbox`, "")},
		{name: "interpreter only on the host", command: "./hosts",
			want: notExecutable(`command "./hosts" cannot be executed: its interpreter "TOP/opt/prog" does not exist in the sandbox`, "--ro-bind TOP/opt")},
		{name: "interpreter that is a key", command: "./steals",
			want: notExecutable(`command "./steals" cannot be executed: its interpreter "TOP/me/.ssh/id_rsa" does not exist in the sandbox`, "")},
		{name: "interpreter that is a link to what is only on the host", command: "./venv",
			want: notExecutable(`command "./venv" cannot be executed: its interpreter "TOP/work/python" does not exist in the sandbox`, "--ro-bind TOP/work --ro-bind TOP/opt")},
	}
	places := strings.NewReplacer("TOP", top, "TOOLS", tools)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			workdir, sandboxPath := tt.workdir, tt.path
			if workdir == "" {
				workdir = "/w"
			}
			if sandboxPath == "" {
				sandboxPath = "/usr/bin"
			}
			_, err := checkCommand(v, places.Replace(tt.command), workdir, sandboxPath, Caller{Path: callers})
			var got *result.Error
			check.Require(t, err == nil || errors.As(err, &got), "untyped error %v", err)
			if tt.want != nil {
				tt.want.Message, tt.want.Hint = places.Replace(tt.want.Message), places.Replace(tt.want.Hint)
			}
			check.NoDiff(t, cmp.Diff(tt.want, got, cmpopts.IgnoreFields(result.Error{}, "Err")), "(-want +got)")
		})
	}
}

func TestShebang(t *testing.T) {
	dir := t.TempDir()
	tests := []struct{ text, want string }{
		{"", ""},
		{"#", ""},
		{"#!", ""},
		{"#!\n/bin/sh", ""},
		{"#!/bin/sh", "/bin/sh"},
		{"#! \t/bin/sh -e -u\nexit", "/bin/sh"},
		{" #!/bin/sh\n", ""},
		{"\ufeff#!/bin/sh\n", ""},
		{"\x7fELF#!/bin/sh\n", ""},
		{"#!/usr/bin/env -S x\n", "/usr/bin/env"},
		{"#!/bin/sh\r\necho\r\n", "/bin/sh\r"},
		{"#!/bin/sh\t-e\r\n", "/bin/sh"},
		{"#!/" + strings.Repeat("x", 1000) + "\n", "/" + strings.Repeat("x", 252)}, // truncated as by the kernel
	}
	for _, tt := range tests {
		p := filepath.Join(dir, "script")
		check.Must(t, os.WriteFile(p, []byte(tt.text), 0o755))
		check.Equal(t, Interpreter(p), tt.want, "shebang of %q", tt.text)
	}
	check.Equal(t, Interpreter(filepath.Join(dir, "none")), "", "shebang of a missing file")
}
