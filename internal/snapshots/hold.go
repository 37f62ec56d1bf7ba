package snapshots

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Hold holds the layers of a snapshot, by hash, unpacked for a user. If necessary, it runs sbxrund to
// unpack them.
func (s *Store) Hold(ctx context.Context, m *Manifest, uid, gid uint32) (map[string]*Unpacked, error) {
	there := map[string]bool{} // unpacked before
	for i := range 3 {         // cleanup may remove one before it is held
		held, err := s.holdAll(m, uid, gid)
		if err == nil && i > 0 {
			for hash, u := range held {
				if !there[hash] {
					u.made = s.path
				}
			}
		}
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return held, err
		}
		if i == 0 {
			for _, l := range m.Layers() {
				if u, err := s.Unpacked(Key(l, uid, gid)); err == nil {
					there[l.SHA256] = true
					u.Close()
				}
			}
		}
		if err := s.unpack(ctx, m, uid, gid); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("the unpacked layers of snapshot " + m.Title() + " keep being removed")
}

func (s *Store) holdAll(m *Manifest, uid, gid uint32) (_ map[string]*Unpacked, err error) {
	held := map[string]*Unpacked{}
	defer func() {
		if err != nil {
			for _, u := range held {
				u.Close()
			}
		}
	}()
	for _, l := range m.Layers() {
		u, err := s.Unpacked(Key(l, uid, gid))
		if err != nil {
			return nil, err
		}
		u.key = Key(l, uid, gid)
		held[l.SHA256] = u
	}
	return held, nil
}

// unpack runs sbxrund to unpack a snapshot.
func (s *Store) unpack(ctx context.Context, m *Manifest, uid, gid uint32) error {
	server, err := safeopen.Sibling()
	if err != nil {
		return err
	}
	args := []string{UnpackWord, m.ID}
	if os.Geteuid() == 0 {
		args = append(args, strconv.Itoa(int(uid)), strconv.Itoa(int(gid)))
	}
	c := exec.CommandContext(ctx, server, args...)
	c.Env = append(os.Environ(), "SBXRUN_DATA_DIR="+filepath.Dir(s.path)) // see Dir
	var said bytes.Buffer
	c.Stderr = &said
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C reaches it only through ctx
	err = c.Run()
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		text := cmp.Or(strings.TrimPrefix(strings.TrimSpace(said.String()), "sbxrun: error: "), err.Error())
		return &result.Error{Code: "snapshot", Message: "cannot unpack snapshot " + m.Title() + ": " + text, Err: err}
	}
	if err != nil {
		return safeopen.SiblingError(server, err)
	}
	return nil
}
