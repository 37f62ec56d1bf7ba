package main

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/state"
)

// TestJSONIsDocumented: docs/state.md has a row for every member of what the
// commands print as JSON, and for none that is not there.
func TestJSONIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/state.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(doc), "\n## JSON\n")
	text, _, _ = strings.Cut(text, "\n## ")
	tables := regexp.MustCompile(`(?m)^\| member .*\n(\|.*\n)+`).FindAllString(text, -1)
	for i, tt := range []struct {
		of string
		is reflect.Type
	}{
		{"ps", reflect.TypeFor[described]()},
		{"start", reflect.TypeFor[handover]()},
		{"wait", reflect.TypeFor[waited]()},
		{"kill", reflect.TypeFor[killed]()},
		{"cleanup", reflect.TypeFor[cleanup.Finding]()},
		{"logs", reflect.TypeFor[piece]()},
	} {
		if i >= len(tables) {
			t.Errorf("docs/state.md has no table for %s --json", tt.of)
			continue
		}
		var documented []string
		for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(tables[i], -1) {
			documented = append(documented, row[1])
		}
		want := memberNames("", tt.is)
		for _, names := range []*[]string{&want, &documented} {
			*names = slices.Sorted(slices.Values(*names))
		}
		if diff := cmp.Diff(want, documented); diff != "" {
			t.Errorf("%s --json: members of the struct, against rows of docs/state.md (-struct +doc):\n%s", tt.of, diff)
		}
	}
}

// memberNames lists a struct's members by their paths, but for what is described
// elsewhere: reports and records.
func memberNames(prefix string, t reflect.Type) (names []string) {
	switch t.Kind() {
	case reflect.Pointer:
		return memberNames(prefix, t.Elem())
	case reflect.Slice:
		return memberNames(prefix+"[]", t.Elem())
	case reflect.Struct:
	default:
		return nil
	}
	if t == reflect.TypeFor[result.Report]() {
		return nil
	}
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Type == reflect.TypeFor[state.Record]() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		path := strings.TrimPrefix(prefix+"."+name, ".")
		names = append(append(names, path), memberNames(path, f.Type)...)
	}
	return names
}
