//go:build check

package server

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The document is valid OpenAPI and has every operation.
func TestOpenAPI(t *testing.T) {
	w := ask(handler(t), http.MethodGet, "/openapi.json", "")
	check.Require(t, w.Code == http.StatusOK, "%d %s", w.Code, w.Body)
	doc, err := openapi3.NewLoader().LoadFromData(w.Body.Bytes())
	check.Must(t, err)
	check.Must(t, doc.Validate(t.Context()))
	check.That(t, strings.HasPrefix(doc.OpenAPI, "3.1"), "version %s", doc.OpenAPI)
	for path, methods := range map[string]string{
		"/v1/run": "POST", "/v1/calls": "POST GET", "/v1/calls/{id}": "GET DELETE", "/v1/calls/{id}/output": "GET", "/v1/languages": "GET", "/v1/images": "GET",
		"/v1/sessions": "POST GET", "/v1/sessions/{id}": "GET DELETE", "/v1/sessions/{id}/exec": "POST", "/v1/sessions/{id}/code": "POST", "/v1/sessions/{id}/processes": "POST GET",
		"/v1/sessions/{id}/processes/{pid}": "GET DELETE", "/v1/sessions/{id}/files/{path}": "PUT GET DELETE", "/v1/sessions/{id}/archive": "GET PUT", "/v1/files": "POST", "/v1/files/{id}": "GET",
	} {
		item := doc.Paths.Value(path)
		for _, method := range strings.Fields(methods) {
			if item == nil || item.GetOperation(method) == nil {
				t.Errorf("no %s %s", method, path)
				continue
			}
			for status := range item.GetOperation(method).Responses.Map() {
				check.That(t, status != "422" && status != "default", "%s %s says %s, which is never answered", method, path, status)
			}
		}
	}
}

// docs/reference/http-api.md lists all paths, those of sessions in a table without their prefix, and all
// error codes with their statuses.
func TestDocument(t *testing.T) {
	doc, err := openapi3.NewLoader().LoadFromData(ask(handler(t), http.MethodGet, "/openapi.json", "").Body.Bytes())
	check.Must(t, err)
	file := harness.ReadFile(t, "../../docs/reference/http-api.md")
	text := string(file)
	named := func(name string) bool {
		return regexp.MustCompile("[ `\"]" + regexp.QuoteMeta(name) + "[ `?\"]").MatchString(text)
	}
	for path := range doc.Paths.Map() {
		in, ok := strings.CutPrefix(path, "/v1/sessions/{id}/")
		check.That(t, named(path) || ok && named(in), "nothing of %s", path)
	}
	for code, status := range api.Codes() {
		check.That(t, regexp.MustCompile(fmt.Sprintf(`(?m)^\| [0-9, ]*\b%d\b[0-9, ]* \| .*\x60%s\x60`, status, code)).MatchString(text),
			"nothing of %s, %d", code, status)
	}
}
