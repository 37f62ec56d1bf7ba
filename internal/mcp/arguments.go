package mcp

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/sbxrun/sbxrun/internal/api"
)

// inputSchema returns the schema of a tool's arguments.
func inputSchema[In any]() *jsonschema.Schema {
	s, err := jsonschema.For[In](nil)
	if err != nil {
		panic(err) // a type of this package
	}
	walk(s, func(s *jsonschema.Schema) {
		// Optional members are described by the type of their values: not all clients know lists of
		// types. Unknown members are ignored, so the schema does not forbid them.
		if len(s.Types) == 2 {
			s.Type = s.Types[0]
			if s.Type == "null" {
				s.Type = s.Types[1]
			}
			s.Types = nil
		}
		s.AdditionalProperties = nil
	})
	return s
}

// walk calls f for a schema and all schemas in it.
func walk(s *jsonschema.Schema, f func(*jsonschema.Schema)) {
	if s == nil {
		return
	}
	f(s)
	walk(s.Items, f)
	for _, p := range s.Properties {
		walk(p, f)
	}
}

// decode reads the arguments of a tool call. A null member counts as absent, as some clients send null
// for every optional argument.
func decode(schema *jsonschema.Schema, text json.RawMessage, into any) error {
	var arguments any
	if text = bytes.TrimSpace(text); len(text) == 0 || string(text) == "null" {
		text = json.RawMessage("{}")
	}
	if err := json.Unmarshal(text, &arguments); err != nil {
		return badArgument(schema, "arguments: invalid JSON: %v", err)
	}
	if err := conform(schema, arguments, ""); err != nil {
		return badArgument(schema, "%v", err)
	}
	text, err := json.Marshal(arguments)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return badArgument(schema, "arguments: %v", err)
	}
	return nil
}

// badArgument lists the tool's arguments in its hint.
func badArgument(schema *jsonschema.Schema, format string, args ...any) error {
	names := slices.Clone(schema.PropertyOrder)
	for i, name := range names {
		if slices.Contains(schema.Required, name) {
			names[i] += " (required)"
		}
	}
	return api.NewError(api.Usage, fmt.Sprintf(format, args...), "arguments are "+strings.Join(names, ", "))
}

// conform compares a value with a schema, and removes the members that are null or unknown.
func conform(s *jsonschema.Schema, v any, path string) error {
	fail := func(format string, args ...any) error {
		if path == "" {
			path = "arguments"
		}
		return fmt.Errorf("%s: %s", path, fmt.Sprintf(format, args...))
	}
	if got := typeOf(v); got != s.Type && !(s.Type == "integer" && got == "number") {
		if text, ok := v.(string); ok && len(text) <= 32 {
			got += fmt.Sprintf(" (%q)", text)
		}
		return fail("want %s, not %s", article(s.Type), article(got))
	}
	switch v := v.(type) {
	case map[string]any:
		for name, member := range v {
			p := s.Properties[name]
			if p == nil || member == nil {
				delete(v, name)
			} else if err := conform(p, member, join(path, name)); err != nil {
				return err
			}
		}
		for _, name := range s.Required {
			if _, ok := v[name]; !ok {
				return fmt.Errorf("%s: missing", join(path, name))
			}
		}
	case []any:
		for i, item := range v {
			if err := conform(s.Items, item, fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return err
			}
		}
	case string:
		if len(s.Enum) > 0 && !slices.Contains(s.Enum, any(v)) {
			return fail("unknown value %.64q; want one of %v", v, s.Enum)
		}
		if s.MinLength != nil && v == "" {
			return fail("must not be empty; leave it out instead")
		}
	case float64:
		if v < 0 {
			return fail("must not be negative")
		}
		if s.Type == "integer" && v != float64(int64(v)) {
			return fail("want an integer, not %v", v)
		}
	}
	return nil
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func typeOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case float64:
		return "number"
	case string:
		return "string"
	case []any:
		return "array"
	}
	return "object"
}

func article(noun string) string {
	switch {
	case noun == "null":
		return noun
	case strings.ContainsAny(noun[:1], "aeio"):
		return "an " + noun
	}
	return "a " + noun
}
