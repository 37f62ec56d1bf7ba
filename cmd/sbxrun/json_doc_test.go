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
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/detach"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestJSONIsDocumented: docs/reference/state.md has a row for every member of what the
// commands print as JSON, and for none that is not there.
func TestJSONIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/state.md")
	harness.Must(t, err)
	_, text, _ := strings.Cut(string(doc), "\n## JSON\n")
	text, _, _ = strings.Cut(text, "\n## ")
	tables := regexp.MustCompile(`(?m)^\| member .*\n(\|.*\n)+`).FindAllString(text, -1)
	for i, tt := range []struct {
		of string
		is reflect.Type
	}{
		{"ps", reflect.TypeFor[described]()},
		{"start", reflect.TypeFor[detach.Handover]()},
		{"wait", reflect.TypeFor[waited]()},
		{"kill", reflect.TypeFor[killed]()},
		{"cleanup", reflect.TypeFor[cleanup.Finding]()},
		{"logs", reflect.TypeFor[piece]()},
		{"diff", reflect.TypeFor[diffed]()},
		{"apply", reflect.TypeFor[applied]()},
	} {
		if i >= len(tables) {
			t.Errorf("docs/reference/state.md has no table for %s --json", tt.of)
			continue
		}
		var documented []string
		for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(tables[i], -1) {
			documented = append(documented, row[1])
		}
		want := harness.MemberNames(tt.is, reflect.TypeFor[result.Report](), reflect.TypeFor[state.Record]())
		for _, names := range []*[]string{&want, &documented} {
			*names = slices.Sorted(slices.Values(*names))
		}
		if diff := cmp.Diff(want, documented); diff != "" {
			t.Errorf("%s --json: members of the struct, against rows of docs/reference/state.md (-struct +doc):\n%s", tt.of, diff)
		}
	}
}

// TestStatsIsDocumented: docs/reference/stats.md has a row for every member of stats --json, and
// for none that is not there; and for every metric.
func TestStatsIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/stats.md")
	harness.Must(t, err)
	rows := func(heading string) (names []string) {
		_, text, _ := strings.Cut(string(doc), "\n## "+heading+"\n")
		text, _, _ = strings.Cut(text, "\n## ")
		for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(text, -1) {
			names = append(names, row[1])
		}
		return slices.Sorted(slices.Values(names))
	}
	want := slices.Sorted(slices.Values(harness.MemberNames(reflect.TypeFor[statistics]())))
	if diff := cmp.Diff(want, rows("JSON")); diff != "" {
		t.Errorf("members of the struct, against rows of docs/reference/stats.md (-struct +doc):\n%s", diff)
	}
	var metrics []string
	for name := range exposed(t, statistics{}) {
		metrics = append(metrics, name)
	}
	if diff := cmp.Diff(slices.Sorted(slices.Values(metrics)), rows("Prometheus")); diff != "" {
		t.Errorf("metrics, against rows of docs/reference/stats.md (-metrics +doc):\n%s", diff)
	}
}
