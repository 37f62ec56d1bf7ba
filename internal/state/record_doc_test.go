package state

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// TestRecordIsDocumented: docs/state.md has a row for every member of the record,
// and for none that is not there. The report has a page of its own.
func TestRecordIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/state.md")
	if err != nil {
		t.Fatal(err)
	}
	_, members, _ := strings.Cut(string(doc), "\n## Record\n")
	members, _, _ = strings.Cut(members, "\n## ")
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(members, -1) {
		documented = append(documented, row[1])
	}
	if diff := cmp.Diff(memberNames("", reflect.TypeFor[Record]()), documented); diff != "" {
		t.Errorf("members in the order of the struct, against rows of docs/state.md (-struct +doc):\n%s", diff)
	}
	for _, phase := range []Phase{Starting, Running, Ended} {
		if !strings.Contains(members, "`"+string(phase)+"`") {
			t.Errorf("docs/state.md does not have the phase %q", phase)
		}
	}
}

// TestFilesAreDocumented: so are the files, by which others find the record.
func TestFilesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/state.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{recordName, accessName, lockName, activityName, killName} {
		if !strings.Contains(string(doc), "`ID/"+name+"`") {
			t.Errorf("docs/state.md does not have ID/%s", name)
		}
	}
	for _, name := range []string{queueName, slotPrefix + "N", admissionName} {
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("docs/state.md does not have %s", name)
		}
	}
	if !strings.Contains(string(doc), "`"+namesName+"/NAME`") {
		t.Errorf("docs/state.md does not have %s/NAME", namesName)
	}
}

// memberNames lists a struct's members by their paths, depth first.
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
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		path := strings.TrimPrefix(prefix+"."+name, ".")
		names = append(append(names, path), memberNames(path, f.Type)...)
	}
	return names
}
