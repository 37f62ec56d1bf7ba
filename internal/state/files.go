package state

import (
	"encoding/json"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// checked is the JSON content of a file. Dangerous values are checked strictly, before writing and
// after reading; texts are arbitrary and must be quoted when they are shown.
type checked interface{ check() error }

func readJSON(f safeopen.Folder, name string, v checked) error {
	data, err := f.Read(name)
	if err != nil {
		return err
	}
	return f.Fail("read", name, parse(data, v))
}

// writeJSON writes v as one line.
func writeJSON(f safeopen.Folder, name string, v checked) error {
	if err := v.check(); err != nil {
		return err // reading it would fail, too
	}
	data, err := result.JSON(v)
	if err != nil {
		return err
	}
	return f.Write(name, data)
}

func parse(data []byte, v checked) error {
	err := json.Unmarshal(data, v)
	var kind *json.UnmarshalTypeError // its message names Go types
	switch {
	case err == nil:
		return v.check()
	case !errors.As(err, &kind):
		return safeopen.Damaged("%v", err)
	case kind.Field == "":
		return safeopen.Damaged("a %s, not an object", kind.Value)
	}
	return safeopen.Damaged("%q is a %s", kind.Field, kind.Value)
}

// empty removes the files in f, except those to keep. A directory stays and is an error, unless dirs is set;
// the execs are removed in any case.
func empty(f safeopen.Folder, dirs bool, keep ...string) error {
	names, err := f.Names()
	for _, name := range names {
		switch {
		case slices.Contains(keep, name):
		case dirs || name == execsName:
			err = result.All(err, scrap(f, name))
		default:
			err = result.All(err, f.Unlink(name))
		}
	}
	return err
}

// scrap removes a directory in f with the files in it, or a file of that name. A missing name is not an error.
func scrap(f safeopen.Folder, name string) error {
	sub, err := f.Sub(name)
	if safeopen.IsDamaged(err) || errors.Is(err, unix.ENOENT) {
		return f.Unlink(name)
	}
	if err != nil {
		return err
	}
	defer sub.Close()
	return rmdir(f, name, sub)
}

// rmdir removes a directory with the files in it. sub is that directory; if it is not open, the directory must be
// empty. A missing directory is not an error.
func rmdir(f safeopen.Folder, name string, sub safeopen.Folder) error {
	if sub.FD >= 0 {
		if err := empty(sub, name == execsName); err != nil {
			return err // it is not empty
		}
	}
	return f.Rmdir(name)
}
