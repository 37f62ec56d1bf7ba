package result

import (
	"errors"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestAll(t *testing.T) {
	check.OK(t, All(), "of nothing")
	check.OK(t, All(nil, nil), "of nil")
	one := &fs.PathError{Op: "remove", Path: "x", Err: unix.EBUSY}
	check.Equal(t, All(nil, one, nil), error(one), "of one")
	two := All(one, All(nil, unix.ENOSPC, unix.EIO))
	got, want := two.Error(), "remove x: device or resource busy; no space left on device; input/output error"
	check.That(t, got == want, "%q, want %q", got, want)
	for _, is := range []error{unix.EBUSY, unix.ENOSPC, unix.EIO} {
		check.That(t, errors.Is(two, is), "%v is lost", is)
	}
	ours := All(unix.EIO, &Error{Code: "limit", Message: "no limit", Hint: "do it", ExitCode: 7, Err: unix.EROFS}, unix.EBUSY)
	e, ok := errors.AsType[*Error](ours)
	check.That(t, ok && e.Code == "limit" && e.Hint == "do it" && e.ExitCode == 7 && e.Message == "input/output error; no limit; device or resource busy", "%#v", ours)
	for _, is := range []error{unix.EIO, unix.EROFS, unix.EBUSY} {
		check.That(t, errors.Is(ours, is), "%v is lost", is)
	}
}
