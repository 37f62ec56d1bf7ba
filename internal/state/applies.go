package state

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// applyPrefix begins the name of a note about changes being made in a directory of the host;
// the caller chooses the text. The note is locked while its process is alive, so an unlocked
// one shows where a killed process may have left files.
const applyPrefix = "apply-"

// ApplyNote is a note that stays until Remove. If the process dies first, [Dir.Applies] finds it.
type ApplyNote struct {
	dir  *Dir
	file *os.File
}

// NoteApply creates an empty note.
func (d *Dir) NoteApply() (*ApplyNote, error) {
	name := applyPrefix + safeopen.RandomName()
	var file *os.File
	err := d.alone(func() error { // otherwise a sweep could remove it before it is locked
		fd, err := d.root.Lock(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, unix.F_WRLCK, 0)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), name)
		return nil
	})
	if err != nil {
		return nil, failed(err)
	}
	return &ApplyNote{d, file}, nil
}

// Write sets the text, which must not be shorter than the previous one.
func (n *ApplyNote) Write(text []byte) error {
	if _, err := n.file.WriteAt(text, 0); err != nil {
		return failed(n.dir.root.Fail("write", n.file.Name(), err))
	}
	return nil
}

// Remove removes the note.
func (n *ApplyNote) Remove() {
	_ = n.dir.root.Unlink(n.file.Name()) // otherwise the next cleanup removes it
	n.file.Close()
}

// Applies calls each for the notes of killed processes, and removes a note if each returns nil,
// unless keep is set.
func (d *Dir) Applies(keep bool, each func(text []byte) error) error {
	if d.root.FD < 0 {
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
			fd, err = d.root.Lock(name, unix.O_RDWR, unix.F_WRLCK, 0)
			return err
		})
		if err != nil {
			continue // in use, or already removed
		}
		file := os.NewFile(uintptr(fd), name)
		text, err := safeopen.ReadAll(file)
		if err == nil && (len(text) == 0 || each(text) == nil) && !keep {
			err = d.root.Unlink(name)
		}
		file.Close()
		if err != nil {
			return failed(err)
		}
	}
	return nil
}
