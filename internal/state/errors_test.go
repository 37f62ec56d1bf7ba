package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What cannot be removed is all named, not only the first of it.
func TestRemoveNamesAll(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	e := found(t, d, "web")
	path := filepath.Join(d.Path(), testID(1))
	// Directories are not removed from a sandbox's directory.
	for _, name := range []string{path + "/first", path + "/second"} {
		must(t, os.Mkdir(name, 0o700))
	}
	o.giveUp()
	err := e.Remove()
	wantCode(t, "remove", err, "state")
	for _, want := range []string{"/first: ", "/second: "} {
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("no %q in %v", want, err)
		}
	}
	must(t, os.Remove(path+"/first"))
	must(t, os.Remove(path+"/second"))
	must(t, e.Remove())
}
