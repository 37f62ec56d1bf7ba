package check

import (
	"errors"
	"fmt"
	"testing"
)

// recorder records what an assertion reports.
type recorder struct{ got string }

func (r *recorder) Helper()                           {}
func (r *recorder) Errorf(format string, args ...any) { r.got = "E " + fmt.Sprintf(format, args...) }
func (r *recorder) Fatalf(format string, args ...any) { r.got = "F " + fmt.Sprintf(format, args...) }

func TestAssertions(t *testing.T) {
	for _, tt := range []struct {
		check func(T)
		want  string
	}{
		{func(t T) { That(t, true, "no") }, ""},
		{func(t T) { That(t, false, "%d", 1) }, "E 1"},
		{func(t T) { Require(t, true, "no") }, ""},
		{func(t T) { Require(t, false, "%d", 1) }, "F 1"},
		{func(t T) { Equal(t, 1, 1, "no") }, ""},
		{func(t T) { Equal(t, 1, 2, "try %d", 3) }, "E try 3: got 1, want 2"},
		{func(t T) { Equal(t, "a", "") }, `E got "a", want ""`},
		{func(t T) { OK(t, nil, "no") }, ""},
		{func(t T) { OK(t, errors.New("bad"), "try") }, "E try: bad"},
	} {
		var r recorder
		if tt.check(&r); r.got != tt.want {
			t.Errorf("got %q, want %q", r.got, tt.want)
		}
	}
}
