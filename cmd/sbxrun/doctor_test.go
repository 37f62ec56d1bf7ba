package main

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/tests/check"
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

interrupted before a result was known
`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got strings.Builder
			check.Must(t, printFindings(&got, tt.rep))
			check.NoDiff(t, cmp.Diff(strings.TrimPrefix(tt.want, "\n"), got.String()), "(-want +got)")
		})
	}
}

// The transcript in docs/reference/doctor.md has the current format. A test of package doctor compares its cause and fix.
func TestDoctorTranscript(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/doctor.md")
	check.Must(t, err)
	const cause = "kernel.unprivileged_userns_clone is 0: only root may make user namespaces"
	var printed strings.Builder
	err = printFindings(&printed, doctor.Report{Checks: []doctor.Finding{
		{Name: "kernel", Verdict: doctor.OK, Detail: "Linux 6.1.0-56-amd64"},
		{Name: "bwrap", Verdict: doctor.OK, Detail: "/usr/bin/bwrap, version 0.12.0"},
		{Name: "user namespace", Verdict: doctor.Failed, Cause: cause,
			Fix: "sudo sysctl -w kernel.unprivileged_userns_clone=1\nto keep it: echo 'kernel.unprivileged_userns_clone = 1' | sudo tee /etc/sysctl.d/60-sbxrun.conf"},
		{Name: "PID namespace", Verdict: doctor.Skipped, Cause: "needs: user namespace"},
		{Name: "no nested sandboxes", Verdict: doctor.Skipped, Cause: "needs: user namespace"}, // the longest name
	}})
	check.Must(t, err)
	_, block, _ := strings.Cut(string(doc), "    $ sbxrun doctor\n")
	block, _, found := strings.Cut(block, "\n\nA run")
	rest, elided := printed.String(), false
	for line := range strings.Lines(block + "\n") {
		if line = strings.TrimPrefix(line, "    "); line == "…\n" {
			elided = true
			continue
		}
		before, after, ok := strings.Cut("\n"+rest, "\n"+line)
		check.Require(t, ok && (before == "" || elided), "docs/reference/doctor.md has %q, which is not what comes next:\n%s", line, rest)
		rest, elided = after, false
	}
	check.That(t, found && rest == "", "docs/reference/doctor.md lacks %q", rest)
}
