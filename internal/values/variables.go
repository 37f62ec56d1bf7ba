package values

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// MaxVarsSize is the maximum size of a file for [ParseVars]. Linux limits all arguments and variables of a program to a
// few MiB (execve(2)), so a larger file is probably the wrong one.
const MaxVarsSize = 1 << 20

var (
	errName = errors.New("invalid name: want letters, digits and underscores, not a digit first")
	errNUL  = errors.New("value contains a NUL byte")
)

// Var is an environment variable with a name that shells accept. The value can contain newlines and bytes that are not
// UTF-8. It may be a secret, so no error contains one.
type Var struct {
	Name, Value string
}

// ParseVar parses a variable like docker run: NAME=VALUE, or NAME for the value in sbxrun's own environment. ok is false
// if that has no such variable. An error quotes only the name.
func ParseVar(arg string) (v Var, ok bool, err error) {
	v, ok, err = parseVar(arg)
	if err != nil {
		return Var{}, false, fmt.Errorf("environment variable %q: %w", v.Name, err)
	}
	return v, ok, nil
}

// ParseVars parses the lines of a file, each in one of the forms of [ParseVar], and returns all variables in order. It
// does not interpret quotes, escapes or references: the value extends from the first "=" to the end of the line. It
// skips blanks before a name, empty lines, lines that start with #, a UTF-8 byte order mark and \r at the end of a line.
// Errors contain the file name and the line number, but no part of the line, which may belong to a private key.
func ParseVars(text []byte, name string) ([]Var, error) {
	if len(text) > MaxVarsSize {
		return nil, fmt.Errorf("read environment file %q: larger than %d bytes", name, MaxVarsSize)
	}
	var vars []Var
	number := 0
	for line := range strings.SplitSeq(strings.TrimPrefix(string(text), "\ufeff"), "\n") {
		number++
		line = strings.TrimLeft(strings.TrimSuffix(line, "\r"), " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		v, ok, err := parseVar(line)
		if err != nil {
			return nil, fmt.Errorf("read environment file %q: line %d: %w", name, number, err)
		}
		if ok {
			vars = append(vars, v)
		}
	}
	return vars, nil
}

// ParsePair parses NAME=VALUE, without access to the environment of this process.
func ParsePair(pair string) (Var, error) {
	if !strings.Contains(pair, "=") {
		return Var{}, fmt.Errorf("environment variable %.80q: want NAME=VALUE", pair)
	}
	v, _, err := ParseVar(pair)
	return v, err
}

// parseVar is [ParseVar] with the errors errName and errNUL, after which v.Name is set.
func parseVar(arg string) (v Var, ok bool, err error) {
	v.Name, v.Value, ok = strings.Cut(arg, "=")
	if !validName(v.Name) {
		return v, false, errName
	}
	if !ok {
		v.Value, ok = os.LookupEnv(v.Name)
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

// Environment has at most one [Var] of each name. The zero value is empty. Copies share their variables: see Clone.
type Environment struct {
	vars  []Var
	index map[string]int // name to position in vars
}

// Put adds v, or replaces the variable of the same name in its place.
func (e *Environment) Put(v Var) {
	if i, ok := e.index[v.Name]; ok {
		e.vars[i] = v
		return
	}
	if e.index == nil {
		e.index = make(map[string]int)
	}
	e.index[v.Name] = len(e.vars)
	e.vars = append(e.vars, v)
}

// Clone returns a copy that Put can change without changing e.
func (e *Environment) Clone() Environment {
	return Environment{vars: slices.Clone(e.vars), index: maps.Clone(e.index)}
}

// PutPairs adds variables of the form NAME=VALUE. An error is a *[result.Error].
func (e *Environment) PutPairs(pairs []string) error {
	for _, pair := range pairs {
		v, err := ParsePair(pair)
		if err != nil {
			return &result.Error{Code: "usage", Message: "Env: " + err.Error()}
		}
		e.Put(v)
	}
	return nil
}

// Lookup returns the value of the variable called name, and whether there is one.
func (e *Environment) Lookup(name string) (value string, ok bool) {
	i, ok := e.index[name]
	if !ok {
		return "", false
	}
	return e.vars[i].Value, true
}

// Vars returns the variables in the order in which their names were first put.
// The slice is the caller's.
func (e *Environment) Vars() []Var {
	return slices.Clone(e.vars)
}

// Pairs returns NAME=VALUE for each variable, as for execve(2).
func Pairs(vars []Var) []string {
	list := make([]string, 0, len(vars))
	for _, v := range vars {
		list = append(list, v.Name+"="+v.Value)
	}
	return list
}
