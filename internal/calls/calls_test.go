package calls

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/tests/check"
)

func code(err error) api.Code {
	var e *api.Error
	if !errors.As(err, &e) {
		return ""
	}
	return e.Failure.Code
}

// Readers at any offset get the data as it is written. Data beyond the limit is counted only.
func TestSpool(t *testing.T) {
	s, err := NewSpool(t.TempDir(), 6)
	check.Must(t, err)
	defer s.Close()
	var all sync.WaitGroup
	for from, want := range map[int64]string{0: "abcdef", 4: "ef", 9: ""} {
		all.Go(func() {
			var got []byte
			for at, ended := from, false; !ended; {
				var kept int64
				kept, ended = s.Wait(t.Context(), at)
				b, err := io.ReadAll(s.Section(at, kept))
				check.OK(t, err)
				got, at = append(got, b...), at+int64(len(b))
			}
			check.That(t, string(got) == want, "from %d: %q, want %q", from, got, want)
		})
	}
	for _, piece := range []string{"ab", "cde", "fgh", "i"} {
		n, err := s.Write([]byte(piece))
		check.That(t, n == len(piece) && err == nil, "%d %v", n, err)
	}
	s.End()
	all.Wait()
	kept, total, ended := s.Size()
	check.That(t, kept == 6 && total == 9 && ended, "%d %d %v", kept, total, ended)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	other, err := NewSpool(t.TempDir(), 6)
	check.Must(t, err)
	defer other.Close()
	kept, ended = other.Wait(ctx, 0)
	check.That(t, kept == 0 && !ended, "%d %v", kept, ended)
}

func TestBook(t *testing.T) {
	shelf := &Quota{tenants.NewBudget("calls", 0), tenants.NewBudget("bytes", 60)}
	share := Limits{Calls: 2, Output: 50}
	b := NewStore(t.TempDir(), time.Minute, shelf)
	memory, err := tenants.NewBudget("bytes", 0).Take("a", 5, 0)
	check.Must(t, err)
	ctx, c, err := b.Add(t.Context(), "1", "a", nil, 10, share, memory)
	check.Must(t, err)
	// The stores of sessions share the quota.
	other := NewStore(t.TempDir(), time.Minute, shelf)
	_, _, err = other.Add(t.Context(), "2", "a", nil, 20, share, nil)
	check.That(t, code(err) == api.Quota, "more output than a tenant may have: %v", err)
	_, _, err = other.Add(t.Context(), "2", "b", nil, 25, share, nil)
	check.That(t, code(err) == api.Busy, "more output than there may be: %v", err)
	_, _, err = other.Add(t.Context(), "2", "a", nil, 10, share, nil)
	check.Must(t, err)
	_, _, err = b.Add(t.Context(), "3", "a", nil, 1, share, nil)
	check.That(t, code(err) == api.Quota, "more calls than a tenant may have: %v", err)
	_, unbegun, err := b.Add(t.Context(), "4", "b", nil, 10, share, nil)
	check.Require(t, err == nil && b.Get("a", "4") == nil && b.Get("b", "4") == unbegun, "%v", err)
	b.Drop(unbegun)
	<-unbegun.Ended() // as seen by a waiting client
	c.Cancel()
	<-ctx.Done()
	_, err = c.out.Write([]byte("abc"))
	check.OK(t, err)
	c.End(nil, 0, api.NewError(api.Setup, "x", ""))
	check.Equal(t, shelf.Output.Used("a"), 3+20)
	s := c.Status()
	check.That(t, s.State == api.Over && s.Failure != nil, "%+v", s)
	b.Expire(time.Now().Add(time.Second))
	check.That(t, b.Get("a", "1") == c, "it went too early")
	b.Expire(time.Now().Add(2 * time.Minute))
	check.That(t, b.Get("a", "1") == nil && shelf.Calls.Used("a") == 1 && shelf.Output.Used("a") == 20, "it stays")
}

// A repeated request with a key does not run again, and tenants have separate limits.
func TestKeys(t *testing.T) {
	k := NewKeys(time.Minute, 2)
	memory := tenants.NewBudget("bytes", 0)
	lease, err := memory.Take("t", 10, 0)
	check.Must(t, err)
	key, first, err := k.Begin("t", "a", []byte("1"))
	check.Require(t, first && err == nil, "%v %v", first, err)
	again, first, err := k.Begin("t", "a", []byte("1"))
	check.That(t, again == key && !first && err == nil, "%v %v", first, err)
	_, _, err = k.Begin("t", "a", []byte("2"))
	check.That(t, code(err) == api.Idempotency, "%v", err)
	key.since = key.since.Add(-time.Hour) // as if it had taken an hour
	k.Settle("t", "a", key, "answer", true, lease.Free)
	<-key.Done()
	again, first, _ = k.Begin("t", "a", []byte("1"))
	check.That(t, !first && again.Value == "answer", "%v %v", first, again)
	// A dropped answer allows a retry.
	b, _, _ := k.Begin("t", "b", nil)
	k.Settle("t", "b", b, nil, false, nil)
	_, first, err = k.Begin("t", "b", nil)
	check.That(t, first && err == nil, "%v %v", first, err)
	_, _, err = k.Begin("t", "c", nil)
	check.That(t, code(err) == api.QuotaKept, "a third one: %v", err)
	_, first, err = k.Begin("other", "a", []byte("2"))
	check.That(t, first && err == nil, "another tenant: %v %v", first, err)
	// Expired answers make room; pending ones stay.
	check.Equal(t, memory.Used("t"), 10)
	k.Expire(time.Now().Add(2 * time.Minute))
	check.Equal(t, memory.Used("t"), 0)
	_, first, err = k.Begin("t", "c", nil)
	check.That(t, first && err == nil, "%v %v", first, err)
	_, first, err = k.Begin("t", "b", nil)
	check.That(t, !first && err == nil, "%v %v", first, err)
}
