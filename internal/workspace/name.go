package workspace

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Bounds of a name in a workspace.
const (
	maxName  = 1024
	maxDepth = 32
)

// Clean checks a name relative to the directory, and returns it in its shortest form. "." is the directory itself.
func Clean(name string) (string, error) { return clean(name, maxName, maxDepth) }

// clean is Clean with the directory's bounds.
func (d *Dir) clean(name string) (string, error) {
	if d.far {
		return clean(name, unix.PathMax-1, maxTree+1) // a file may be in the last directory
	}
	return Clean(name)
}

func clean(name string, maxName, maxDepth int) (string, error) {
	clean := strings.TrimSuffix(name, "/")
	for strings.HasPrefix(clean, "./") {
		clean = clean[2:]
	}
	switch {
	case name == "":
		return "", usage("empty path")
	case len(name) > maxName || strings.Count(clean, "/") >= maxDepth:
		return "", usage("path %.60q…: at most %d bytes, and %d levels", name, maxName, maxDepth)
	case path.IsAbs(name):
		return "", usage("path %q is absolute: it must be relative to the workspace", name)
	case strings.ContainsRune(name, 0):
		return "", usage("path %q contains a NUL byte", name)
	case slices.Contains(strings.Split(clean, "/"), ".."):
		return "", usage("path %q contains a .. part", name)
	case strings.Contains(clean, "//") || clean != path.Clean(clean):
		return "", usage("path %q has empty or . parts", name)
	}
	return clean, nil
}

func usage(format string, args ...any) error {
	return &result.Error{Code: "usage", Message: fmt.Sprintf(format, args...)}
}

// explain converts a kernel error about a name.
func explain(name string, err error) error {
	e := &result.Error{Err: err}
	switch {
	case errors.Is(err, unix.ELOOP):
		e.Code, e.Message = "usage", fmt.Sprintf("%q is, or is below, a symbolic link", name)
	case errors.Is(err, unix.ENOENT):
		e.Code, e.Message = "no-such-file", fmt.Sprintf("%q does not exist", name)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Code, e.Message = "quota-disk", fmt.Sprintf("no space left for %q", name)
	case errors.Is(err, unix.EAGAIN):
		e.Code, e.Message = "usage", fmt.Sprintf("%q is blocked by a lease (fcntl(2), F_SETLEASE)", name)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EXDEV),
		errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.ETXTBSY), errors.Is(err, unix.ENAMETOOLONG):
		e.Code, e.Message = "usage", fmt.Sprintf("%q: %v", name, err)
	default:
		e.Code, e.Message = "setup", fmt.Sprintf("%q: %v", name, err)
	}
	return e
}

// nonEmpty returns a directory of path.Split without the slash, or "." for "".
func nonEmpty(dir string) string {
	if dir == "" {
		return "."
	}
	return strings.TrimSuffix(dir, "/")
}
