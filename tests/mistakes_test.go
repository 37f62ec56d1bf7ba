package tests

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The 40 most common mistakes on the command line get the messages in mistakes.txt: one line with the cause and, where
// there is one, the remedy. Each line after a command is its stderr, and the last one its exit code.
func TestMistakes(t *testing.T) {
	t.Parallel()
	const golden = "mistakes.txt"
	text, err := os.ReadFile(golden)
	harness.Must(t, err)
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "--name", "web")
	dir := harness.Dir(t)
	var got strings.Builder
	n := 0
	for line := range strings.Lines(string(text)) {
		words, ok := strings.CutPrefix(strings.TrimSpace(line), "$ sbxrun")
		if !ok {
			continue
		}
		n++
		args := strings.Fields(words)
		if before, quoted, ok := strings.Cut(words, "'"); ok { // one quoted word at the end
			args = append(strings.Fields(before), strings.Trim(quoted, "'"))
		}
		r := s.Start(harness.Options{Dir: dir, Env: []string{"PATH=/usr/bin:/bin"}}, args...).Wait()
		fmt.Fprintf(&got, "$ sbxrun%s\n%s%d\n", words, strings.NewReplacer(s.Dir, "STATE", dir, "DIR").Replace(string(r.Stderr)), r.ExitCode)
		check.That(t, strings.Count(string(r.Stderr), "\n") == 1, "%s: want one line on stderr, got %q", words, r.Stderr)
	}
	check.That(t, n == 40, "%s has %d mistakes, want 40", golden, n)
	check.Equal(t, cmp.Diff(string(text), got.String()), "", "%s (-want +got):\n", golden)
}
