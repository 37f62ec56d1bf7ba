// Package obstacle suggests why a command in a sandbox failed, and what to do about it.
package obstacle

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Failure describes a failed command.
type Failure struct {
	Code    int  // its exit code
	Network bool // it tried to reach the network without having one
	Listed  bool // the sandbox has a proxy for a list of hosts
	Tasks   int  // the limit on tasks, if it was reached
}

// answers are programs for which exit code 1 is a normal result.
var answers = []string{"[", "cmp", "diff", "egrep", "expr", "false", "fgrep", "grep", "pgrep", "rg", "test"}

// writers are programs that usually write to the current directory.
var writers = []string{"ant", "ar", "bundle", "c++", "cargo", "cc", "chmod", "clang", "clang++", "cmake", "composer", "configure", "cp", "dd", "g++", "gcc", "git", "gradle", "gradlew", "gunzip", "gzip", "install", "javac",
	"latexmk", "ld", "ln", "lualatex", "make", "meson", "mkdir", "mv", "mvn", "mvnw", "ninja", "npm", "npx", "patch", "pdflatex", "pnpm", "rm", "rmdir", "rustc", "tar", "tee", "touch", "truncate", "tsc", "unzip", "uv", "xelatex", "yarn", "zip"}

// shells are programs whose scripts can redirect output to a file.
var shells = []string{"bash", "dash", "sh", "zsh"}

// Sight answers questions about clean absolute paths in a sandbox.
type Sight interface {
	Hides(name string) bool   // the path, with links followed, does not lead to a visible host file
	ReadOnly(dir string) bool // it is a directory of the user that is mounted read-only
	Overlaid(dir string) bool // it is in an overlay, as far as is known
}

// scene is a failed command and its view of the files.
type scene struct {
	*enter.Entry
	sight Sight
}

// Find returns the restriction that most likely made a command fail, and the flag that removes it, if there is one; ""
// if nothing is likely. It knows only how the command ended. sight is the command's [room.Plan], before Close, or
// [Inside] an existing room, which would have to be built with the flag.
func Find(e *enter.Entry, sight Sight, f Failure, c room.Caller) (what, remedy string) {
	return scene{e, sight}.obstacle(f, c)
}

// Inside is the [Sight] of an existing room, with its PID 1.
type Inside struct{ *proc.Process }

// open opens a path (O_PATH). Links are resolved within the room (openat2(2)).
func (in Inside) open(name string) (fd int, err error) {
	root, err := in.OpenRoot()
	if err != nil {
		return -1, err // it has ended, or is not accessible
	}
	defer unix.Close(root)
	return safeopen.InRoot(root, name, unix.O_PATH, 0)
}

// statfs returns the status of the file system at a path; zero for unknown.
func (in Inside) statfs(name string) (st unix.Statfs_t) {
	if fd, err := in.open(name); err == nil {
		_ = unix.Fstatfs(fd, &st)
		unix.Close(fd)
	}
	return st
}

func (in Inside) Hides(name string) bool {
	fd, err := in.open(name)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err == unix.ENOENT
}

func (in Inside) ReadOnly(dir string) bool {
	return in.statfs(dir).Flags&unix.ST_RDONLY != 0 && !room.OfSystem(dir)
}

func (in Inside) Overlaid(dir string) bool { return in.statfs(dir).Type == unix.OVERLAYFS_SUPER_MAGIC }

// obstacle returns the likely restriction and the flag that removes it; "" for unknown.
func (s scene) obstacle(f Failure, c room.Caller) (what, remedy string) {
	if f.Tasks > 0 { // certain; everything else is a guess
		return fmt.Sprintf("the limit on tasks was reached (--pids %d)", f.Tasks), "a larger one lets it start more"
	}
	name := ""
	if len(s.Command) > 0 {
		name = path.Base(s.Command[0])
	}
	for _, arg := range s.Command[min(1, len(s.Command)):] {
		if what, remedy = s.hidden(arg, c.Home); what != "" {
			return what, remedy
		}
	}
	const notFound, notExecutable, gitFails = 127, 126, 128
	switch {
	case (f.Code == notFound || f.Code == notExecutable) && s.hidesPath(c.Path):
		return "a command may be in a directory of PATH that the sandbox does not show", "--tools shows it"
	case f.Listed:
		return "it tried to reach a network without the proxy of --net allow=, which HTTPS_PROXY and ALL_PROXY name", ""
	case f.Network:
		return "it tried to reach a network, and has none", "--net allow=HOST lets it reach that host"
	case name == "git" && f.Code == gitFails && s.linkedGit(c.Home) != "":
		return "the repository of this working tree or submodule is not shown", s.linkedGit(c.Home) + " shows it"
	case name == "git" && f.Code == gitFails && s.repository(c.Home) != "":
		return "the repository begins above the current directory, and is not shown", "--cwd-root " + values.ShellQuote(s.repository(c.Home)) + " shows all of it"
	case f.Code == 1 && slices.Contains(answers, name):
		return "", ""
	case f.Code == notFound || f.Code == notExecutable:
		return "", ""
	case name == "git" && slices.Contains(s.Command, "mv") && s.sight.Overlaid(s.Workdir):
		return "a directory cannot be renamed in an overlay (EXDEV)", "mv OLD NEW && git add -A copies it instead"
	case name == "cp" && !s.sight.ReadOnly(s.Workdir) && s.setgid():
		return "setuid and setgid bits cannot be set in a sandbox, and directories here have one", "cp -a --no-preserve=mode copies without it"
	case (name == "chmod" || name == "tar" || name == "rsync" || name == "install") && !s.sight.ReadOnly(s.Workdir) && s.setgid():
		return "setuid and setgid bits cannot be set in a sandbox, and directories here have one", ""
	case s.sight.ReadOnly(s.Workdir) && s.writes(name):
		return "if it tried to write to the current directory, it could not", "-w lets it write there"
	case s.sight.ReadOnly(s.Workdir):
		return "", ""
	case s.Workdir == room.Home:
		return "if it tried to read the current directory, it could not: its home is empty", "--ro-bind NAME shows a file or a directory"
	}
	return "", ""
}

