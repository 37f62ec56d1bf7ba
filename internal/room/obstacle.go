package room

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
)

// Failure is what is known of a command that has failed.
type Failure struct {
	Code    int  // its exit code
	Network bool // it has tried to reach one, and has none
}

// answers are programs whose exit code 1 is an answer.
var answers = []string{"[", "cmp", "diff", "egrep", "expr", "false", "fgrep", "grep", "pgrep", "rg", "test"}

// Obstacle returns what of the sandbox most likely stood in the way of a command, with the
// flag that takes it away; "" if nothing is likely. Nothing was seen of the command but how
// it ended. c is the caller of [Prepare]. Before Close.
func (p *Plan) Obstacle(f Failure, c Caller) string {
	name := ""
	if len(p.command) > 0 {
		name = path.Base(p.command[0])
	}
	for _, arg := range p.command[min(1, len(p.command)):] {
		if hint := p.hidden(arg, c.Home); hint != "" {
			return hint
		}
	}
	const notFound, notExecutable, gitFails = 127, 126, 128
	work, shown := view(p.ops).mountOf(p.Workdir)
	switch {
	case (f.Code == notFound || f.Code == notExecutable) && p.hidesPath(c.Path):
		return "a command may be in a directory of PATH that the sandbox does not show; --tools shows them"
	case f.Network:
		return "it tried to reach a network, and has none; --net host gives it the host's"
	case name == "git" && f.Code == gitFails && p.repository(c.Home) != "":
		return "the repository begins above the current directory, where it sees nothing; --cwd-root " + shellQuote(p.repository(c.Home)) + " shows all of it"
	case f.Code == 1 && slices.Contains(answers, name):
		return ""
	case shown && work.users && work.kind == opBind:
		return "it could read the current directory, but not write to it; -w lets it write there"
	case p.Workdir == Home:
		return "it saw nothing of the current directory, and its home is empty; --ro-bind NAME shows a file or a directory"
	}
	return ""
}

// hidden is about an argument that names what is there on the host and not in the
// sandbox. A secret is not offered.
func (p *Plan) hidden(arg, home string) string {
	if _, value, ok := strings.Cut(arg, "="); ok && strings.HasPrefix(arg, "-") {
		arg = value
	}
	if !strings.Contains(arg, "/") || len(arg) > 4096 {
		return ""
	}
	name := path.Clean(inDir(p.Workdir, arg))
	if _, err := view(p.ops).resolve(name); !errors.Is(err, errNotVisible) {
		return ""
	}
	if _, err := os.Lstat(name); err != nil || Within(name, "/proc") || Within(name, "/sys") || Within(name, "/dev") {
		return ""
	}
	what := fmt.Sprintf("%q is not shown in the sandbox", name)
	switch {
	case HomeWithin(name, home) != "":
		return what + ": it is or holds a home directory; --ro-bind NAME shows a file or a directory of it"
	case strings.Contains(name, "/.") || Within(name, "/etc") || Within(name, "/run"):
		return what // it could be a secret
	case !path.IsAbs(arg):
		top := p.Workdir
		for !Within(name, top) {
			top = path.Dir(top)
		}
		if top != "/" && HomeWithin(top, home) == "" {
			return what + "; --cwd-root " + shellQuote(top) + " shows it and the current directory"
		}
	}
	return what + "; --ro-bind " + shellQuote(name) + " shows it"
}

// hidesPath reports whether there are directories of the caller's PATH that are not shown.
func (p *Plan) hidesPath(callers string) bool {
	for _, dir := range strings.Split(callers, ":") {
		if st, err := os.Stat(dir); path.IsAbs(dir) && err == nil && st.IsDir() && !slices.Contains(strings.Split(p.path, ":"), dir) {
			return true
		}
	}
	return false
}

// repository is the top of the repository that the working directory is in, if that is
// above what is shown and no home directory.
func (p *Plan) repository(home string) string {
	for dir := p.Workdir; dir != "/"; dir = path.Dir(dir) {
		if _, err := os.Lstat(path.Join(dir, ".git")); err == nil {
			if view(p.ops).visible(dir) || HomeWithin(dir, home) != "" {
				return ""
			}
			return dir
		}
	}
	return ""
}
