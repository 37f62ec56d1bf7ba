package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// small runs a shell script in a mount namespace of its own, where dir, $disk, is a file system in
// memory of so many bytes. The script calls sbxrun by that name, and ends what it starts; $top is
// the test's own directory, on the disk that everybody uses.
func (e *estate) small(bytes int, dir, script string) said {
	e.t.Helper()
	words := []string{"bwrap", "--dev-bind", "/", "/", "--size", fmt.Sprint(bytes), "--tmpfs", dir}
	if os.Getuid() == 0 {
		words = append(words, "--cap-add", "ALL") // as root has outside
	}
	c, err := e.command(func(c *exec.Cmd) {
		c.Env = append(c.Env, "disk="+dir, "top="+e.top, "PATH="+filepath.Dir(harness.Binary(e.t))+":"+harness.Path)
	}, append(words, "sh", "-ec", script)...)
	harness.Must(e.t, err)
	return e.wait(c)
}
