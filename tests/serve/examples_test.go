package serve

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The examples run as they are, with stubs for vendors' packages.
func TestExamples(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	t.Run("python", func(t *testing.T) {
		stubs, err := filepath.Abs("testdata/stubs")
		check.Must(t, err)
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
		check.Must(t, err)
		made(t, dir, "env", "SBXRUN_ADDRESS=unix:"+s.socket(), "node", "examples.mjs")
		made(t, dir, "env", "SBXRUN_ADDRESS=unix:/no/such/socket", "node", "examples.mjs", "unreachable")
		readme(t, s, "clients/node/README.md", "js", filepath.Join(dir, "readme.mjs"), "")
		made(t, dir, "node", "readme.mjs")
	})
	t.Run("readme of python", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "readme.py")
		readme(t, s, "clients/python/README.md", "python", file, "import asyncio\nasyncio.run(main())\n")
		made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python"), "/usr/bin/python3", "-B", "-W", "error::ResourceWarning", file)
	})
	t.Run("guide to back ends", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "readme.py")
		readme(t, s, "docs/guides/backend.md", "python", file, "assert (report.cause, report.exit_code, report.stdout) == ('exited', 0, '42\\n'), report.data\n")
		made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python"), "/usr/bin/python3", "-B", file)
	})
	s.idle()
}

// readmeCode returns the program in a document.
func readmeCode(t *testing.T, document, language string) (text string) {
	t.Helper()
	b := harness.ReadFile(t, filepath.Join("../..", document))
	for _, block := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(string(b), -1) {
		text += block[1]
	}
	check.Require(t, strings.Contains(text, "unix:/run/sbxrund.sock"), "%s shows %q", document, text)
	return text
}

// readme writes the program in a document to a file, for the test's server.
func readme(t *testing.T, s *server, document, language, file, last string) {
	t.Helper()
	text := readmeCode(t, document, language)
	check.Must(t, os.WriteFile(file, []byte(strings.ReplaceAll(text, "unix:/run/sbxrund.sock", "unix:"+s.socket())+last), 0o644))
}
