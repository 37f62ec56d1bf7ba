// Package beside finds sbxrund, which lies in the directory that sbxrun is in: one in PATH or in
// the current directory could be anybody's.
package beside

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Server is where sbxrund should be.
func Server() (string, error) {
	self, err := os.Readlink("/proc/self/exe")
	return filepath.Join(filepath.Dir(self), "sbxrund"), err
}

// Unusable words why it could not be opened or executed.
func Unusable(server string, err error) *result.Error {
	cause := err
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		cause = path.Err // it names the same path again
	}
	e := &result.Error{Code: "setup", Message: "cannot execute " + server + ": " + cause.Error(), Err: err}
	if !errors.Is(err, fs.ErrNotExist) {
		return e
	}
	e.Hint = "install sbxrund beside sbxrun: packages and archives contain both; go install builds it from cmd/sbxrund"
	if setup := filepath.Join(filepath.Dir(filepath.Dir(server)), "setup.sh"); isThere(setup) {
		e.Hint = "build it: " + setup + " build"
	}
	return e
}

func isThere(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}
