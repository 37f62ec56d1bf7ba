package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// kind is the way to complete the value of a flag.
type kind string

const (
	anything kind = "anything" // no proposals
	oneOf    kind = "list"
	file     kind = "file"
	dir      kind = "directory"
	variable kind = "variable"
)

// signals are the proposed signals. The shells' own lists have dozens of them and spell them differently.
var signals = []string{"TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"}

// command is a command for the templates.
type command struct {
	*kong.Node
	ID        string // path in one word: snapshot-ls
	Sandboxes string // number of sandboxes: none, one, many, or paths, which may begin with SANDBOX:
	Ended     bool   // includes sandboxes that have ended
	Execs     bool   // includes execs in sandboxes
	Payload   bool   // a command line follows
}

// commands returns all commands, including the two-word ones of snapshot and volume.
func commands() (all []command) {
	for _, n := range cli.Commands() {
		c := command{Node: n, ID: strings.ReplaceAll(n.Path(), " ", "-"), Sandboxes: "none"}
		for _, p := range n.Positional {
			what := p.Tag.Get("complete")
			c.Payload = p.Passthrough
			c.Ended = c.Ended || strings.HasPrefix(what, "all")
			c.Execs = c.Execs || strings.HasSuffix(what, "execs")
			switch {
			case what == "paths":
				c.Sandboxes = what
			case what != "" && p.IsCumulative():
				c.Sandboxes = "many"
			case what != "":
				c.Sandboxes = "one"
			}
		}
		all = append(all, c)
	}
	return all
}

// word is a word of the command line with its help.
type word struct{ Name, Help string }

// first returns the possible first words, which are commands and groups of commands. others are aliases of flags.
func first() (all []word) {
	for _, n := range cli.Model().Model.Children {
		all = append(all, word{n.Name, n.Help})
	}
	return all
}

var others = []word{{"help", "Print the help of a command, or of all."}, {"version", "Print the version."}}

// groups returns the groups of commands: snapshot and volume.
func groups() (all []*kong.Node) {
	for _, n := range cli.Model().Model.Children {
		if len(n.Children) > 0 {
			all = append(all, n)
		}
	}
	return all
}

// groupOf returns the title of a flag's topic.
func groupOf(f *kong.Flag) string {
	if f.Group == nil {
		return "flag"
	}
	return f.Group.Title
}

// kindOf returns the kind of a flag's value, or "" for a switch.
func kindOf(f *kong.Flag) kind {
	begins := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.HasPrefix(f.PlaceHolder, w) })
	}
	switch {
	case f.IsBool():
		return ""
	case begins("SIGNAL") || cli.Choices(f.Tag) != nil:
		return oneOf
	case begins("DIR", "DST"):
		return dir
	case begins("FILE", "PATH", "SRC", "[SRC"):
		return file
	case begins("NAME[="):
		return variable
	}
	return anything
}

// proposals returns the list of values of a flag.
func proposals(f *kong.Flag) []string {
	if choices := cli.Choices(f.Tag); choices != nil {
		return slices.DeleteFunc(choices, func(c string) bool { return strings.HasSuffix(c, "=") })
	}
	return signals
}

// find returns the command with this path, or all commands of a group.
func find(path string) (found []command, err error) {
	for _, c := range commands() {
		if c.Path() == path || strings.HasPrefix(c.Path(), path+" ") {
			found = append(found, c)
		}
	}
	if found == nil {
		err = fmt.Errorf("no command %q", path)
	}
	return found, err
}
