package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
)

func cleanupCommand(flags *cli.Cleanup) int {
	names := flags.Sandboxes
	found, err := cleanup.Sweep(cleanup.Options{Names: names, OlderThan: time.Duration(flags.OlderThan), DryRun: flags.DryRun})
	if err != nil {
		return refuse(flags, err)
	}
	if len(names) == 0 {
		found = append(found, sweepVolumes(flags.DryRun)...)
	}
	code := 0
	shown := []cleanup.Finding{}
	for _, f := range found {
		if f.Err != "" {
			code = result.ExitNotStarted
		}
		if f.Kind == "record" && f.ID == "" { // there is none of that name
			fail(errors.New(f.Err))
		} else {
			shown = append(shown, f)
		}
	}
	if flags.JSON {
		err = printJSON(append([]cleanup.Finding{}, found...))
	} else {
		err = printFound(os.Stdout, shown, flags.DryRun)
	}
	return max(code, printed(err))
}

// zombiesOnALine is of how many zombies of a kind the pids are printed.
const zombiesOnALine = 5

// printFound prints a line for each thing that was found, and what was done; for zombies
// that have the same name and parent, one line in the place of the first.
func printFound(w io.Writer, found []cleanup.Finding, dryRun bool) error {
	alike := map[string][]cleanup.Finding{}
	for _, f := range found {
		if f.Kind == "zombie" {
			alike[f.What] = append(alike[f.What], f)
		}
	}
	for _, f := range found {
		zombies := alike[f.What]
		if f.Kind == "zombie" && zombies[0].PID != f.PID {
			continue
		}
		did := "left   "
		switch {
		case f.Err != "":
			did = "failed "
		case f.Done && f.Kind == "frozen":
			did = "thawed "
		case f.Done:
			did = "removed"
		case dryRun && f.Kind == "frozen":
			did = "to thaw"
		case dryRun && f.Kind != "zombie":
			did = "to go  "
		}
		line := did + "  " + f.Kind
		if f.ID != "" {
			line += " " + f.ID
		}
		if f.Name != "" {
			line += " " + f.Name
		}
		if f.PID != 0 {
			line += fmt.Sprintf(" %d", f.PID)
		}
		if f.Kind == "zombie" {
			for i, other := range zombies[1:] {
				if i == zombiesOnALine-1 {
					line += fmt.Sprintf(" and %d more", len(zombies)-zombiesOnALine)
					break
				}
				line += fmt.Sprintf(" %d", other.PID)
			}
		}
		line += ": " + f.What
		if f.Err != "" {
			line += ": " + f.Err
		}
		if _, err := fmt.Fprintln(w, printable(line)); err != nil {
			return err
		}
	}
	return nil
}

// soonSwept is when a command has run for long enough that a sweep costs it nothing.
const soonSwept = 300 * time.Millisecond

// sweepQuickly ends what crashes have left running. stateDir is "" for the caller's.
func sweepQuickly(stateDir string) {
	_, _ = cleanup.Sweep(cleanup.Options{StateDir: stateDir, Quick: true}) // cleanup tells; here it is not asked for
}
