package sessions

import (
	"fmt"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
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
		if _, err := st.Get(want.tenant, want.id); api.AsError(err).Failure.Code != want.code {
			t.Errorf("%s of %s: %v", want.id, want.tenant, err)
		}
	}
	if len(st.over) != maxEnded+1 {
		t.Errorf("%d are remembered", len(st.over))
	}
}

// A session that is found idle cannot be used any more, so it does not end while a request uses it.
func TestIdleEndsUse(t *testing.T) {
	s := &Session{ID: "x", Idle: time.Minute, last: time.Now()}
	s.free.L = &s.mu
	_, release, err := s.Use()
	if left := s.left(time.Now().Add(time.Hour)); left != time.Minute || err != nil {
		t.Errorf("in use: %v, %v", left, err)
	}
	release()
	if left := s.left(time.Now().Add(time.Hour)); left != 0 {
		t.Errorf("idle: %v", left)
	}
	if _, _, err := s.Use(); err == nil || api.AsError(err).Failure.Code != api.Ended {
		t.Errorf("%v", err)
	}
}
