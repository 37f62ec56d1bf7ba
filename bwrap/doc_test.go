package bwrap_test

import (
	"os"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// TestBackendIsDocumented checks that docs/guides/library.md shows the back end that these tests run.
func TestBackendIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../docs/guides/library.md")
	check.Must(t, err)
	source, err := os.ReadFile("backend_test.go")
	check.Must(t, err)
	_, code, _ := strings.Cut(string(doc), "```go\n")
	code, _, _ = strings.Cut(code, "```\n")
	check.That(t, strings.HasPrefix(code, "// execute runs") && strings.Contains(string(source), code), "docs/guides/library.md has another one than backend_test.go")
	n := strings.Count(code, "\n")
	check.That(t, n <= 40, "it has %d lines", n)
}
