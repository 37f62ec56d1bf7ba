package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A thousand zombies of one parent are one line.
func TestPrintFoundZombies(t *testing.T) {
	const keepers, supervisors = "zombie of sbxrun-keeper, which only its parent 1 (app) can reap", "zombie of sbxrun, which only its parent 1 (app) can reap"
	found := []cleanup.Finding{{Kind: "record", ID: "aa", What: "record", Done: true}}
	for i := range 1000 {
		found = append(found, cleanup.Finding{Kind: "zombie", PID: 2000 + i, What: keepers})
	}
	found = append(found, cleanup.Finding{Kind: "zombie", PID: 7, What: supervisors}, cleanup.Finding{Kind: "zombie", PID: 8, What: supervisors})
	want := `removed  record aa: record
left     zombie 2000 2001 2002 2003 2004 and 995 more: ` + keepers + `
left     zombie 7 8: ` + supervisors + "\n"
	for _, dry := range []bool{false, true} {
		var b strings.Builder
		check.Must(t, printFound(&b, found, dry))
		check.NoDiff(t, cmp.Diff(want, b.String()), "dry %v (-want +got)", dry)
	}
}
