package serve

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The examples are run as they are, with stubs in the place of vendors' packages.
func TestExamples(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	t.Run("python", func(t *testing.T) {
		stubs, err := filepath.Abs("testdata/stubs")
		if err != nil {
			t.Fatal(err)
		}
		made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python")+":"+clients(t, "examples")+":"+stubs, "SBXRUN_ADDRESS=unix:"+s.socket(), "SBXRUN_BIN="+harness.Binary(t),
			"/usr/bin/python3", "-B", "-W", "error::ResourceWarning", "examples.py")
	})
	t.Run("node", func(t *testing.T) {
		dir := nodeProject(t)
		copied(t, dir, "examples.mjs")
		b, err := os.ReadFile(filepath.Join(clients(t, "examples"), "service.mjs"))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "service.mjs"), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		made(t, dir, "env", "SBXRUN_ADDRESS=unix:"+s.socket(), "node", "examples.mjs")
	})
	s.idle()
}
