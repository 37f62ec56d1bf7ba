package main

import (
	"fmt"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// kind says how the value of a flag is completed.
type kind string

const (
	anything kind = "anything" // there is nothing to propose
	oneOf    kind = "list"
	file     kind = "file"
	dir      kind = "directory"
	variable kind = "variable"
)

// kinds maps the placeholders of the definition. One that is missing here is an
// error, so that a new flag is thought about.
var kinds = map[string]kind{
	"DIR":           dir,
	"DST[:SIZE]":    dir,
	"ADDRESS":       anything,
	"COMMAND":       anything,
	"DUR":           anything,
	"GLOB[:DIR]":    anything,
	"FILE":          file,
	"KEY=VALUE":     anything,
	"N":             anything,
	"NAME":          anything,
	"NAME:DST[:ro]": anything,
	"NAME[=VALUE]":  variable,
	"PATH|fd:N":     file,
	"PATH|none":     file,
	"PERCENT":       anything,
	"PORT":          anything,
	"RE":            anything,
	"SIGNAL":        oneOf,
	"SNAPSHOT":      anything,
	"SIZE":          anything,
	"SRC[:DST]":     file,
	"[SRC:]DST":     file,
	"UID[:GID]":     anything,
	"URL":           anything,

	"[ADDR:]HOSTPORT:PORT": anything,
	"unix:PATH=PORT":       anything,
}

// signals are those that somebody would choose to end a sandbox with. The shells'
// own lists have dozens, with names that are spelt differently in each.
var signals = []string{"TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"}

// others are the first words that are another way to write a flag.
var others = []struct{ Name, Help string }{
	{"help", "Print the help of a command, or of all."},
	{"version", "Print the version."},
}

// kindOf says how the value of a flag is completed; "" of a switch.
func kindOf(f cli.Flag) (kind, error) {
	if !f.TakesValue() {
		return "", nil
	}
	if f.Choices() != nil {
		return oneOf, nil
	}
	k, ok := kinds[f.Placeholder()]
	if !ok {
		return "", fmt.Errorf("--%s, placeholder %q: how is it completed? (see kinds)", f.Name, f.Placeholder())
	}
	return k, nil
}

// proposals are the values of a flag that is completed from a list.
func proposals(f cli.Flag) []string {
	if choices := f.Choices(); choices != nil {
		return choices
	}
	return signals
}

// command finds a command by its name.
func command(name string) (cli.Command, error) {
	for _, c := range cli.Commands() {
		if c.Name == name {
			return c, nil
		}
	}
	return cli.Command{}, fmt.Errorf("no command %q", name)
}
