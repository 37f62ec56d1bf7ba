package server

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// The documents have servers, tags and a license, no nullable arrays, and no schemas of responses that
// forbid unknown members. Version 3.0 has nothing that only 3.1 has.
func TestDocuments(t *testing.T) {
	h := handler(t)
	for _, name := range []string{"openapi.json", "openapi-3.0.json"} {
		w := ask(h, http.MethodGet, "/"+name, "")
		var doc struct {
			Info    struct{ License struct{ Name string } }
			Servers []struct{ URL string }
			Paths   map[string]map[string]struct {
				Tags                 []string
				Summary, Description string
			}
			Components struct {
				Schemas map[string]struct {
					AdditionalProperties any
				}
			}
		}
		check.Must(t, json.Unmarshal(w.Body.Bytes(), &doc))
		check.That(t, doc.Info.License.Name == "MIT" && len(doc.Servers) == 1, "%s: %+v %+v", name, doc.Info, doc.Servers)
		for path, operations := range doc.Paths {
			for method, o := range operations {
				check.That(t, len(o.Tags) == 1 && o.Summary != "" && o.Description != "", "%s: %s %s: %+v", name, method, path, o)
			}
		}
		for _, response := range []string{"Answer", "CellAnswer", "CallStatus", "Session", "Error", "Report", "StoredFiles"} {
			s, ok := doc.Components.Schemas[response]
			check.That(t, ok && s.AdditionalProperties != false, "%s: %s: %+v", name, response, s)
		}
		s := doc.Components.Schemas["Call"]
		check.That(t, s.AdditionalProperties == false, "%s: requests are checked: %+v", name, s)
		var all any
		check.Must(t, json.Unmarshal(w.Body.Bytes(), &all))
		var visit func(at string, v any)
		visit = func(at string, v any) {
			switch v := v.(type) {
			case map[string]any:
				text := fmt.Sprint(v["type"])
				check.That(t, !strings.Contains(text, "array") || !strings.Contains(text, "null") && v["nullable"] != true,
					"%s: %s is a nullable array", name, at)
				check.That(t, !strings.Contains(text, "integer") || v["format"] == nil, "%s: %s has the format %v", name, at, v["format"])
				_, ref := v["$ref"].(string)
				check.That(t, name != "openapi-3.0.json" || v["contentMediaType"] == nil && (!ref || len(v) <= 1), "%s: %s: %v", name, at, v)
				for k, child := range v {
					visit(at+"/"+k, child)
				}
			case []any:
				for i, child := range v {
					visit(fmt.Sprint(at, "/", i), child)
				}
			}
		}
		visit("", all)
	}
}
