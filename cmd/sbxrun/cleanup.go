package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
)

func cleanupCommand(flags *cli.Cleanup) (r output.Result, err error) {
	names := flags.Sandboxes
	found, err := cleanup.Sweep(cleanup.Options{Names: names, OlderThan: time.Duration(flags.OlderThan), DryRun: flags.DryRun})
	if err != nil {
		return r, err
	}
	if len(names) == 0 {
		found = append(found, sweepVolumes(flags.DryRun)...)
	}
	var unknown *multierror.Error
	shown := []cleanup.Finding{}
	for _, f := range found {
		if f.Err != "" {
			r.Code = result.ExitNotStarted
		}
		if f.Kind == "record" && f.ID == "" { // no record has this name
			unknown = multierror.Append(unknown, errors.New(f.Err))
		} else {
			shown = append(shown, f)
		}
	}
	r.Value = append([]cleanup.Finding{}, found...)
	r.Text = func(w io.Writer) error { return printFound(w, shown, flags.DryRun) }
	return r, unknown.ErrorOrNil()
}

// zombiesOnALine limits the PIDs printed for one kind of zombie.
const zombiesOnALine = 5

// printFound prints each finding and its outcome on a line. Zombies with the same name and parent share one.
func printFound(w io.Writer, found []cleanup.Finding, dryRun bool) error {
	zombies := map[string][]int{} // PIDs
	for _, f := range found {
		if f.Kind == "zombie" {
			zombies[f.What] = append(zombies[f.What], f.PID)
		}
	}
	for _, f := range found {
		pids := []int{f.PID}
		if f.Kind == "zombie" {
			if pids = zombies[f.What]; pids == nil {
				continue // printed already
			}
			delete(zombies, f.What)
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
		for _, name := range []string{f.ID, f.Name} {
			if name != "" {
				line += " " + name
			}
		}
		for i, pid := range pids {
			if i == zombiesOnALine {
				line += fmt.Sprintf(" and %d more", len(pids)-i)
				break
			}
			if pid != 0 {
				line += fmt.Sprintf(" %d", pid)
			}
		}
		line += ": " + f.What
		if f.Err != "" {
			line += ": " + f.Err
		}
		if _, err := fmt.Fprintln(w, output.Printable(line)); err != nil {
			return err
		}
	}
	return nil
}

// soonSwept is the age of a command from which the time for a sweep no longer matters.
const soonSwept = 300 * time.Millisecond

// sweepQuickly ends processes that crashes have left running. If stateDir is "", it uses the caller's state directory.
func sweepQuickly(stateDir string) {
	_, _ = cleanup.Sweep(cleanup.Options{StateDir: stateDir, Quick: true}) // sbxrun cleanup reports it
}
