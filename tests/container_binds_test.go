package tests

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A container's root, which cannot bind its own directories, learns which one is the cause and what helps.
func TestEngineRootBinds(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // an ordinary user owns what it binds
	}
	dir := harness.Dir(t)
	place := filepath.Join(dir, "place")
	check.Must(t, os.MkdirAll(place, 0o755))
	o := harness.Options{Wrap: harness.EngineRoot(), Dir: dir, Env: []string{"SBXRUN_DATA_DIR=" + dir + "/data"}}
	harness.Run(t, o, "--bind", place, "true").Expect(t, 125, "start-failed").ErrHas(t, "cannot bind \""+place+"\"").ErrHas(t, "chown 65534:65534 "+place)
	check.Must(t, os.Chown(place, 65534, 65534))
	harness.Run(t, o, "--bind", place, "touch", place+"/file").Expect(t, 0, "exited")
	harness.Run(t, o, "--volume", "v:/v", "true").Expect(t, 125, "start-failed").ErrHas(t, "only root can reach it").ErrHas(t, "run sbxrun as an ordinary user")
}
