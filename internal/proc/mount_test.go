package proc

import (
	"errors"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestCheckMount(t *testing.T) {
	check.OK(t, CheckMount(), "here")
	missing := &fs.PathError{Op: "readlink", Path: "/proc/self", Err: unix.ENOENT}
	for _, c := range []struct {
		name, number string
		self         int
		err          error
		want         string
	}{
		{name: "own", number: "4711", self: 4711},
		{name: "outer", number: "4711", self: 1, want: "/proc shows another PID namespace: sbxrun is process 1, and 4711 there"},
		{name: "prefix", number: "47", self: 4, want: "/proc shows another PID namespace: sbxrun is process 4, and 47 there"},
		{name: "none", err: missing, want: "/proc is not mounted, or shows a PID namespace that sbxrun is not in"},
		{name: "not a link", err: unix.EINVAL, want: "/proc cannot be read: invalid argument"},
	} {
		err := checkMount(c.number, c.self, c.err)
		got := ""
		if err != nil {
			got = err.Error()
		}
		check.That(t, got == c.want && (c.err == nil || errors.Is(err, c.err)), "%s: %q, want %q", c.name, got, c.want)
		m := (*MountError)(nil)
		check.That(t, err == nil || errors.As(err, &m) && m.Remedy != "", "%s: no remedy", c.name)
	}
}
