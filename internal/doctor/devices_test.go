package doctor

import (
	"os"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The devices are checked only if there are specifications, and one that cannot be used is a warning.
func TestDevices(t *testing.T) {
	dir := harness.Dir(t)
	t.Setenv(devices.Variable, dir)
	examine := func() []Finding {
		e := newExam(t.Context(), caller())
		e.devices()
		return e.Checks
	}
	got := examine()
	check.That(t, len(got) == 0, "without specifications: %v", got)
	spec := `{"cdiVersion": "1.0.0", "kind": "v.com/c", "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/PATH"}]}}]}`
	for device, want := range map[string]Finding{
		"zero": {Name: "devices", Verdict: OK, Detail: "v.com/c=0"},
		"none": {Name: "devices", Verdict: Warning, Cause: "no such file"},
	} {
		check.Must(t, os.WriteFile(dir+"/a.json", []byte(strings.Replace(spec, "PATH", device, 1)), 0o644))
		got := examine()
		check.That(t, len(got) == 1 && got[0].Name == want.Name && got[0].Verdict == want.Verdict && got[0].Detail == want.Detail && strings.Contains(got[0].Cause, want.Cause),
			"%s: %+v, want %+v", device, got, want)
	}
}
