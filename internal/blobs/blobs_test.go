package blobs

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestStore(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir, time.Hour, 2*perFile+100)
	check.Must(t, err)
	id, n, err := s.Put("a", strings.NewReader("hello"), 50, perFile+50)
	check.Require(t, n == 5 && err == nil, "%v %v", n, err)
	again, _, err := s.Put("a", strings.NewReader("hello"), 50, 2*perFile+50)
	check.That(t, again == id && err == nil && s.used["a"] == perFile+5, "%s %v, %d bytes", again, err, s.used["a"])
	_, _, err = s.Get("b", id)
	check.That(t, result.CodeOf(err) == "no-such-file", "another tenant: %v", err)
	for _, wrong := range []string{"", "sha256:", "sha256:../a", id + "0", strings.ToUpper(id), strings.TrimPrefix(id, "sha256:")} {
		_, _, err := s.Get("a", wrong)
		check.That(t, result.CodeOf(err) == "no-such-file", "%q: %v", wrong, err)
	}
	_, _, err = s.Put("a", strings.NewReader(strings.Repeat("x", 46)), 50, 2*perFile+50)
	check.That(t, result.CodeOf(err) == "quota-disk", "above the tenant's quota: %v", err)
	_, _, err = s.Put("b", strings.NewReader(strings.Repeat("x", 96)), 200, perFile+200)
	check.That(t, result.CodeOf(err) == "quota-disk", "above the store's: %v", err)
	_, _, err = s.Put("b", strings.NewReader("12345"), 4, perFile+50)
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	check.That(t, s.sum == perFile+5 && s.used["b"] == 0, "%d bytes, %v", s.sum, s.used)
	_, _, err = s.Put("a", strings.NewReader("1"), 50, perFile+50)
	check.That(t, result.CodeOf(err) == "quota-disk", "a second file, however small: %v", err)
	// A killed server leaves an incomplete file. The next one removes it and keeps the rest.
	part := filepath.Join(dir, "a", partial+"1")
	check.Must(t, os.WriteFile(part, []byte("half"), 0o600))
	s, err = Open(dir, time.Hour, 2*perFile+100)
	check.Require(t, err == nil && s.sum == perFile+5, "%v, %d bytes", err, s.sum)
	_, err = os.Stat(part)
	check.That(t, err != nil, "half a file is left")
	almost := time.Now().Add(-50 * time.Minute)
	check.Must(t, os.Chtimes(filepath.Join(dir, "a", strings.TrimPrefix(id, "sha256:")), almost, almost))
	f, size, err := s.Get("a", id) // restarts its time to live
	check.Require(t, err == nil && size == 5, "%v %v", size, err)
	b, _ := io.ReadAll(f)
	f.Close()
	check.That(t, string(b) == "hello", "%q", b)
	err = s.Expire(time.Now().Add(30 * time.Minute))
	check.That(t, err == nil && s.sum == perFile+5, "too early: %v, %d bytes", err, s.sum)
	err = s.Expire(time.Now().Add(2 * time.Hour))
	check.That(t, err == nil && s.sum == 0, "%v, %d bytes", err, s.sum)
	_, _, err = s.Get("a", id)
	check.That(t, result.CodeOf(err) == "no-such-file", "%v", err)
}

// A file that is written during an expiry is counted once, and not at all if writing fails.
func TestExpireMeanwhile(t *testing.T) {
	s, err := Open(t.TempDir(), time.Hour, 1<<20)
	check.Must(t, err)
	for _, failing := range []bool{true, false} {
		r, w := io.Pipe()
		done := make(chan error)
		go func() {
			_, _, err := s.Put("a", r, 100, 1<<20)
			done <- err
		}()
		_, err := w.Write([]byte("half"))
		check.Must(t, err)
		check.OK(t, s.Expire(time.Now().Add(2*time.Hour)))
		want := int64(0)
		if failing {
			w.CloseWithError(errors.New("the client has disconnected"))
		} else {
			w.Close()
			want = perFile + 4
		}
		err = <-done
		check.That(t, (err != nil) == failing, "%v", err)
		check.That(t, s.Used()["a"] == want && s.sum == want, "%d bytes, want %d", s.Used()["a"], want)
	}
}

// Expire works while the store is used, and keeps files used since.
func TestExpireAside(t *testing.T) {
	s, err := Open(t.TempDir(), time.Hour, 2*perFile+100)
	check.Must(t, err)
	id, _, err := s.Put("a", strings.NewReader("hello"), 50, perFile+50)
	check.Must(t, err)
	s.mu.Lock()
	looked := make(chan error, 1)
	go func() { looked <- s.Expire(time.Now()) }()
	select {
	case err := <-looked:
		check.OK(t, err)
	case <-time.After(10 * time.Second):
		t.Error("it waits for who uses the store")
	}
	s.mu.Unlock()
	s.expire(filepath.Join(s.dir, "a", strings.TrimPrefix(id, Prefix)), time.Now())
	f, _, err := s.Get("a", id)
	check.Require(t, err == nil && s.used["a"] == perFile+5, "%v, %d bytes", err, s.used["a"])
	f.Close()
}

// Files can be listed and removed by their tenant alone. Reading a file makes it the last one used.
func TestListAndRemove(t *testing.T) {
	s, err := Open(t.TempDir(), time.Hour, 1<<20)
	check.Must(t, err)
	var ids []string
	for _, text := range []string{"one", "three"} {
		id, _, err := s.Put("a", strings.NewReader(text), 50, 1<<20)
		check.Must(t, err)
		ids = append(ids, id)
		old := time.Now().Add(-time.Minute)
		check.Must(t, os.Chtimes(filepath.Join(s.dir, "a", strings.TrimPrefix(id, Prefix)), old, old))
	}
	f, _, err := s.Get("a", ids[0])
	check.Must(t, err)
	f.Close()
	none := func(int) error { return nil }
	list, err := s.List("a", none)
	check.That(t, err == nil && len(list) == 2 && list[0].ID == ids[1] && list[0].Size == 5 && list[1].ID == ids[0] && list[1].Used.After(list[0].Used), "%v, %v", list, err)
	list, err = s.List("b", none)
	check.That(t, len(list) == 0 && err == nil, "%v, %v", list, err)
	full := errors.New("no memory")
	list, err = s.List("a", func(n int) error {
		check.Equal(t, n, 2)
		return full
	})
	check.That(t, list == nil && err == full, "%v, %v", list, err)
	err = s.Remove("b", ids[0])
	check.That(t, result.CodeOf(err) == "no-such-file", "another tenant: %v", err)
	for _, id := range ids {
		check.OK(t, s.Remove("a", id))
	}
	err = s.Remove("a", ids[0])
	check.That(t, result.CodeOf(err) == "no-such-file" && s.sum == 0, "%v, %d bytes", err, s.sum)
}
