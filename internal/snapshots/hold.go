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
	keys := map[string]string{}
	for _, l := range m.Layers() {
		keys[l.SHA256] = Key(l, uid, gid)
	}
	return s.hold("snapshot "+m.Title(), keys, func() error { return s.unpack(ctx, "snapshot "+m.Title(), UnpackWord, m.ID, uid, gid) })
}

// HoldImage is Hold for the tree of an image.
func (s *Store) HoldImage(ctx context.Context, m *Image, uid, gid uint32) (*Unpacked, error) {
	held, err := s.hold("image "+m.Title(), map[string]string{m.Digest: ImageKey(m.Digest, uid, gid)}, func() error {
		return s.unpack(ctx, "image "+m.Title(), UnpackImageWord, m.Digest, uid, gid)
	})
	return held[m.Digest], err
}

func (s *Store) hold(title string, keys map[string]string, unpack func() error) (map[string]*Unpacked, error) {
	there := map[string]bool{} // unpacked before
	for i := range 3 {         // cleanup may remove one before it is held
		held, err := s.holdAll(keys)
		if err == nil && i > 0 {
			for name, u := range held {
				if !there[name] {
					u.made = s.path
				}
			}
		}
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return held, err
		}
		if i == 0 {
			for name, key := range keys {
				if u, err := s.Unpacked(key); err == nil {
					there[name] = true
					u.Close()
				}
			}
		}
		if err := unpack(); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("the unpacked layers of " + title + " keep being removed")
}

func (s *Store) holdAll(keys map[string]string) (_ map[string]*Unpacked, err error) {
	held := map[string]*Unpacked{}
	defer func() {
		if err != nil {
			for _, u := range held {
				u.Close()
			}
		}
	}()
	for name, key := range keys {
		u, err := s.Unpacked(key)
		if err != nil {
			return nil, err
		}
		u.key = key
		held[name] = u
	}
	return held, nil
}

// unpack runs sbxrund to unpack a snapshot or an image.
func (s *Store) unpack(ctx context.Context, title, word, id string, uid, gid uint32) error {
	args := []string{word, id}
	if os.Geteuid() == 0 {
		args = append(args, strconv.Itoa(int(uid)), strconv.Itoa(int(gid)))
	}
	_, err := s.RunSibling(ctx, "unpack "+title, args...)
	return err
}

// RunSibling runs sbxrund on this store and returns its output. what describes the task, for messages.
func (s *Store) RunSibling(ctx context.Context, what string, args ...string) (string, error) {
	server, err := safeopen.Sibling()
	if err != nil {
		return "", err
	}
	c := exec.CommandContext(ctx, server, args...)
	c.Env = append(os.Environ(), "SBXRUN_DATA_DIR="+filepath.Dir(s.path)) // see Dir
	var out, said bytes.Buffer
	c.Stdout, c.Stderr = &out, &said
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C reaches it only through ctx
	err = c.Run()
	if err != nil && ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		text := cmp.Or(strings.TrimPrefix(strings.TrimSpace(said.String()), "sbxrun: error: "), err.Error())
		code := "image"
		if args[0] == UnpackWord {
			code = "snapshot"
		}
		return "", &result.Error{Code: code, Message: "cannot " + what + ": " + text, Err: err}
	}
	if err != nil {
		return "", safeopen.SiblingError(server, err)
	}
	return strings.TrimSpace(out.String()), nil
}
