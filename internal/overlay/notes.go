package overlay

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
)

// notePrefix starts the names of notes in the state directory.
const notePrefix = "apply-"

// Note holds the [Staging] of an apply, in a file of the state directory that is locked while its process is alive.
// If the process dies before Remove, [SweepNotes] finds the note.
type Note struct {
	dir  *state.Dir
	file *os.File
}

// NewNote creates an empty note.
func NewNote(dir *state.Dir) (*Note, error) {
	n := &Note{dir: dir}
	err := n.open(notePrefix+safeopen.RandomName(), unix.O_CREAT|unix.O_EXCL)
	return n, err
}

// open opens and locks a note while no other process can find it unlocked.
func (n *Note) open(name string, flags int) error {
	return n.dir.Alone(func() error {
		fd, err := n.dir.Folder().Lock(name, unix.O_RDWR|flags, unix.F_WRLCK, 0)
		if err == nil {
			n.file = os.NewFile(uintptr(fd), name)
		}
		return err
	})
}

// Write appends s, which replaces earlier content. If Write is killed, the earlier content stays valid.
func (n *Note) Write(s Staging) error {
	text, err := result.JSON(s)
	if err == nil {
		_, err = n.file.Write(text)
	}
	return state.Failed(err)
}

// Remove removes the note. If it cannot, the next cleanup does.
func (n *Note) Remove() { _ = n.remove() }

func (n *Note) remove() error {
	defer n.file.Close()
	return state.Failed(n.dir.Folder().Unlink(n.file.Name()))
}

// SweepNotes calls each for the notes of killed processes, and removes a note if each returns nil, unless keep is
// set. It also removes notes that were not completely written.
func SweepNotes(dir *state.Dir, keep bool, each func(Staging) error) error {
	names, err := dir.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if id, ok := strings.CutPrefix(name, notePrefix); !ok || !state.ValidID(id) {
			continue
		}
		n := &Note{dir: dir}
		if n.open(name, 0) != nil {
			continue // in use, or already removed
		}
		text, err := safeopen.ReadAll(n.file)
		left, damage := ReadStaging(text)
		if err != nil || damage == nil && each(left) != nil || keep {
			n.file.Close()
		} else {
			err = n.remove()
		}
		if err != nil {
			return state.Failed(err)
		}
	}
	return nil
}
