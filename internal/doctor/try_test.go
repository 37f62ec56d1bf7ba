package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A command works in a sandbox if the sandbox shows it and it succeeds.
func TestTry(t *testing.T) {
	dir := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(dir, "hidden"), []byte("#!/bin/sh\n"), 0o755))
	caller := room.ThisCaller()
	caller.Path += ":" + dir
	for _, tt := range []struct {
		command []string
		err     string // part of it; "" for none
	}{
		{[]string{"python3", "--version"}, ""},
		{[]string{"sh", "-c", "exit 3"}, `"sh" exited with code 3 in the sandbox`},
		{[]string{"hidden"}, "which is not visible in the sandbox"},
		{[]string{"no-such-command"}, "not found in the sandbox's PATH"},
	} {
		err := Try(t.Context(), caller, room.Policy{Command: tt.command, Cwd: room.CwdNone})
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%q: got %v, want %q", tt.command, err, tt.err)
		}
	}
}
