package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/doctor"
)

func TestPrintFindings(t *testing.T) {
	ms := 6.54
	tests := []struct {
		name string
		rep  doctor.Report
		want string
	}{
		{"works", doctor.Report{OK: true, RoundTrip: &ms, Checks: []doctor.Finding{
			{Name: "kernel", Verdict: doctor.OK, Detail: "Linux 6.1.0"},
			{Name: "no nested sandboxes", Verdict: doctor.Warning, Detail: "bubblewrap 0.7.0 has none", Cause: "more of the kernel", Fix: "install it"},
		}}, `
ok       kernel               Linux 6.1.0
warning  no nested sandboxes  more of the kernel
           seen: bubblewrap 0.7.0 has none
           fix:  install it

sbxrun works here: ` + "`true`" + ` took 6.5 ms, from start to proven end
`},
		{"does not work", doctor.Report{Checks: []doctor.Finding{
			{Name: "user namespace", Verdict: doctor.Failed, Detail: "the same", Cause: "it is so: the same", Fix: "one\nother"},
			{Name: "run", Verdict: doctor.Skipped, Cause: "needs: user namespace"},
		}}, `
failed   user namespace  it is so: the same
           fix:  one
                 other
skipped  run             needs: user namespace

sbxrun does not work here: user namespace: it is so: the same
`},
		{"interrupted", doctor.Report{}, `

interrupted: nothing is known
`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got strings.Builder
			if err := printFindings(&got, tt.rep); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(tt.want, "\n"), got.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
