package room

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/values"
)

// defaultPath is the PATH of a sandbox that shows no directory of the caller's PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// sandboxPathOf returns the directories of the caller's PATH that the sandbox shows.
func sandboxPathOf(v view, callers string) string {
	var dirs []string
	for _, dir := range strings.Split(callers, ":") {
		if path.IsAbs(dir) && v.visible(path.Clean(dir)) {
			dirs = append(dirs, dir)
		}
	}
	if len(dirs) == 0 {
		return defaultPath
	}
	return strings.Join(dirs, ":")
}

// checkCommand checks, as far as possible from outside, that the payload can be executed. It runs before anything is
// built, and its errors say more than the errno of an exec. found is the result of a lookup in PATH, "" if there was
// none.
func checkCommand(v view, name, workdir, sandboxPath string, c Caller) (found string, err error) {
	if name == "" {
		return "", notFound("the command is an empty string", "")
	}
	if strings.Contains(name, "/") {
		return "", checkFile(v, name, inDir(workdir, name), c.Home)
	}
	var denied error
	for _, dir := range strings.Split(sandboxPath, ":") {
		p := inDir(inDir(workdir, dir), name) // an empty entry is the current directory
		host, err := v.resolve(p)
		if err != nil || host == "" || !isFile(host) {
			continue
		}
		err = checkFile(v, name, p, c.Home)
		if err == nil {
			return p, nil
		}
		if denied == nil {
			denied = err // execvp(3) continues, too, and reports EACCES at the end
		}
	}
	if denied != nil {
		return "", denied
	}
	e := notFound(fmt.Sprintf("command %q not found in the sandbox's PATH %.300s", name, sandboxPath), "")
	if v.rooted() { // the host's programs need the host's libraries
		return "", e
	}
	host := lookHost(name, c.Path)
	if host == "" {
		return "", e
	}
	if checkFile(v, name, host, c.Home) != nil {
		return "", notFound(fmt.Sprintf("command %q is at %s, which is not visible in the sandbox", name, host), "--tools")
	}
	if sandboxPath != sandboxPathOf(v, c.Path) {
		e.Message += ", which --env or --env-file sets"
	}
	e.Hint = "name it by its path: " + values.ShellQuote(host)
	return "", e
}

// inLayer reports whether a command may be in a layer of an overlay, which only the sandbox can see.
func (v view) inLayer(name, workdir, sandboxPath string) bool {
	if strings.Contains(name, "/") {
		return v.layered(inDir(workdir, name))
	}
	return name != "" && slices.ContainsFunc(strings.Split(sandboxPath, ":"), func(dir string) bool {
		return v.layered(inDir(inDir(workdir, dir), name))
	})
}

// puts reports whether a command may be a file that is copied in, which is not there yet.
func (p *Policy) puts(name, workdir string) bool {
	return strings.Contains(name, "/") && slices.ContainsFunc(p.Put, func(dest string) bool {
		return values.Within(path.Clean(inDir(workdir, name)), path.Clean(inDir(workdir, dest)))
	})
}

// insteadOf returns the program that the caller's PATH selects for a command, if the sandbox finds another one because
// it does not show that program's directory or the target of a link there; otherwise "".
func insteadOf(v view, found, sandboxPath, callers string) string {
	dir, name := path.Split(found)
	for _, hostDir := range strings.Split(callers, ":") {
		if hostDir == path.Clean(dir) && slices.Contains(strings.Split(sandboxPath, ":"), hostDir) {
			return ""
		}
		if host := lookHost(name, hostDir); host != "" {
			inside, err := v.resolve(found)
			outside, err2 := filepath.EvalSymlinks(host)
			// In a virtual environment, a link to the same python3 has other packages.
			if _, venv := os.Stat(path.Join(hostDir, "../pyvenv.cfg")); err == nil && err2 == nil && inside == outside && venv != nil {
				return ""
			}
			return host
		}
	}
	return ""
}

// bindFor returns the directory to bind for the program at host: for prefix/bin/name the prefix, because it contains
// the libraries. It returns the program itself if the directory contains a home directory.
func bindFor(host, home string) string {
	dir := path.Dir(host)
	if base := path.Base(dir); base == "bin" || base == "shims" {
		dir = path.Dir(dir)
	}
	if dir == "/" || hostfiles.HomeWithin(dir, home) != "" {
		return host
	}
	return dir
}

// lookHost looks a program up in a PATH on the host; "" for none. It ignores relative directories.
func lookHost(name, callers string) string {
	for _, dir := range strings.Split(callers, ":") {
		if p := path.Join(dir, name); path.IsAbs(p) && unix.Access(p, unix.X_OK) == nil && isFile(p) {
			return p
		}
	}
	return ""
}

