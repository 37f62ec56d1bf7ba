package barefork

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestLibrary runs the examples of the library as other programs have them: with a C library
// and its threads, position-independent, and with a heap of 1 GB in use. -short is as in [TestBuilds].
func TestLibrary(t *testing.T) {
	compiler := goEnv(t, "CC")
	for _, b := range []struct {
		name, env string
		flags     []string
		cgo       bool
	}{
		{"position-independent", "CGO_ENABLED=0", []string{"-buildmode=pie"}, false},
		{"with a C library", "CGO_ENABLED=1", nil, true},
		{"position-independent, with a C library", "CGO_ENABLED=1", []string{"-buildmode=pie"}, true},
	} {
		if _, err := exec.LookPath(compiler); b.cgo && err != nil || testing.Short() && b.flags != nil {
			continue // nobody here builds with one
		}
		for _, pkg := range []string{"bwrap", "nsenter"} {
			t.Run(pkg+" "+b.name, func(t *testing.T) {
				t.Parallel()
				name := filepath.Join(t.TempDir(), "examples")
				build := exec.Command("go", append(append([]string{"test", "-c", "-o", name}, b.flags...), "./"+pkg)...)
				build.Dir, build.Env = repository(t), append(os.Environ(), b.env)
				if out, err := build.CombinedOutput(); err != nil {
					t.Fatalf("%v: %v\n%s", build.Args, err, out)
				}
				if version, err := exec.Command("go", "version", "-m", name).Output(); err != nil || !strings.Contains(string(version), b.env) {
					t.Fatalf("%s, %v", version, err)
				}
				for _, heap := range []string{"0", "1073741824"} {
					cmd := exec.Command(name, "-test.v", "-test.run", "^Example")
					cmd.Env = append(os.Environ(), "SBXRUN_TEST_HEAP="+heap)
					if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: Example") {
						t.Errorf("with %s bytes of heap: %v\n%s", heap, err, out)
					}
				}
			})
		}
	}
}
