package layers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Pack writes the tar of an upper layer, whose directory is upper. The caller keeps and closes
// upper. Pack returns the cause of ctx when that is done.
func Pack(ctx context.Context, upper *os.File, to io.Writer, most Count) (c Count, err error) {
	a := tree.NewLayer(until{ctx, to}, most.Bytes)
	defer func() { c.Bytes, c.Entries = a.Bytes(), a.Entries }()
	// The same bounds as for unpacking.
	walk := tree.Walk{Entries: most.Entries, Text: maxText, Depth: maxDepth - 1, Path: maxName - unix.NAME_MAX - 1 - len(tree.Whiteout), Files: true}
	root := proc.Descriptor(upper)
	if tree.Opaque(root) {
		if err := a.Opaque(""); err != nil {
			return c, err
		}
	}
	for e, err := range walk.Below(ctx, root, "") {
		if err == nil {
			err = packEntry(a, e, &c.LeftOut)
		}
		if err != nil {
			return c, err
		}
		if a.Entries > most.Entries {
			return c, tree.TooLarge("the snapshot would exceed %d entries", most.Entries)
		}
	}
	return c, a.Close()
}

// until writes until its context is done.
type until struct {
	ctx context.Context
	to  io.Writer
}

func (u until) Write(b []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.to.Write(b)
}

func packEntry(a *tree.Archive, e *tree.Entry, leftOut *int) error {
	switch {
	case e.Err == tree.ErrDeep:
		return tree.TooLarge("directories are nested too deeply, at %.80q", e.Path)
	case e.Err != nil:
		return unreadable(e.Path, e.Err)
	case e.Deletes():
		return a.Deleted(e.Path)
	}
	switch tree.Type(&e.Stat) {
	case unix.S_IFREG:
		return a.File(e.Path, e.FD, &e.Stat)
	case unix.S_IFLNK:
		return a.Link(e.Path, e.Target, &e.Stat)
	case unix.S_IFDIR:
		err := a.Dir(e.Path, &e.Stat)
		if err == nil && tree.Opaque(e.FD) {
			err = a.Opaque(e.Path)
		}
		return err
	}
	*leftOut++
	return nil
}

// unreadable returns an error for a file that cannot be packed.
func unreadable(name string, err error) error {
	e := &result.Error{Code: "failed", Message: fmt.Sprintf("cannot read %.200q in the upper layer: %v", name, err), Err: err}
	if errors.Is(err, unix.EACCES) {
		e.Hint = "make it readable for its owner in the sandbox: chmod u+r"
	}
	return e
}
