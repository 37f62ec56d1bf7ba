package state

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// ValidName checks a name that somebody wants to give to a sandbox.
func ValidName(name string) error {
	if !validName(name) {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("%.80q cannot be the name of a sandbox", name),
			Hint: "a name has 1 to 63 letters, digits, dots, underscores and hyphens, and begins with neither dot nor hyphen"}
	}
	return nil
}

func validName(name string) bool {
	if name == "" || len(name) > 63 || name[0] == '.' || name[0] == '-' {
		return false
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

const idDigits = 16

func validID(id string) bool { return len(id) == idDigits && isHex(id) }

func isHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// names opens the directory of names; ENOENT where nobody has had one yet.
func (d *Dir) names() (folder, error) { return d.root.sub(namesName) }

// owner is the id that the name's link says, "" if that is no id.
func owner(names folder, name string) (string, error) {
	var buf [idDigits + 1]byte
	n, err := unix.Readlinkat(names.fd, name, buf[:])
	if err != nil && err != unix.EINVAL { // EINVAL: no symbolic link
		return "", names.fail("readlink", name, err)
	}
	if id := string(buf[:max(n, 0)]); validID(id) {
		return id, nil
	}
	return "", nil
}

// claim gives the name to the sandbox id, unless it belongs to one that lives.
// The caller is alone.
func (d *Dir) claim(name, id string) error {
	if err := unix.Mkdirat(d.root.fd, namesName, 0o700); err != nil && err != unix.EEXIST {
		return d.root.fail("mkdir", namesName, err)
	}
	names, err := d.names()
	if err != nil {
		return err
	}
	defer names.close()
	// Once more after what was in the way is gone. Nobody else puts anything there.
	for range 2 {
		if err = unix.Symlinkat(id, names.fd, name); err != unix.EEXIST {
			break
		}
		other, err := owner(names, name)
		if errors.Is(err, unix.ENOENT) {
			continue // just freed by its owner, who need not be alone for that
		}
		if err != nil {
			return err
		}
		alive, err := d.alive(other)
		if err != nil {
			return err
		}
		if alive {
			return &result.Error{Code: "name-in-use", Message: fmt.Sprintf("the name %q belongs to the sandbox %s, which is alive", name, other),
				Hint: "choose another one, or end that sandbox first"}
		}
		if err := names.unlink(name); err != nil {
			return err
		}
	}
	if err != nil {
		return names.fail("symlink", name, err)
	}
	return nil
}

// release frees the name if it still is id's. The caller is the living id, from
// whom nobody takes it, or alone.
func (d *Dir) release(name, id string) error {
	if name == "" {
		return nil
	}
	names, err := d.names()
	if err == nil {
		defer names.close()
		var other string
		if other, err = owner(names, name); err == nil && other == id {
			err = names.unlink(name)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil // there is no such name
	}
	return err
}
