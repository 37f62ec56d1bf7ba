package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// sbxrun does not execute an sbxrund that more users can change than sbxrun itself.
func TestServerProgramOfOthers(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	marker := filepath.Join(harness.SharedDir(t), "executed")
	server := filepath.Join(dir, "sbxrund")
	harness.Must(t, os.WriteFile(server, []byte("#!/bin/sh\n: >"+marker+"\n"), 0o755))
	o := harness.Options{Bare: true, Dir: "/usr", Wrap: []string{"sh", "-c", `cp "$1" "$0/sbxrun"; chmod 755 "$0/sbxrun"; shift; exec "$0/sbxrun" "$@"`, dir}}
	try := func(what string, refused bool) {
		t.Helper()
		for _, args := range [][]string{{"serve"}, {"mcp"}, {"--net", "allow=example.org", "true"}} {
			_ = os.Remove(marker)
			r := harness.Start(t, o, args...).Wait()
			_, err := os.Stat(marker)
			if executed := err == nil; executed == refused || refused && (r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "cannot be trusted")) {
				t.Errorf("%s, %q: exit code %d, executed %v, stderr %s", what, args, r.ExitCode, executed, r.Stderr)
			}
		}
	}
	try("as installed", false)
	harness.Must(t, os.Chmod(server, 0o775))
	try("writable for a group", true)
	harness.Must(t, os.Chmod(server, 0o755))
	if harness.Root() {
		harness.Must(t, os.Chown(server, 12345, 12345))
		try("another user's", true)
	}
}
