// Package blobs is a content store: files by their hash, separate for each tenant, with a time to live and a
// quota. A tenant cannot find out about other tenants' files.
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

// Store is a directory of files. They survive a restart of the server.
type Store struct {
	dir   string
	ttl   time.Duration
	total int64 // maximum for all tenants together

	mu   sync.Mutex
	used map[string]int64 // by tenant, including files being written
	sum  int64
}

// Prefix starts each ID and names the hash.
const Prefix = "sha256:"

// perFile is what each file adds to its size in the quota: a disk block and an inode. Without it, small files
// could use up both.
const perFile = 4096

// partial is the prefix of the names of files being written.
const partial = ".part-"

// Open opens the store in a directory, which it creates if necessary. total is the maximum size for all tenants
// together.
func Open(dir string, ttl time.Duration, total int64) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s := &Store{dir: dir, ttl: ttl, total: total, used: map[string]int64{}}
	err := s.walk(func(name string, st fs.FileInfo) {
		// Remove incomplete files of a killed server.
		if !strings.HasPrefix(filepath.Base(name), partial) || os.Remove(name) != nil {
			s.count(name, perFile+st.Size())
		}
	})
	if err != nil {
		return nil, err
	}
	return s, s.Expire(time.Now())
}

// count adds to the usage of a file's tenant.
func (s *Store) count(name string, n int64) {
	s.used[filepath.Base(filepath.Dir(name))] += n
	s.sum += n
}

// walk calls each for the files of all tenants.
func (s *Store) walk(each func(name string, st fs.FileInfo)) error {
	return filepath.WalkDir(s.dir, func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed since
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

// Expire removes files that were not used within the time to live. It does not recount the usage, which already
// includes files being written. The store stays usable.
func (s *Store) Expire(now time.Time) error {
	return s.walk(func(name string, st fs.FileInfo) {
		if !strings.HasPrefix(filepath.Base(name), partial) && s.old(st, now) {
			s.expire(name, now)
		}
	})
}

func (s *Store) old(st fs.FileInfo, now time.Time) bool { return now.Sub(st.ModTime()) > s.ttl }

// expire removes a file, unless it was stored again or used since.
func (s *Store) expire(name string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st, err := os.Lstat(name); err == nil && s.old(st, now) && os.Remove(name) == nil {
		s.count(name, -perFile-st.Size())
	}
}

// Put stores the content of r, at most max bytes, for a tenant with the given quota, and returns its ID and
// size.
func (s *Store) Put(tenant string, r io.Reader, max, quota int64) (id string, size int64, err error) {
	full := &result.Error{Code: "quota-disk", Message: "the content store is full", Hint: "files that are not used within the store's time to live are removed"}
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
			_ = os.Remove(f.Name()) // otherwise the next server removes it
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
	if err := f.Sync(); err != nil { // otherwise a crash could leave other content under the name
		return "", 0, fmt.Errorf("store the file: %w", err)
	}
	name := hex.EncodeToString(hash.Sum(nil))
	at := filepath.Join(dir, name)
	// Under the lock, so that content stored twice at the same time is counted once.
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

// reserve counts bytes, unless they would exceed a quota.
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

// Used returns the usage of each tenant.
func (s *Store) Used() map[string]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.used)
}

// Get opens a file of a tenant and restarts its time to live. The caller closes the file.
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
	_ = os.Chtimes(at, now, now) // if it fails, the file expires earlier
	return f, st.Size(), nil
}

func noSuchFile(id string) error {
	return &result.Error{Code: "no-such-file", Message: fmt.Sprintf("no file %.80q in the content store", id), Hint: "store it with POST /v1/files; files expire when they have not been used for a while"}
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

// List returns a tenant's files, least recently used first. It calls more with the number of further files before it
// examines them, and returns its error.
func (s *Store) List(tenant string, more func(n int) error) ([]File, error) {
	dir, err := os.Open(filepath.Join(s.dir, tenant))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var files []File
	for {
		const atOnce = 1024
		entries, err := dir.ReadDir(atOnce)
		if err == io.EOF {
			break
		}
		if err == nil {
			err = more(len(entries))
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			id := Prefix + e.Name()
			if _, ok := s.path(tenant, id); !ok {
				continue // being written
			}
			if st, err := e.Info(); err == nil { // it may have expired
				files = append(files, File{id, st.Size(), st.ModTime()})
			}
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
