// Package blobs is a content store: files by the hash of what they hold, for each tenant
// apart, for a time and within a quota. A tenant cannot tell what another one has stored.
package blobs

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Store is a directory of files. What is in it is found again by the next server.
type Store struct {
	dir   string
	ttl   time.Duration
	total int64 // of all tenants

	mu   sync.Mutex
	used map[string]int64 // by tenant, files that are being written included
	sum  int64
}

// Prefix begins ids, and names the hash.
const Prefix = "sha256:"

// perFile is what a file counts for beside what it holds: a block of the disk, and an
// inode. A quota of bytes alone would let files of one byte use all of both.
const perFile = 4096

// partial is the beginning of the names of files that are being written.
const partial = ".part-"

// Open opens the store in a directory, and makes it if need be. total bounds what all tenants
// have together.
func Open(dir string, ttl time.Duration, total int64) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s := &Store{dir: dir, ttl: ttl, total: total, used: map[string]int64{}}
	err := s.walk(func(name string, st fs.FileInfo) {
		// What a server that was killed has left half-written is nobody's.
		if !strings.HasPrefix(filepath.Base(name), partial) || os.Remove(name) != nil {
			s.count(name, perFile+st.Size())
		}
	})
	if err != nil {
		return nil, err
	}
	return s, s.Expire(time.Now())
}

// count adds to what a file's tenant has.
func (s *Store) count(name string, n int64) {
	s.used[filepath.Base(filepath.Dir(name))] += n
	s.sum += n
}

// walk calls each with the files of all tenants.
func (s *Store) walk(each func(name string, st fs.FileInfo)) error {
	return filepath.WalkDir(s.dir, func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went meanwhile
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if st, err := d.Info(); err == nil {
			each(name, st)
		}
		return nil
	})
}

// Expire removes what was not asked for since the time to live. It does not count anew: what is
// being written meanwhile is counted before it is there. Others use the store while it looks.
func (s *Store) Expire(now time.Time) error {
	return s.walk(func(name string, st fs.FileInfo) {
		if !strings.HasPrefix(filepath.Base(name), partial) && s.old(st, now) {
			s.expire(name, now)
		}
	})
}

func (s *Store) old(st fs.FileInfo, now time.Time) bool { return now.Sub(st.ModTime()) > s.ttl }

// expire removes one file, unless it was stored anew or asked for meanwhile.
func (s *Store) expire(name string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st, err := os.Lstat(name); err == nil && s.old(st, now) && os.Remove(name) == nil {
		s.count(name, -perFile-st.Size())
	}
}

// Put stores what r has, at most max bytes, for a tenant who may have so many bytes in all,
// and returns its id and size.
func (s *Store) Put(tenant string, r io.Reader, max, quota int64) (id string, size int64, err error) {
	full := &result.Error{Code: "quota-disk", Message: "the content store has no room for it", Hint: "files go when they were not asked for within the store's time to live"}
	dir := filepath.Join(s.dir, tenant)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", 0, err
	}
	f, err := os.CreateTemp(dir, partial)
	if err != nil {
		return "", 0, err
	}
	var reserved int64
	kept := false
	defer func() {
		f.Close()
		if !kept {
			_ = os.Remove(f.Name()) // what stays the next server removes
			s.reserve(tenant, -reserved, 0)
		}
	}()
	if !s.reserve(tenant, perFile, quota) {
		return "", 0, full
	}
	reserved = perFile
	hash := sha256.New()
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if size += int64(n); size > max {
				return "", 0, &result.Error{Code: "too-large", Message: fmt.Sprintf("the file is larger than %d bytes", max)}
			}
			if !s.reserve(tenant, int64(n), quota) {
				return "", 0, full
			}
			reserved += int64(n)
			hash.Write(buf[:n])
			if _, err := f.Write(buf[:n]); err != nil {
				return "", 0, fmt.Errorf("store the file: %w", err)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return "", 0, err
		}
	}
	if err := f.Sync(); err != nil { // or a crash could leave another content under the name
		return "", 0, fmt.Errorf("store the file: %w", err)
	}
	name := hex.EncodeToString(hash.Sum(nil))
	at := filepath.Join(dir, name)
	// One at a time: the same content may be stored twice at once, and is counted once.
	s.mu.Lock()
	defer s.mu.Unlock()
	if st, err := os.Stat(at); err == nil {
		s.count(at, -perFile-st.Size())
	}
	if err := os.Rename(f.Name(), at); err != nil {
		return "", 0, err
	}
	kept = true
	return Prefix + name, size, nil
}

// reserve counts bytes, unless that were more than may be.
func (s *Store) reserve(tenant string, n, quota int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > 0 && (s.used[tenant]+n > quota || s.sum+n > s.total) {
		return false
	}
	s.used[tenant] += n
	s.sum += n
	return true
}

// Used is how many bytes each tenant has.
func (s *Store) Used() map[string]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.used)
}

// Get opens a file of a tenant, and with that begins its time to live anew. The caller closes
// it.
func (s *Store) Get(tenant, id string) (*os.File, int64, error) {
	none := noSuchFile(id)
	at, ok := s.path(tenant, id)
	if !ok {
		return nil, 0, none
	}
	f, err := os.Open(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, none
	}
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	now := time.Now()
	_ = os.Chtimes(at, now, now) // at worst it goes earlier
	return f, st.Size(), nil
}

func noSuchFile(id string) error {
	return &result.Error{Code: "no-such-file", Message: fmt.Sprintf("the content store has no %.80q", id), Hint: "store it with POST /v1/files; files expire when they have not been used for a while"}
}

// path returns the path of a file, and whether the ID is valid.
func (s *Store) path(tenant, id string) (string, bool) {
	name, ok := strings.CutPrefix(id, Prefix)
	b, err := hex.DecodeString(name)
	return filepath.Join(s.dir, tenant, name), ok && err == nil && len(b) == sha256.Size && name == strings.ToLower(name)
}

// File describes a stored file.
type File struct {
	ID   string
	Size int64
	Used time.Time // when it was stored or last read
}

// List returns a tenant's files, least recently used first.
func (s *Store) List(tenant string) ([]File, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, tenant))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var files []File
	for _, e := range entries {
		id := Prefix + e.Name()
		if _, ok := s.path(tenant, id); !ok {
			continue // being written
		}
		if st, err := e.Info(); err == nil { // it may have expired
			files = append(files, File{id, st.Size(), st.ModTime()})
		}
	}
	slices.SortFunc(files, func(a, b File) int { return cmp.Or(a.Used.Compare(b.Used), strings.Compare(a.ID, b.ID)) })
	return files, nil
}

// TTL returns how long unused files are kept.
func (s *Store) TTL() time.Duration { return s.ttl }

// Remove removes a tenant's file.
func (s *Store) Remove(tenant, id string) error {
	at, ok := s.path(tenant, id)
	if !ok {
		return noSuchFile(id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return noSuchFile(id)
	}
	if err == nil {
		err = os.Remove(at)
	}
	if err == nil {
		s.count(at, -perFile-st.Size())
	}
	return err
}
