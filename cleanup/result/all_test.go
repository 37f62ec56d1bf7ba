package result

import (
	"errors"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAll(t *testing.T) {
	if err := All(); err != nil {
		t.Errorf("of nothing: %v", err)
	}
	if err := All(nil, nil); err != nil {
		t.Errorf("of nil: %v", err)
	}
	one := &fs.PathError{Op: "remove", Path: "x", Err: unix.EBUSY}
	if err := All(nil, one, nil); err != error(one) {
		t.Errorf("of one: %#v", err)
	}
	two := All(one, All(nil, unix.ENOSPC, unix.EIO))
	if got, want := two.Error(), "remove x: device or resource busy; no space left on device; input/output error"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for _, is := range []error{unix.EBUSY, unix.ENOSPC, unix.EIO} {
		if !errors.Is(two, is) {
			t.Errorf("%v is lost", is)
		}
	}
	ours := All(unix.EIO, &Error{Code: "limit", Message: "no limit", Hint: "do it", ExitCode: 7, Err: unix.EROFS}, unix.EBUSY)
	if e, ok := errors.AsType[*Error](ours); !ok || e.Code != "limit" || e.Hint != "do it" || e.ExitCode != 7 || e.Message != "input/output error; no limit; device or resource busy" {
		t.Errorf("%#v", ours)
	}
	for _, is := range []error{unix.EIO, unix.EROFS, unix.EBUSY} {
		if !errors.Is(ours, is) {
			t.Errorf("%v is lost", is)
		}
	}
}
