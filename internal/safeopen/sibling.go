package safeopen

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Sibling returns the path of sbxrund, which is installed in the same directory as sbxrun. It does not
// search PATH or the current directory, where other users may have put a program of that name. It returns
// an error if users who cannot change sbxrun can change sbxrund.
func Sibling() (string, error) {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return "", err
	}
	server := filepath.Join(filepath.Dir(self), "sbxrund")
	var own, other unix.Stat_t
	if unix.Stat("/proc/self/exe", &own) != nil || unix.Stat(server, &other) != nil {
		return server, nil // executing it reports the error
	}
	if other.Uid != 0 && other.Uid != own.Uid && other.Uid != uint32(os.Geteuid()) || other.Mode&0o022&^own.Mode != 0 {
		return "", &result.Error{Code: "setup", Message: fmt.Sprintf("%s cannot be trusted: users who cannot change sbxrun can change it (owner %d, mode %04o)", server, other.Uid, other.Mode&0o7777),
			Hint: "install sbxrun and sbxrund with the same owner and mode"}
	}
	return server, nil
}

// SiblingError converts an error from opening or executing sbxrund.
func SiblingError(server string, err error) *result.Error {
	cause := err
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		cause = path.Err // the message has the path already
	}
	e := &result.Error{Code: "setup", Message: "cannot execute " + server + ": " + cause.Error(), Err: err}
	if !errors.Is(err, fs.ErrNotExist) {
		return e
	}
	e.Hint = "install sbxrund in the same directory as sbxrun: packages and archives contain both; go install builds it from cmd/sbxrund"
	if setup := filepath.Join(filepath.Dir(filepath.Dir(server)), "setup.sh"); unix.Access(setup, unix.F_OK) == nil {
		e.Hint = "build it: " + setup + " build"
	}
	return e
}
