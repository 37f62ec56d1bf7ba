//go:build check

package helper

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// TestBuilds runs sbxrun in the ways that others build it.
func TestBuilds(t *testing.T) {
	for _, b := range []struct {
		name  string
		cgo   bool
		flags []string
	}{
		{"position-independent", false, []string{"-buildmode=pie"}},
		{"with a C library", true, nil},
		{"position-independent, with a C library", true, []string{"-buildmode=pie"}},
		{"for a debugger", false, []string{"-gcflags=all=-N -l"}},
		{"with the race detector", true, []string{"-race"}},
	} {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			env := "CGO_ENABLED=0"
			if _, err := exec.LookPath("gcc"); b.cgo && err != nil {
				return // no C compiler here
			} else if b.cgo {
				env = "CGO_ENABLED=1"
			}
			name := filepath.Join(t.TempDir(), "sbxrun")
			build := exec.Command("go", append(append([]string{"build", "-buildvcs=false", "-o", name}, b.flags...), "./cmd/sbxrun")...)
			build.Dir, build.Env = "../..", append(os.Environ(), env)
			out, err := build.CombinedOutput()
			check.Require(t, err == nil, "%v: %v\n%s", build.Args, err, out)
			for _, c := range []struct {
				args []string
				code int
			}{
				{[]string{"sh", "-c", "setsid sleep 60 & exit 7"}, 7},
				{[]string{"--timeout", "0.2", "sleep", "60"}, 124},
				{[]string{"--nofile", "16", "sh", "-c", "kill -9 $$"}, 137},
			} {
				cmd := exec.Command(name, append([]string{"--workdir", "/tmp", "--proof-timeout", "1m"}, c.args...)...)
				begin := time.Now()
				out, _ := cmd.CombinedOutput() // the exit code is checked
				code := cmd.ProcessState.ExitCode()
				check.That(t, code == c.code && time.Since(begin) <= 30*time.Second, "%q: exit code %d after %v, want %d: %s", c.args, code, time.Since(begin), c.code, out)
			}
		})
	}
}
