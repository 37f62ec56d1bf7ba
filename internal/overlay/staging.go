package overlay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Staging is a directory for temporary files in an original. Its name is random. Its identity
// ([tree.Identity]) is recorded as well, because other users may rename directories in the original.
type Staging struct {
	Source   []byte `json:"source"` // path of the original
	Name     string `json:"name"`
	Identity string `json:"identity,omitempty"` // "" before it is created
}

// stage creates a staging directory. It calls note, unless that is nil, before and after.
func stage(source int, name string, note func(Staging) error) (dir int, s Staging, err error) {
	s.Source, s.Name = []byte(name), tree.Hidden()
	if note != nil {
		if err := note(s); err != nil {
			return -1, s, err
		}
	}
	if err := unix.Mkdirat(source, s.Name, 0o700); err != nil {
		return -1, s, fmt.Errorf("mkdir %s: %w", s.Name, err)
	}
	dir, err = tree.Open(source, s.Name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return -1, s, err
	}
	if err = own(dir); err == nil {
		s.Identity, err = tree.Identity(dir)
	}
	if err == nil && note != nil {
		err = note(s)
	}
	if err != nil {
		unix.Close(dir)
		_ = unix.Unlinkat(source, s.Name, unix.AT_REMOVEDIR) // the first error is returned
		return -1, s, err
	}
	return dir, s, nil
}

// own returns an error unless a directory is private and empty, as this process created it: another
// process may have replaced it.
func own(dir int) error {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return err
	}
	walk := tree.Walk{Entries: 1, Text: unix.PathMax}
	names, err := walk.Names(dir, ".")
	if err != nil || len(names) > 0 || int(st.Uid) != unix.Geteuid() || st.Mode&0o077 != 0 {
		return errors.New("another process has replaced its temporary directory")
	}
	return nil
}

// unstage empties the directory and removes it if it still has its name.
func unstage(source, dir int, s Staging) error {
	defer unix.Close(dir)
	if err := tree.Empty(dir); err != nil {
		return err
	}
	at, err := tree.Open(source, s.Name, unix.O_PATH|unix.O_DIRECTORY)
	if tree.Gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if is, err := tree.Identity(at); err != nil || is != s.Identity {
		return err
	}
	if err := unix.Unlinkat(source, s.Name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return fmt.Errorf("rmdir %s: %w", s.Name, err)
	}
	return nil
}

// ReadStaging reads a note and returns its last complete Staging.
func ReadStaging(note []byte) (s Staging, err error) {
	for line := range bytes.Lines(note) {
		if next := (Staging{}); json.Unmarshal(line, &next) == nil {
			s = next
		}
	}
	if s.Name == "" || strings.Contains(s.Name, "/") {
		err = errors.New("invalid temporary directory name")
	}
	return s, err
}

// Sweep removes the directory of a killed apply, and no other directory of that name. Without an
// identity, it removes only an empty directory.
func (s Staging) Sweep() error {
	source, err := openDir(string(s.Source))
	if err != nil {
		return nil // removed, or inaccessible for the caller
	}
	defer source.Close()
	top := proc.Descriptor(source)
	if s.Identity == "" {
		if err := unix.Unlinkat(top, s.Name, unix.AT_REMOVEDIR); !tree.Gone(err) && err != unix.ENOTEMPTY {
			return err
		}
		return nil
	}
	dir, err := tree.Open(top, s.Name, unix.O_RDONLY|unix.O_DIRECTORY)
	if tree.Gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if is, err := tree.Identity(dir); err != nil || is != s.Identity {
		unix.Close(dir)
		return err
	}
	return unstage(top, dir, s)
}