// hidden handles an argument that names a file of the host that the sandbox hides. It does not suggest showing
// possible secrets.
func (s scene) hidden(arg, home string) (what, remedy string) {
	if _, value, ok := strings.Cut(arg, "="); ok && strings.HasPrefix(arg, "-") {
		arg = value
	}
	if !strings.Contains(arg, "/") || len(arg) > 4096 {
		return "", ""
	}
	if n, err := strconv.Atoi(strings.TrimPrefix(arg, "/dev/fd/")); err == nil && n > 2 {
		return fmt.Sprintf("the shell's descriptor %s, as of <(COMMAND), is not passed to the sandbox", arg), "a file in the current directory is"
	}
	name := path.Clean(arg)
	if !path.IsAbs(arg) {
		name = path.Join(s.Workdir, arg)
	}
	if !s.sight.Hides(name) {
		return "", ""
	}
	if _, err := os.Lstat(name); err != nil || values.Within(name, "/proc") || values.Within(name, "/sys") || values.Within(name, "/dev") {
		return "", ""
	}
	what = fmt.Sprintf("%q is not shown in the sandbox", name)
	switch {
	case hostfiles.HomeWithin(name, home) != "":
		return what + ": it is or holds a home directory", "--ro-bind NAME shows a file or a directory of it"
	case strings.Contains(name, "/.") || values.Within(name, "/etc") || values.Within(name, "/run"):
		return what, "" // it could be a secret
	case !path.IsAbs(arg):
		top := s.Workdir
		for !values.Within(name, top) {
			top = path.Dir(top)
		}
		if top != "/" && hostfiles.HomeWithin(top, home) == "" {
			return what, "--cwd-root " + values.ShellQuote(top) + " shows it and the current directory"
		}
	}
	return what, "--ro-bind " + values.ShellQuote(name) + " shows it"
}

// writes reports whether a command probably tried to write to the current directory: it is one of writers, or inline
// code that redirects output, writes, or names one of writers.
func (s scene) writes(name string) bool {
	if slices.Contains(writers, name) {
		return true
	}
	for i, arg := range s.Command {
		if flag := s.Command[max(i-1, 0)]; i < 2 || !strings.HasPrefix(flag, "-") || !strings.HasSuffix(flag, "c") && !strings.HasSuffix(flag, "e") {
			continue
		}
		words := strings.FieldsFunc(arg, func(r rune) bool { return strings.ContainsRune(" \t\n;&|()", r) })
		if slices.ContainsFunc(words, func(word string) bool { return slices.Contains(writers, path.Base(word)) }) || strings.Contains(arg, "write") {
			return true
		}
		redirects := strings.NewReplacer(">/dev/null", "", "> /dev/null", "", ">&", "", "=>", "", "->", "")
		if slices.Contains(shells, name) && strings.Contains(redirects.Replace(arg), ">") {
			return true
		}
	}
	return false
}

// setgid reports whether the working directory has the setgid bit, which new directories in it get as well.
func (s scene) setgid() bool {
	var st unix.Stat_t
	return unix.Stat(s.Workdir, &st) == nil && st.Mode&unix.S_ISGID != 0
}

// linkedGit returns the flag that shows the repository of a linked working tree or a submodule, if its file .git names
// one that is hidden; otherwise "".
func (s scene) linkedGit(home string) string {
	for dir := s.Workdir; dir != "/"; dir = path.Dir(dir) {
		target, ok := hostfiles.GitFile(path.Join(dir, ".git"), dir, "gitdir: ")
		top, _, linked := strings.Cut(target, "/.git/")
		if !ok || !linked {
			continue
		}
		git := path.Join(top, ".git")
		switch st, err := os.Lstat(git); {
		case err != nil || !st.IsDir() || !s.sight.Hides(git) || hostfiles.HomeWithin(git, home) != "":
			return ""
		case values.Within(dir, top) && hostfiles.HomeWithin(top, home) == "":
			return "--cwd-root " + values.ShellQuote(top)
		}
		return "--ro-bind " + values.ShellQuote(git)
	}
	return ""
}

// hidesPath reports whether the sandbox hides a directory of the caller's PATH.
func (s scene) hidesPath(callers string) bool {
	for _, dir := range strings.Split(callers, ":") {
		if st, err := os.Stat(dir); path.IsAbs(dir) && err == nil && st.IsDir() && !slices.Contains(strings.Split(s.Path, ":"), dir) {
			return true
		}
	}
	return false
}

// repository returns the top directory of the repository that contains the working directory, if the sandbox hides it
// and it is not a home directory.
func (s scene) repository(home string) string {
	for dir := s.Workdir; dir != "/"; dir = path.Dir(dir) {
		git := path.Join(dir, ".git")
		if _, err := os.Lstat(git); err == nil {
			if !s.sight.Hides(git) || hostfiles.HomeWithin(dir, home) != "" {
				return ""
			}
			return dir
		}
	}
	return ""
}