func isFile(host string) bool {
	var st unix.Stat_t
	return unix.Stat(host, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// checkFile checks the file that would be executed.
func checkFile(v view, name, p, home string) error {
	host, err := v.resolve(p)
	switch {
	case errors.Is(err, errNotVisible):
		if _, err := os.Stat(p); err != nil {
			return notFound(fmt.Sprintf("command %q: no such file", name), "")
		}
		message := fmt.Sprintf("command %q is not visible in the sandbox", name)
		if h := (*hiddenError)(nil); errors.As(err, &h) && h.path != path.Clean(p) {
			message = fmt.Sprintf("command %q leads to %q, which is not visible in the sandbox", name, h.path)
		}
		return notFound(message, v.showing(p, err, home))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return notFound(fmt.Sprintf("command %q: no such file", name), "")
	case err != nil:
		return notExecutable(name, err.Error(), "")
	case host == "" && v.isCopy(p):
		return notExecutable(name, "permission denied", "")
	case host == "":
		return notExecutable(name, "it is a directory", "")
	}
	st, err := os.Stat(host)
	switch {
	case err != nil:
		return notExecutable(name, err.Error(), "")
	case st.IsDir():
		return notExecutable(name, "it is a directory", "")
	case !st.Mode().IsRegular():
		return notExecutable(name, "it is not a regular file", "")
	case st.Mode()&0o111 == 0 || unix.Access(host, unix.X_OK) != nil:
		if v.inRoot(host) {
			return notExecutable(name, "permission denied", "")
		}
		return notExecutable(name, "permission denied", "chmod +x "+values.ShellQuote(host))
	}
	interpreter := Interpreter(host)
	if interpreter == "" {
		return nil
	}
	if !path.IsAbs(interpreter) {
		return nil // relative to the working directory; the kernel reports errors
	}
	if at, err := v.resolve(interpreter); (err != nil || at == "") && !v.layered(interpreter) {
		e := notExecutable(name, fmt.Sprintf("its interpreter %q does not exist in the sandbox", interpreter), "")
		// In a venv, the interpreter is a link, often to a hidden file.
		if strings.HasSuffix(interpreter, "\r") {
			e.Hint = "its lines end as on Windows: sed -i 's/\\r$//' " + values.ShellQuote(host)
		} else {
			e.Hint = v.showing(interpreter, err, home)
		}
		return e
	}
	return nil
}

// showing returns the flags that show the program at a path, which the sandbox hides with this error. It returns "" if
// the file could be a secret, because a stranger may have made the path or a link on the way. The flags show all hidden
// parts of a chain of links.
func (v view) showing(p string, err error, home string) string {
	real, linkErr := filepath.EvalSymlinks(p)
	if v.rooted() || linkErr != nil || !isFile(real) || hostfiles.Private(real) || unix.Access(real, unix.X_OK) != nil {
		return ""
	}
	var dirs []string
	if h := (*hiddenError)(nil); errors.As(err, &h) && h.path != real {
		if _, err := CleanDest(h.path); err != nil {
			return "" // a link of /proc or /dev
		}
		if !hostfiles.Private(h.path) {
			dirs = append(dirs, bindFor(h.path, home))
		}
	}
	if dir := bindFor(real, home); v.hostPath(real) == "" && !slices.ContainsFunc(dirs, func(shown string) bool { return values.Within(dir, shown) }) {
		dirs = append(slices.DeleteFunc(dirs, func(shown string) bool { return values.Within(shown, dir) }), dir)
	}
	for i, dir := range dirs {
		dirs[i] = "--ro-bind " + values.ShellQuote(dir)
	}
	return strings.Join(dirs, " ")
}

// Interpreter returns the interpreter that a script names, or "". The kernel reads 255 bytes of the first line
// (execve(2)).
func Interpreter(host string) string {
	// Another sandbox may have replaced the file: a pipe must not block us, and a terminal must not become ours.
	fd, err := unix.Open(host, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = unix.Close(fd) }() // only read from
	buf := make([]byte, 255)
	n, _ := unix.Read(fd, buf) // after an error there is no known shebang
	line, ok := bytes.CutPrefix(buf[:max(n, 0)], []byte("#!"))
	if !ok {
		return ""
	}
	line, _, _ = bytes.Cut(line, []byte("\n"))
	// As the kernel does it: a carriage return is part of the name.
	name, _, _ := strings.Cut(strings.ReplaceAll(strings.Trim(string(line), " \t"), "\t", " "), " ")
	return name
}

func notFound(message, flags string) *result.Error {
	e := &result.Error{Code: "not-found", ExitCode: result.ExitNotFound, Message: message}
	if flags != "" {
		e.Hint = "show it with: " + flags
	}
	return e
}

func notExecutable(name, reason, hint string) *result.Error {
	return &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable, Message: fmt.Sprintf("command %q cannot be executed: %s", name, reason), Hint: hint}
}
