package tests

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// lists compares the names in a directory.
func lists(t *testing.T, dir string, want ...string) {
	t.Helper()
	var names []string
	for _, e := range harness.ReadDir(t, dir) {
		names = append(names, e.Name())
	}
	check.Equal(t, strings.Join(names, " "), strings.Join(want, " "), "in %s", dir)
}

// A command with write access to the report's directory neither sees the report nor can replace it.
func TestReportInWritableDirectory(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	const forge = `ls -A; ls -A >seen; echo '{"status":"forged"}' >r.json; ln -s r.json .r.json.tmp; (sleep 0.2; echo late >>r.json) & exit 3`
	harness.Start(t, harness.Options{Bare: true, Dir: dir}, "--report", "r.json", "--bind", ".", "sh", "-c", forge).Wait().Exits(t, 3).Out(t, "")
	rep, err := harness.ParseReport(harness.ReadFile(t, dir+"/r.json"))
	check.That(t, err == nil && rep.Status == "failed", "%+v, %v", rep, err)
	lists(t, dir, ".r.json.tmp", "r.json", "seen")
}

// A run without a report leaves nothing in its place.
func TestReportNeverWritten(t *testing.T) {
	t.Parallel()
	o := harness.Options{Bare: true, Dir: harness.SharedDir(t)}
	harness.Start(t, o, "--report", "r.json", "--print-command", "true").Wait().Exits(t, 0)
	lists(t, o.Dir)
	p := harness.Start(t, o, "--report", "r.json", "--bind", ".", "sh", "-c", "echo up; exec sleep 100")
	p.WaitOutput("up\n")
	lists(t, o.Dir)
	p.Kill()
	p.Wait()
	lists(t, o.Dir)
}

// Nothing starts if the report's directory is not writable, or if the report would replace another user's file or link
// in a sticky directory such as /tmp.
func TestReportRefused(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	const theirs = "it belongs to another user, in a directory with the sticky bit; choose another name"
	for _, tt := range []struct {
		mode      uint32
		name, why string
	}{{0o555, "r", "permission denied"}, {0o1777, "file", theirs}, {0o1777, "link", theirs}} {
		o := harness.Options{Bare: true}
		if harness.Root() { // root can write everywhere
			o.Wrap = harness.As(23456)
			check.Must(t, os.WriteFile(dir+"/file", nil, 0o666))
			_ = os.Symlink("file", dir+"/link") // it may be there
		} else if tt.mode != 0o555 {
			return // only root can create another user's file
		}
		check.Must(t, unix.Chmod(dir, tt.mode))
		r := harness.Start(t, o, "--report", dir+"/"+tt.name, "--workdir", "/tmp", "sh", "-c", "echo ran >&2").Wait()
		r.Exits(t, 125).Err(t, fmt.Sprintf("sbxrun: error: cannot write the report to %q: %s\n", dir+"/"+tt.name, tt.why))
	}
}

// sbxrun does not wait for named pipes without a reader or writer.
func TestNamedPipes(t *testing.T) {
	t.Parallel()
	o := harness.Options{Bare: true, Dir: harness.SharedDir(t)}
	check.Must(t, errors.Join(unix.Mkfifo(o.Dir+"/pipe", 0o777), os.Chmod(o.Dir+"/pipe", 0o777)))
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--report", "pipe", "true"}, 125, `sbxrun: error: cannot write the report to "pipe"`},
		{[]string{"./pipe"}, 126, `sbxrun: error: command "./pipe" cannot be executed: it is not a regular file`},
		{[]string{"--env", "PATH=.", "pipe"}, 127, `sbxrun: error: command "pipe" not found`},
	} {
		harness.Start(t, o, tt.args...).Wait().Exits(t, tt.code).ErrHas(t, tt.want)
	}
}

// An empty variable at the end of the environment reaches the command.
func TestLastVariableEmpty(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--env", "X="}, {"--env=X="}, {"--env", "Y=1", "--env", "X="}} {
		harness.Start(t, harness.Options{Bare: true}, append(args, "sh", "-c", `echo "${X-unset}."`)...).Wait().Exits(t, 0).Out(t, ".\n").Err(t, "")
	}
}

// A run does not follow a link that an earlier command has created in a writable bind.
func TestLinkPlantedInBind(t *testing.T) {
	t.Parallel()
	dir, host := harness.SharedDir(t), harness.SharedDir(t)
	bind := "--bind=" + dir + ":/w"
	harness.Run(t, harness.Options{}, bind, "ln", "-s", "/oldroot"+host, "/w/link").Expect(t, 0, "exited")
	for _, dest := range []string{"/w/link/new", "/w/link"} {
		r := harness.Start(t, harness.Options{Bare: true}, bind, "--tmpfs", dest, "true").Wait()
		r.Exits(t, 125).ErrHas(t, "is a symbolic link").ErrLines(t, 1)
	}
	lists(t, host)
}

// The completion functions of shells ask sbxrun for the words that complete a command line.
func TestComplete(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"__complete": "\n", "__complete --net ": "words\nnone\nhost\n", "__complete kill ": "sandboxes\n", "__complete logs web/": "sandboxes --all web\n",
		"__complete exec web ls ": "command 2\n", "__complete --ro-bind ": "files\n", "__complete version ": "\n",
	} {
		harness.Start(t, harness.Options{Bare: true}, strings.Split(args, " ")...).Wait().Exits(t, 0).Out(t, want).Err(t, "")
	}
}
