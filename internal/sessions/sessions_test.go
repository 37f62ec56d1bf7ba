package sessions

import (
	"fmt"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The cause of a session's end is remembered regardless of other tenants' sessions. Of a tenant's own, the
// oldest are forgotten.
func TestRemembered(t *testing.T) {
	st := NewStore(nil, nil)
	st.remember(&Session{ID: "one", Tenant: "a", cause: result.IdleTimeout})
	for i := range maxEnded + 1 {
		st.remember(&Session{ID: fmt.Sprint(i), Tenant: "b", cause: result.Killed})
	}
	for _, want := range []struct {
		tenant, id string
		code       api.Code
	}{{"a", "one", api.Ended}, {"b", "0", api.NoSuchSession}, {"b", "1", api.Ended}, {"b", fmt.Sprint(maxEnded), api.Ended}, {"a", "1", api.NoSuchSession}} {
		_, err := st.Get(want.tenant, want.id)
		check.That(t, api.AsError(err).Failure.Code == want.code, "%s of %s: %v", want.id, want.tenant, err)
	}
	check.That(t, len(st.over) == maxEnded+1, "%d are remembered", len(st.over))
}

// A session that is found idle cannot be used any more, so it does not end while a request uses it.
func TestIdleEndsUse(t *testing.T) {
	s := &Session{ID: "x", Idle: time.Minute, last: time.Now()}
	s.free.L = &s.mu
	_, release, err := s.Use()
	left := s.left(time.Now().Add(time.Hour))
	check.That(t, left == time.Minute && err == nil, "in use: %v, %v", left, err)
	release()
	check.Equal(t, s.left(time.Now().Add(time.Hour)), 0, "idle")
	_, _, err = s.Use()
	check.That(t, err != nil && api.AsError(err).Failure.Code == api.Ended, "%v", err)
}
