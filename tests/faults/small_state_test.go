package faults

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// small is a mount namespace, in which sbxrun runs, where the state directory is a small tmpfs.
type small struct {
	e     *env
	state string // the directory, seen from outside
}

// mounted makes the state directory a tmpfs with these options.
func (e *env) mounted(options string) *small {
	e.t.Helper()
	hold, enter := []string{"unshare", "--mount"}, []string{"nsenter", "--mount"}
	if !harness.Root() { // the namespace's capabilities end with nsenter's exec
		hold = append(hold, "--user", "--map-current-user", "--keep-caps")
		enter = append(enter, "--user", "--preserve-credentials")
	}
	c, err := e.command(harness.Options{}, append(hold, "sh", "-c", `mount -t tmpfs -o "$0" tmpfs "$1" && echo mounted && exec sleep infinity`, "nosuid,nodev,"+options, e.state)...)
	check.Must(e.t, err)
	e.t.Cleanup(func() {
		c.Signal(unix.SIGKILL)
		e.wait(c)
	})
	harness.Until(e.t, bound, "the mount", func() bool { return c.Over() || c.Output() != "" })
	check.Require(e.t, !c.Over(), "no small file system: %s", c.ErrorOutput())
	e.wrap = append(enter, "--target", fmt.Sprint(c.PID), "sh", "-c", `cd "$0" && exec "$@"`, e.out)
	return &small{e, filepath.Join(fmt.Sprintf("/proc/%d/root", c.PID), e.state)}
}

// fill leaves that many free pages of 4 KiB.
func (m *small) fill(free int) {
	m.e.t.Helper()
	f, err := os.OpenFile(m.state+"/filler", os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	check.Must(m.e.t, err)
	size := int64(0)
	for page := make([]byte, 4096); err == nil; {
		var n int
		n, err = f.Write(page)
		size += int64(n)
	}
	check.Must(m.e.t, f.Truncate(max(0, size-int64(free)*4096)))
	check.Must(m.e.t, f.Close())
}

func (m *small) empty() {
	m.e.t.Helper()
	check.Must(m.e.t, os.Remove(m.state+"/filler"))
}

// listing returns the entries of the state directory, without those that are always there.
func (m *small) listing() (names []string) {
	m.e.t.Helper()
	for _, entry := range harness.ReadDir(m.e.t, m.state) {
		switch entry.Name() {
		case "lock", "names", "filler":
		default:
			names = append(names, entry.Name())
		}
	}
	return names
}
