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
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestJSONIsDocumented checks that docs/reference/json.md has one row for every member of the
// commands' JSON, and one for every metric.
func TestJSONIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/json.md")
	check.Must(t, err)
	rows := func(heading string) []string {
		_, text, _ := strings.Cut(string(doc), "\n## "+heading+"\n")
		text, _, _ = strings.Cut(text, "\n## ")
		var names []string
		for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(text, -1) {
			names = append(names, row[1])
		}
		return slices.Sorted(slices.Values(names))
	}
	for heading, of := range map[string]reflect.Type{
		"ps, inspect":          reflect.TypeFor[described](),
		"start, exec --detach": reflect.TypeFor[sandbox.Handover](),
		"wait":                 reflect.TypeFor[waited](),
		"kill":                 reflect.TypeFor[killed](),
		"cleanup":              reflect.TypeFor[cleanup.Finding](),
		"logs":                 reflect.TypeFor[piece](),
		"diff":                 reflect.TypeFor[diffed](),
		"apply":                reflect.TypeFor[applied](),
		"stats":                reflect.TypeFor[statistics](),
	} {
		want := harness.MemberNames(of, reflect.TypeFor[result.Report](), reflect.TypeFor[state.Record](), reflect.TypeFor[result.ReportError](), reflect.TypeFor[result.Survivor]())
		want = slices.DeleteFunc(want, func(name string) bool { return strings.HasPrefix(name, "tightest.") }) // as in bounds
		check.NoDiff(t, cmp.Diff(slices.Sorted(slices.Values(want)), rows(heading)), "%s --json: members of the struct, against rows of json.md (-struct +doc)", heading)
	}
	var metrics []string
	for name := range exposed(t, statistics{}) {
		metrics = append(metrics, name)
	}
	check.NoDiff(t, cmp.Diff(slices.Sorted(slices.Values(metrics)), rows("Prometheus")), "metrics, against rows of json.md (-metrics +doc)")
}
