package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/state"
)

func psCommand(flags *cli.Ps) (r output.Result, err error) {
	tags, err := parseTags(flags.Tag)
	if err == nil && flags.Sandbox != "" && len(tags) > 0 {
		err = errors.New("--tag: execs have no tags")
	}
	if err != nil {
		return r, cli.UsageError(flags, err)
	}
	entries, _, err := list(flags.Sandbox)
	if err != nil {
		return r, err
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
	all := make([]described, 0, len(entries))
	for _, e := range entries {
		all = append(all, describe(e))
	}
	return output.Result{Value: all, Text: func(w io.Writer) error {
		switch {
		case flags.Names:
			return printWords(w, entries, (*state.Entry).Title)
		case flags.Quiet:
			return printWords(w, entries, (*state.Entry).Handle)
		}
		return printTable(w, entries, flags.Sandbox != "", time.Now())
	}}, nil
}

// described is a sandbox in the JSON of ps and inspect.
type described struct {
	state.Record
	Status   string `json:"status"`
	Alive    bool   `json:"alive"`
	ExitCode *int   `json:"exit_code,omitempty"` // set if the sandbox has ended
}

func describe(e *state.Entry) described {
	d := described{Record: e.Record, Status: e.Status(), Alive: e.Alive}
	if e.Record.Report != nil {
		d.ExitCode = &e.Record.Report.ExitCode
	}
	return d
}

func printWords(w io.Writer, entries []*state.Entry, word func(*state.Entry) string) error {
	for _, e := range entries {
		fmt.Fprintln(w, word(e))
	}
	return nil
}

// printTable prints sandboxes with their IDs and names, or execs with their handles.
func printTable(w io.Writer, entries []*state.Entry, execs bool, now time.Time) error {
	header := []any{"ID", "NAME"}
	if execs {
		header = []any{"EXEC"}
	}
	t := output.NewTable(w, append(header, "STATUS", "AGE", "COMMAND")...)
	for _, e := range entries {
		status := e.Status()
		if r := e.Record.Ready; r != nil && r.ReadyAt != "" && status == string(state.Running) {
			status = "ready"
		}
		if r := e.Record.Report; r != nil && r.ExitCode != 0 {
			status = fmt.Sprintf("%s (%d)", status, r.ExitCode)
		}
		which := []any{e.ID, cmp.Or(e.Record.Name, "-")}
		if execs {
			which = []any{e.Title()}
		}
		t.Row(append(which, status, age(e.Record.CreatedAt, now), commandLine(e.Record.Argv))...)
	}
	return t.Flush()
}

func age(created string, now time.Time) string {
	at, err := time.Parse(result.TimeFormat, created)
	if err != nil {
		return "?"
	}
	return output.Age(now.Sub(at))
}

func commandLine(argv []string) string {
	const most = 60
	if len(argv) == 0 {
		return "(idle)"
	}
	line := []rune(output.Printable(strings.Join(argv, " ")))
	if len(line) > most {
		return string(line[:most-1]) + "…"
	}
	return string(line)
}
