package serve

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The server offers a language only if its command runs in a sandbox. A program that only the server's PATH
// has is not offered, unless tools is set.
func TestLanguagesThatWork(t *testing.T) {
	dir := harness.Dir(t)
	prefix := filepath.Join(dir, "prefix")
	harness.Must(t, os.MkdirAll(filepath.Join(prefix, "bin"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(prefix, "bin", "own-sh"), []byte("#!/bin/sh\nexec sh \"$@\"\n"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(prefix, "bin", "broken-sh"), []byte("#!/bin/sh\nexec no-such-shell \"$@\"\n"), 0o755))
	t.Setenv("PATH", filepath.Join(prefix, "bin")+":"+os.Getenv("PATH"))
	languages := ""
	for _, name := range []string{"own", "broken"} {
		languages += fmt.Sprintf("[languages.%s]\ncommand = [\"%s-sh\", \"{file}\"]\nfile = \"main.sh\"\n", name, name)
	}
	for _, tools := range []bool{false, true} {
		s := serve(t, fmt.Sprintf("[sandbox]\ntools = %v\n%s", tools, languages))
		_, b := s.ask(http.MethodGet, "/v1/languages", nil)
		for name, want := range map[string]bool{"sh": true, "python": true, "own": tools, "broken": false} {
			got := strings.Contains(string(b), fmt.Sprintf(`"name":%q`, name))
			check.That(t, got == want, "tools %v: %s: %v, want %v: %s", tools, name, got, want, b)
		}
		if tools {
			s.answers(http.StatusOK, `"stdout":"42\n"`, http.MethodPost, "/v1/run", `{"language":"own","code":"echo $((6*7))"}`)
		}
	}
}
