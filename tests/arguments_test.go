package tests

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Arguments up to the kernel's limits (execve(2)) arrive unchanged.
func TestArgumentsLong(t *testing.T) {
	t.Parallel()
	count := func(args ...string) *harness.Result {
		t.Helper()
		return harness.Run(t, harness.Options{}, append([]string{"python3", "-c", "import sys; print(len(sys.argv) - 1, sum(map(len, sys.argv[1:])))"}, args...)...)
	}
	expect := func(r *harness.Result, want string) {
		t.Helper()
		r.Expect(t, 0, "exited")
		check.Equal(t, string(r.Stdout), want)
	}
	// 130,000 bytes in one argument and in many, and the longest possible argument.
	expect(count(strings.Repeat("x", 130000)), "1 130000\n")
	many := make([]string, 8000)
	for i := range many {
		many[i] = "0123456789abcdef"
	}
	expect(count(many...), "8000 128000\n")
	const longest = 128<<10 - 1
	expect(count(strings.Repeat("x", longest)), "1 131071\n")

	// With one byte more the kernel refuses to start sbxrun itself.
	p, err := harness.TryStart(t, harness.Options{}, "echo", strings.Repeat("x", longest+1))
	if err == nil {
		p.Wait()
	}
	check.That(t, errors.Is(err, syscall.E2BIG), "an argument of 131072 bytes: %v", err)
}

// The command can get as many arguments as sbxrun can; those of bwrap don't count.
func TestArgumentsInAll(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	//
	// Strings and pointers share a quarter of the stack limit, at most 6 MiB (execve(2)). Find the
	// largest list that the kernel accepts.
	var stack unix.Rlimit
	harness.Must(t, unix.Getrlimit(unix.RLIMIT_STACK, &stack))
	size := int(min(stack.Cur/4, 6<<20))
	for started := 0; started < 2; size -= 1000 {
		args := []string{"true"}
		for left := size; left > 0; left -= 100 << 10 {
			args = append(args, strings.Repeat("x", min(left, 100<<10)))
		}
		p, err := harness.TryStart(t, harness.Options{}, args...)
		if errors.Is(err, syscall.E2BIG) {
			continue
		}
		harness.Must(t, err)
		started++
		p.Wait().Expect(t, 0, "exited")
	}
}

// bubblewrap accepts 9,000 arguments, but does not see those of the command.
func TestArgumentsMany(t *testing.T) {
	t.Parallel()
	harness.Run(t, harness.Options{}, append([]string{"sh", "-c", "echo $#", "sh"}, make([]string, 20000)...)...).Expect(t, 0, "exited").Out(t, "20000\n")
}

// The same limit applies to the command's environment, where it shows only at its exec.
func TestEnvironmentLong(t *testing.T) {
	t.Parallel()
	file := filepath.Join(harness.Dir(t), "env")
	write := func(n int) {
		harness.Must(t, os.WriteFile(file, []byte("LONG="+strings.Repeat("x", n)+"\n"), 0o600))
	}
	write(128<<10 - 1 - len("LONG="))
	harness.Run(t, harness.Options{}, "--env-file", file, "sh", "-c", "echo ${#LONG}").Expect(t, 0, "exited").Out(t, "131066\n")
	write(128 << 10)
	r := harness.Run(t, harness.Options{}, "--env-file", file, "true")
	check.That(t, r.Report != nil && !r.Report.Started && r.ExitCode >= 125 && r.ExitCode <= 126 && len(r.Stderr) != 0, "exit code %d, stderr %.500q", r.ExitCode, r.Stderr)
}

// Values with line breaks, empty values and odd text arrive unchanged.
func TestEnvironmentValues(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{Env: []string{"PASSED=three\nlines\n"}},
		"--env", "A=one\ntwo", "--env", "EMPTY=", "--env", "PASSED", "--env", `ODD=a=b $(c) "d" \`,
		"sh", "-c", `printf '<%s>' "$A" "$EMPTY" "$PASSED" "$ODD"`)
	r.Expect(t, 0, "exited")
	want := "<one\ntwo><><three\nlines\n>" + `<a=b $(c) "d" \>`
	check.That(t, string(r.Stdout) == want, "%q, want %q", r.Stdout, want)
}

// An argument that is not UTF-8 arrives, and the report is valid JSON.
func TestArgumentBytes(t *testing.T) {
	t.Parallel()
	harness.Run(t, harness.Options{}, "printf", "%s", "\xff\x01\n").Expect(t, 0, "exited").Out(t, "\xff\x01\n")
}
