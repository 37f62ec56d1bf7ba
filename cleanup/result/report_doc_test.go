package result

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// docs/reference/report.md has a row for every member of the report, and no other rows.
func TestReportIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/report.md")
	check.Must(t, err)
	_, members, _ := strings.Cut(string(doc), "\n## Members\n")
	members, _, _ = strings.Cut(members, "\n## ")
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(members, -1) {
		documented = append(documented, row[1])
	}
	check.NoDiff(t, cmp.Diff(harness.MemberNames(reflect.TypeFor[Report]()), documented), "members in the order of the struct, against rows of docs/reference/report.md (-struct +doc)")
}

// docs/reference/report.md describes the values of members.
func TestReportValuesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/report.md")
	check.Must(t, err)
	values := []string{
		string(Exited), string(Signaled), string(Timeout), string(IdleTimeout), string(Killed), string(Canceled), string(StartFailed), string(Lost),
		string(OOM), string(CPUTime), string(OutputLimit), string(FileSize),
		string(StatusCompleted), string(StatusFailed), string(StatusKilled), string(StatusError),
		string(Proven), string(Unproven), string(NotApplicable),
	}
	missing := slices.DeleteFunc(values, func(v string) bool { return strings.Contains(string(doc), "`"+v+"`") })
	check.That(t, len(missing) == 0, "docs/reference/report.md does not have %q", missing)
}

// docs/reference/exit-codes.md has a row for every exit code of sbxrun.
func TestExitCodesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/exit-codes.md")
	check.Must(t, err)
	for _, code := range []int{ExitOutput, ExitBusy, ExitInUse, ExitUnproven, ExitTimeout, ExitNotStarted, ExitNotExecutable, ExitNotFound, ExitKilled, ExitCPUTime, ExitOutputLimit} {
		check.That(t, strings.Contains(string(doc), "\n| "+strconv.Itoa(code)+" |"), "exit-codes.md has no row for %d", code)
	}
}
