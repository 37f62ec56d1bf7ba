package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/state"
)

func psCommand(flags *cli.Ps) int {
	tags, err := parseTags(flags.Tag)
	if err != nil {
		return failUsage(flags, err)
	}
	entries, _, err := list(flags.Sandbox)
	if err != nil {
		return refuse(flags, err)
	}
	entries = slices.DeleteFunc(entries, func(e *state.Entry) bool {
		switch {
		case !tagged(e, tags):
			return true
		case len(flags.Status) > 0:
			return !slices.Contains(flags.Status, e.Status())
		}
		return !flags.All && !e.Lives()
	})
	switch {
	case flags.Names, flags.Quiet:
		word := (*state.Entry).Handle
		if flags.Names {
			word = (*state.Entry).Title
		}
		for _, e := range entries {
			if _, err = fmt.Println(word(e)); err != nil {
				break
			}
		}
	case flags.JSON:
		all := make([]described, 0, len(entries))
		for _, e := range entries {
			all = append(all, describe(e))
		}
		err = printJSON(all)
	default:
		err = printTable(os.Stdout, entries, flags.Sandbox != "", time.Now())
	}
	return printed(err)
}

// described is a sandbox in the JSON of ps and inspect.
type described struct {
	state.Record
	Status   string `json:"status"`
	Alive    bool   `json:"alive"`
	ExitCode *int   `json:"exit_code,omitempty"` // of what has ended
}

func describe(e *state.Entry) described {
	d := described{Record: e.Record, Status: e.Status(), Alive: e.Alive}
	if e.Record.Report != nil {
		d.ExitCode = &e.Record.Report.ExitCode
	}
	return d
}

// printTable prints sandboxes, or execs, which have their handle in the place of id and name.
func printTable(w io.Writer, entries []*state.Entry, execs bool, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	header := "ID\tNAME"
	if execs {
		header = "EXEC"
	}
	fmt.Fprintln(t, header+"\tSTATUS\tAGE\tCOMMAND")
	for _, e := range entries {
		status := e.Status()
		if r := e.Record.Ready; r != nil && r.ReadyAt != "" && status == string(state.Running) {
			status = "ready"
		}
		if r := e.Record.Report; r != nil && r.ExitCode != 0 {
			status = fmt.Sprintf("%s (%d)", status, r.ExitCode)
		}
		which := e.ID + "\t" + cmp.Or(e.Record.Name, "-")
		if execs {
			which = e.Title()
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", which, status, age(e.Record.CreatedAt, now), commandLine(e.Record.Argv))
	}
	return t.Flush()
}

// age is how long ago it was, in one unit.
func age(created string, now time.Time) string {
	at, err := time.Parse(result.TimeFormat, created)
	if err != nil {
		return "?"
	}
	return inOneUnit(now.Sub(at))
}

func inOneUnit(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

// commandLine is a command for people, in one line that is not too long.
func commandLine(argv []string) string {
	const most = 60
	if len(argv) == 0 {
		return "(idle)"
	}
	line := []rune(printable(strings.Join(argv, " ")))
	if len(line) > most {
		return string(line[:most-1]) + "…"
	}
	return string(line)
}
