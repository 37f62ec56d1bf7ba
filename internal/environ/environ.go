// Package environ collects the environment variables that the payload gets.
//
// Variables come from --env options and from files of them, and both take the
// same two forms, those of docker run: NAME=VALUE sets a variable, and NAME
// alone passes on the one that sbxrun itself was started with, if there is one.
// Names are those that a shell can use; a value may be anything that fits in an
// environment, newlines and bytes that are not UTF-8 included.
//
// Values may be secrets. No error of this package contains one.
package environ

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// MaxFileSize bounds in bytes what [ParseFile] reads. Linux lets all arguments
// and variables of a program together take a few MiB, see execve(2), so a larger
// file is some other file, given by mistake.
const MaxFileSize = 1 << 20

var (
	errName = errors.New("invalid name: want letters, digits and underscores, not a digit first")
	errNUL  = errors.New("value contains a NUL byte")
)

// A Var is one variable.
type Var struct {
	Name, Value string
}

// Parse reads NAME=VALUE, or NAME for the value that lookup has, which is
// [os.LookupEnv] but for tests. With NAME alone and nothing found, ok is false
// and there is nothing to set. An error quotes what stands before the first "=".
func Parse(arg string, lookup func(string) (string, bool)) (v Var, ok bool, err error) {
	v, ok, err = parse(arg, lookup)
	if err != nil {
		return Var{}, false, fmt.Errorf("environment variable %q: %w", v.Name, err)
	}
	return v, ok, nil
}

// ParseFile reads variables from r, one on a line, in either form that [Parse]
// takes, and returns them in order, duplicates included. Nothing is quoted,
// escaped or expanded: a value is what stands between the first "=" and the end
// of the line. Blanks before a name, empty lines, lines that start with #, a
// UTF-8 byte order mark and the \r of a DOS line end are skipped. Errors give
// the file's name and the line number, but no part of the line: what looks like
// a bad name may be the second line of a private key.
func ParseFile(r io.Reader, name string, lookup func(string) (string, bool)) ([]Var, error) {
	data, err := io.ReadAll(io.LimitReader(r, MaxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("read environment file %q: %w", name, err)
	}
	if len(data) > MaxFileSize {
		return nil, fmt.Errorf("read environment file %q: larger than %d bytes", name, MaxFileSize)
	}

	var vars []Var
	number := 0
	for line := range strings.SplitSeq(strings.TrimPrefix(string(data), "\ufeff"), "\n") {
		number++
		line = strings.TrimLeft(strings.TrimSuffix(line, "\r"), " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		v, ok, err := parse(line, lookup)
		if err != nil {
			return nil, fmt.Errorf("read environment file %q: line %d: %w", name, number, err)
		}
		if ok {
			vars = append(vars, v)
		}
	}
	return vars, nil
}

// parse is [Parse] with errName or errNUL as the error, and with v.Name set even
// then.
func parse(arg string, lookup func(string) (string, bool)) (v Var, ok bool, err error) {
	v.Name, v.Value, ok = strings.Cut(arg, "=")
	if !validName(v.Name) {
		return v, false, errName
	}
	if !ok {
		v.Value, ok = lookup(v.Name)
	}
	if strings.Contains(v.Value, "\x00") {
		return v, false, errNUL
	}
	return v, ok, nil
}

// validName reports whether s is a name by POSIX, XBD 3.216: [A-Za-z_][A-Za-z0-9_]*.
func validName(s string) bool {
	for i, c := range []byte(s) {
		switch {
		case c == '_', 'A' <= c && c <= 'Z', 'a' <= c && c <= 'z':
		case '0' <= c && c <= '9' && i > 0:
		default:
			return false
		}
	}
	return s != ""
}
