package server

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/internal/config"
)

// tagOf returns the group of an operation in the document.
func tagOf(path string) string {
	parts := strings.Split(strings.TrimPrefix(path, "/v1/"), "/")
	switch {
	case parts[0] == "run":
		return "calls"
	case parts[0] == "files":
		return "content store"
	case parts[0] == "languages" || parts[0] == "images" || parts[0] == "status":
		return "server"
	case len(parts) > 2 && (parts[2] == "files" || parts[2] == "archive"):
		return "workspace"
	case len(parts) > 2 && parts[2] == "processes":
		return "processes"
	}
	return parts[0]
}

// documents serves the OpenAPI document in versions 3.1 and 3.0.
func documents(mux *http.ServeMux, doc *huma.OpenAPI) {
	for path, old := range map[string]bool{"/openapi": false, "/openapi-3.0": true} {
		text, err := document(doc, old)
		if err != nil {
			panic(err) // of types of package api
		}
		for ending, kind := range map[string]string{".json": "application/json", ".yaml": "application/yaml"} { // JSON is YAML
			mux.HandleFunc("GET "+path+ending, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", kind)
				_, _ = w.Write(text) // the client may have disconnected
			})
		}
	}
}

// Document returns the OpenAPI document in version 3.1, or 3.0 if old is set.
func Document(version string, old bool) ([]byte, error) {
	s := &Server{version: version}
	if err := s.Middleware.init(config.Default(), nil, slog.New(slog.DiscardHandler)); err != nil {
		return nil, err
	}
	return document(s.define(http.NewServeMux()).OpenAPI(), old)
}

func document(doc *huma.OpenAPI, old bool) ([]byte, error) {
	marshal := doc.MarshalJSON
	if old {
		marshal = doc.Downgrade
	}
	b, err := marshal()
	if err != nil {
		return nil, err
	}
	var out map[string]any
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, err
	}
	improve(out, old)
	return json.MarshalIndent(out, "", " ")
}

// improve adapts the generated document to what generators of clients expect. Responses may get more members
// in later versions, so their schemas are extensible, whereas the server rejects unknown members of requests.
func improve(document map[string]any, old bool) {
	components := document["components"].(map[string]any)["schemas"].(map[string]any)
	seen := map[string]bool{}
	var open func(v any)
	open = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if v["additionalProperties"] == false {
				delete(v, "additionalProperties")
			}
			if ref, ok := v["$ref"].(string); ok {
				if name := ref[strings.LastIndex(ref, "/")+1:]; !seen[name] {
					seen[name] = true
					open(components[name])
				}
			}
			for _, child := range v {
				open(child)
			}
		case []any:
			for _, child := range v {
				open(child)
			}
		}
	}
	for _, item := range document["paths"].(map[string]any) {
		for _, operation := range item.(map[string]any) {
			open(operation.(map[string]any)["responses"])
		}
	}
	var each func(v any) any
	each = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for name, child := range v {
				v[name] = each(child)
			}
			return schema(v, old)
		case []any:
			for i := range v {
				v[i] = each(v[i])
			}
		}
		return v
	}
	each(document)
}

// schema adapts one schema: arrays are never null, integers fit into the numbers of every language, and
// version 3.0 has neither contentMediaType nor members next to $ref.
func schema(v map[string]any, old bool) any {
	types, _ := v["type"].([]any)
	if slices.Contains(types, any("array")) {
		v["type"] = "array"
	}
	switch {
	case v["type"] == "array":
		delete(v, "nullable")
	case v["type"] == "integer" || slices.Contains(types, any("integer")):
		delete(v, "format")
	}
	if !old {
		return v
	}
	if v["type"] == "string" {
		delete(v, "contentMediaType")
	}
	if ref, ok := v["$ref"]; ok && len(v) > 1 {
		delete(v, "$ref")
		v["allOf"] = []any{map[string]any{"$ref": ref}}
	}
	return v
}
