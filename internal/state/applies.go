package state

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/random"
)

// applyPrefix begins the name of a note about changes that are being made in a directory of the
// host: its path is the text. The note is locked for as long as somebody is at work there, so
// what is unlocked tells where a killed one may have left something.
const applyPrefix = "apply-"

// NoteApply leaves a note for a directory. remove takes it away; and should the process die
// before, [Dir.Applies] has it.
func (d *Dir) NoteApply(path string) (remove func(), err error) {
	name := applyPrefix + random.Name()
	var file *os.File
	err = d.alone(func() error { // or a sweep could find it before it is locked, and remove it
		fd, err := d.root.lock(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, unix.F_WRLCK, 0)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), name)
		if _, err = file.WriteString(path); err != nil {
			file.Close()
			return d.root.fail("write", name, err)
		}
		return nil
	})
	if err != nil {
		return nil, failed(err)
	}
	return func() {
		_ = d.root.unlink(name) // or the next cleanup does
		file.Close()
	}, nil
}

// Applies calls each with the directories that a killed process was at work in, and removes the
// note where that returns nil, unless all are to be kept.
func (d *Dir) Applies(keep bool, each func(path string) error) error {
	if d.root.fd < 0 {
		return nil
	}
	names, err := d.list()
	if err != nil {
		return failed(err)
	}
	for _, name := range names {
		if id, ok := strings.CutPrefix(name, applyPrefix); !ok || !ValidID(id) {
			continue
		}
		fd := -1
		err := d.alone(func() (err error) {
			fd, err = d.root.lock(name, unix.O_RDWR, unix.F_WRLCK, 0)
			return err
		})
		if err != nil {
			continue // somebody is at work, or it is gone
		}
		file := os.NewFile(uintptr(fd), name)
		path, err := readAll(file)
		if err == nil && (len(path) == 0 || each(string(path)) == nil) && !keep {
			err = d.root.unlink(name)
		}
		file.Close()
		if err != nil {
			return failed(err)
		}
	}
	return nil
}
