package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// An exec that comes while bubblewrap still builds the sandbox, when its init sees the host's
// files, is refused.
func TestExecWhileStarting(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	host := filepath.Join(harness.Dir(t), "of-the-host")
	harness.Must(t, os.WriteFile(host, nil, 0o644))
	slow := []string{} // many mounts, which take time
	for i := range 200 {
		slow = append(slow, "--ro-bind", fmt.Sprintf("%s:/mnt/%d", filepath.Dir(host), i))
	}
	for i := range 5 {
		name := fmt.Sprintf("box%d", i)
		entered := make(chan *harness.Result)
		go func() {
			var r *harness.Result
			for tries := 0; tries < 500; tries++ {
				if r = s.Run("exec", name, "sh", "-c", `for f in "$@"; do [ ! -e "$f" ] || echo "$f"; done; echo inside`, "sh", host, "/oldroot", "/newroot", "/root"); r.ExitCode != 125 || strings.Contains(string(r.Stderr), "enter") {
					break
				}
			}
			entered <- r
		}()
		b := s.Sandbox(harness.Options{}, append(slow, "--name", name)...)
		if r := <-entered; r.ExitCode != 0 || string(r.Stdout) != "inside\n" {
			t.Errorf("exit code %d: %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		}
		b.Alive()
	}
}
