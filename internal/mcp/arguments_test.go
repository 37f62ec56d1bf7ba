package mcp

import (
	"encoding/json"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Null and unknown members are ignored; for everything else the message names the argument.
func TestDecode(t *testing.T) {
	schema := inputSchema[runCode]()
	schema.Properties["language"].Enum = []any{"python", "sh"}
	schema.Properties["session"].MinLength = new(1)
	for _, tt := range []struct{ arguments, message string }{
		{`{"code":"1"}`, ""},
		{` {"code":"1","language":null,"stdin":null,"timeout_ms":null,"session":null,"files":null,"collect":null} `, ""},
		{`{"code":"1","files":[{"path":"a","text":null,"base64":"eA==","mode":7}],"unknown":{"a":[null]}}`, ""},
		{``, "code: missing"},
		{`null`, "code: missing"},
		{`{"code":null}`, "code: missing"},
		{`[1]`, "arguments: want an object, not an array"},
		{`{"code":1}`, "code: want a string, not a number"},
		{`{"code":"1","timeout_ms":"5"}`, `timeout_ms: want a number, not a string ("5")`},
		{`{"code":"1","timeout_ms":-5}`, "timeout_ms: must not be negative"},
		{`{"code":"1","session":""}`, "session: must not be empty; leave it out instead"},
		{`{"code":"1","language":"cobol"}`, `language: unknown value "cobol"; want one of [python sh]`},
		{`{"code":"1","files":[{"path":"a"},{"text":"b"}]}`, "files[1].path: missing"},
		{`{"code":"1","files":[null]}`, "files[0]: want an object, not null"},
		{`{"code":"1","collect":"*.csv"}`, `collect: want an array, not a string ("*.csv")`},
	} {
		var in runCode
		err := decode(schema, json.RawMessage(tt.arguments), &in)
		if tt.message == "" {
			check.That(t, err == nil && in.Code == "1" && in.Language == "" && (len(in.Files) != 1 || *in.Files[0].Base64 == "eA=="), "%s: %v, %+v", tt.arguments, err, in)
			continue
		}
		if err == nil {
			t.Errorf("%s: %+v", tt.arguments, in)
			continue
		}
		e := api.AsError(err)
		check.That(t, e.Failure.Message == tt.message && !e.Started && e.Failure.Hint == "arguments are code (required), language, stdin, timeout_ms, session, image, files, collect",
			"%s: %q, hint %q, want %q", tt.arguments, e.Failure.Message, e.Failure.Hint, tt.message)
	}
}

// An offset is an integer.
func TestDecodeInteger(t *testing.T) {
	schema := inputSchema[readFile]()
	for arguments, valid := range map[string]bool{`{"session":"s","path":"a","offset":65536}`: true, `{"session":"s","path":"a","offset":1.5}`: false} {
		err := decode(schema, json.RawMessage(arguments), new(readFile))
		check.That(t, (err == nil) == valid, "%s: %v", arguments, err)
	}
}

// A schema does not forbid unknown members, and has no lists of types.
func TestInputSchema(t *testing.T) {
	walk(inputSchema[newSession](), func(s *jsonschema.Schema) {
		check.That(t, s.AdditionalProperties == nil && len(s.Types) == 0 && s.Type != "", "%+v", s)
	})
}
