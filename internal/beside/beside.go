// Package beside finds sbxrund, which lies in the directory that sbxrun is in: one in PATH or in
// the current directory could be anybody's.
package beside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Server is where sbxrund should be. One that users can change who cannot change this program is an
// error, so that it is not executed.
func Server() (string, error) {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return "", err
	}
	server := filepath.Join(filepath.Dir(self), "sbxrund")
	var own, other unix.Stat_t
	if unix.Stat("/proc/self/exe", &own) != nil || unix.Stat(server, &other) != nil {
		return server, nil // whoever executes it gets the error
	}
	if other.Uid != 0 && other.Uid != own.Uid && other.Uid != uint32(os.Geteuid()) || other.Mode&0o022&^own.Mode != 0 {
		return "", &result.Error{Code: "setup", Message: fmt.Sprintf("%s cannot be trusted: users who cannot change sbxrun can change it (owner %d, mode %04o)", server, other.Uid, other.Mode&0o7777),
			Hint: "install sbxrun and sbxrund with the same owner and mode"}
	}
	return server, nil
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
