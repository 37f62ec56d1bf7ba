package setup

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	passes = "=== RUN   TestGood\\n    good.go:1: all is well\\n--- PASS: TestGood (0.00s)\\nPASS\\nok  \\tx/good\\t0.1s\\n"
	fails  = passes + "=== RUN   TestBad\\n    bad.go:1: the reason\\n--- FAIL: TestBad (0.00s)\\nFAIL\\nFAIL\\tx/bad\\t0.1s\\n"
	skips  = passes + "=== RUN   TestShy\\n    shy.go:1: not today\\n--- SKIP: TestShy (0.00s)\\nPASS\\nok  \\tx/shy\\t0.1s\\n"
)

// TestSuite runs test.sh with a go that prints what it is told.
func TestSuite(t *testing.T) {
	for _, tt := range []struct {
		name     string
		uid      string
		output   string // of every go test
		compiler string
		sudo     bool
		strict   bool
		code     int
		want     []string // the last lines
		shown    string   // somewhere before
	}{
		{name: "root", uid: "0", output: passes,
			want: []string{"ok as root: 2 passed, 0 failed, 0 skipped", "ok as uid-61002: 2 passed, 0 failed, 0 skipped"}},
		{name: "root in CI", uid: "0", output: passes, strict: true,
			want: []string{"ok as root: 2 passed, 0 failed, 0 skipped", "ok as uid-61002: 2 passed, 0 failed, 0 skipped"}},
		{name: "failure", uid: "0", output: fails, code: 1, shown: "\n    bad.go:1: the reason\n--- FAIL: TestBad (0.00s)\n",
			want: []string{"FAILED as root: 2 passed, 2 failed, 0 skipped", "FAILED as uid-61002: 2 passed, 2 failed, 0 skipped"}},
		{name: "skip", uid: "0", output: skips, shown: "    shy.go:1: not today\n--- SKIP: TestShy",
			want: []string{"ok as root: 2 passed, 0 failed, 2 skipped", "ok as uid-61002: 2 passed, 0 failed, 2 skipped"}},
		{name: "skip in CI", uid: "0", output: skips, strict: true, code: 1,
			want: []string{"FAILED as root: 2 passed, 0 failed, 2 skipped", "FAILED as uid-61002: 2 passed, 0 failed, 2 skipped"}},
		{name: "user with sudo", uid: "1000", output: passes, sudo: true,
			want: []string{"ok as uid-1000: 2 passed, 0 failed, 0 skipped", "ok as root: 2 passed, 0 failed, 0 skipped"}},
		{name: "user without sudo", uid: "1000", output: passes,
			want: []string{"ok as uid-1000: 2 passed, 0 failed, 0 skipped", "NOT RUN: the half of root: sudo is not here, or asks for a password"}},
		{name: "user without sudo in CI", uid: "1000", output: passes, strict: true, code: 1,
			want: []string{"ok as uid-1000: 2 passed, 0 failed, 0 skipped", "NOT RUN: the half of root: sudo is not here, or asks for a password"}},
		{name: "no compiler", uid: "0", output: passes, compiler: "no-such-compiler",
			want: []string{"NOT RUN: the race detector, there is no C compiler", "ok as root: 2 passed, 0 failed, 0 skipped", "ok as uid-61002: 2 passed, 0 failed, 0 skipped"}},
		{name: "no compiler in CI", uid: "0", output: passes, compiler: "no-such-compiler", strict: true, code: 1,
			want: []string{"NOT RUN: the race detector, there is no C compiler", "ok as root: 2 passed, 0 failed, 0 skipped", "ok as uid-61002: 2 passed, 0 failed, 0 skipped"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			fake := func(name, script string) { put(t, filepath.Join(dir, "path", name), "#!/bin/sh\n"+script+"\n") }
			compiler := tt.compiler
			if compiler == "" {
				compiler = "a-compiler -with-a-flag"
			}
			failing := ""
			if strings.Contains(tt.output, "--- FAIL") {
				failing = "exit 1"
			}
			fake("a-compiler", "")
			fake("go", `case "$1 $2" in
				"env CC") echo "`+compiler+`" ;;
				"env CGO_ENABLED") echo 1 ;;
				"list ./...") printf 'x/good\nx/tests\nx/tests/faults\n' ;;
				test*) echo "$@" >>`+dir+`/log; printf '`+tt.output+`'; `+failing+` ;;
				*) exit 2 ;;
				esac`)
			fake("id", "echo "+tt.uid)
			fake("getent", `case $2 in 61000|61001) exit 0 ;; esac; exit 2`)
			fake("chown", "")
			fake("tar", "cat >/dev/null </dev/null")
			fake("sudo", map[bool]string{true: "exit 0", false: "exit 1"}[tt.sudo])

			cmd := exec.Command("/bin/sh", "test.sh")
			cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "path")+":/usr/bin:/bin", "TMPDIR="+dir, "SBXRUN_TESTS_NO_SKIP=")
			if tt.strict {
				cmd.Env = append(cmd.Env, "SBXRUN_TESTS_NO_SKIP=1")
			}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState == nil {
				t.Fatal(err)
			}
			if got := cmd.ProcessState.ExitCode(); got != tt.code {
				t.Errorf("exit code %d, want %d", got, tt.code)
			}
			before, summary, _ := strings.Cut(string(out), "\n\n")
			want := "test: " + strings.Join(tt.want, "\ntest: ") + "\n"
			if diff := cmp.Diff(want, summary); diff != "" {
				t.Errorf("summary (-want +got):\n%s", diff)
			}
			if !strings.Contains(before, tt.shown) || strings.Contains(before, "all is well") {
				t.Errorf("shown is %q, want %q and nothing of what passed", before, tt.shown)
			}

			log, err := os.ReadFile(filepath.Join(dir, "log"))
			if err != nil {
				t.Fatal(err)
			}
			if got, race := strings.Count(string(log), " -race "), tt.compiler == ""; got > 0 != race {
				t.Errorf("-race was given %d times: %s", got, log)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "sbxrun-check.*")); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}
