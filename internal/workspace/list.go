package workspace

import (
	"context"
	"fmt"
	"io/fs"
	"iter"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Entry is an entry of a listing.
type Entry struct {
	Path       string    `json:"path" doc:"Path in the workspace; invalid UTF-8 is replaced"`
	PathBase64 []byte    `json:"path_base64,omitempty" doc:"The path, if it is not UTF-8"`
	Type       string    `json:"type" enum:"file,directory,link,other"`
	Size       int64     `json:"size" doc:"In bytes; 0 for other types than files"`
	Mode       string    `json:"mode" doc:"Octal permissions" example:"0644"`
	ModTime    time.Time `json:"mtime"`
}

// List calls each for everything below a directory, parents first and sorted by name. It follows no link. It stops
// at an error and after max entries. If each returns [fs.SkipDir] for a directory, its contents are skipped.
func (d *Dir) List(name string, max int, each func(Entry) error) error {
	for e, err := range d.below(name, tree.Walk{Entries: max}) {
		if err != nil {
			return err
		}
		st := &e.Stat
		listed := Entry{Path: e.Path, Type: "other", Mode: fmt.Sprintf("%04o", st.Mode&0o777), ModTime: tree.ModTime(st)}
		switch tree.Type(st) {
		case unix.S_IFREG:
			listed.Type, listed.Size = "file", st.Size
		case unix.S_IFDIR:
			listed.Type = "directory"
		case unix.S_IFLNK:
			listed.Type = "link"
		}
		if err := each(listed); err == fs.SkipDir {
			e.Skip = true
		} else if err != nil {
			return err
		}
	}
	return nil
}

// Entries returns the number of files and directories on the directory's file system, a separate tmpfs. The kernel
// keeps that count. It includes removed files that are still open and, from Linux 6.6 on, each KiB of extended
// attributes.
func (d *Dir) Entries() (int, error) {
	var on unix.Statfs_t
	if err := unix.Fstatfs(d.fd(), &on); err != nil {
		return 0, explain(".", err)
	}
	if on.Type != unix.TMPFS_MAGIC || on.Files == 0 {
		return 0, &result.Error{Code: "setup", Message: fmt.Sprintf("the workspace %s is not on a tmpfs that counts files", d.Name())}
	}
	return int(on.Files - on.Ffree - 1), nil // the first one is its root
}

// below walks through a directory. Entries that cannot be opened still have their status.
func (d *Dir) below(name string, w tree.Walk) iter.Seq2[*tree.Entry, error] {
	return func(yield func(*tree.Entry, error) bool) {
		name, err := d.clean(name)
		var dir *os.File
		if err == nil {
			dir, err = d.open(name, unix.O_PATH|unix.O_DIRECTORY)
		}
		if err != nil {
			yield(nil, err)
			return
		}
		defer dir.Close()
		w.Text, w.Depth, w.Path, w.As = math.MaxInt, maxDepth, math.MaxInt, d.as
		for e, err := range w.Below(context.Background(), proc.Descriptor(dir), name) {
			if err == nil && e.Stat.Mode == 0 {
				continue
			}
			if !yield(e, about(name, err)) {
				return
			}
		}
	}
}

type Listing struct {
	Files []Entry `json:"files"`
}
