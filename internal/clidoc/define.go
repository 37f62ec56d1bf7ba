package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

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
	"PATTERN":       anything,
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

// command is a command as the templates need it.
type command struct {
	*kong.Node
	ID        string // its path in one word: snapshot-ls
	Sandboxes string // the names that it takes: none, one, many, or paths, which may begin with SANDBOX:
	Ended     bool   // these may be sandboxes that have ended
	Execs     bool   // and execs in them
	Payload   bool   // a command line follows
}

// commands returns all commands; the commands of snapshot and volume have two words.
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

// word is a word at some place of the command line, with its help.
type word struct{ Name, Help string }

// first returns the possible first words: commands and groups of them. The others have no flags of their own.
func first() (all []word) {
	for _, n := range cli.Model().Model.Children {
		all = append(all, word{n.Name, n.Help})
	}
	return all
}

var others = []word{{"help", "Print the help of a command, or of all."}, {"version", "Print the version."}}

// groups returns the commands of commands: snapshot and volume.
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

// kindOf returns how the value of a flag is completed, and "" for a switch.
func kindOf(f *kong.Flag) (kind, error) {
	if f.IsBool() {
		return "", nil
	}
	if cli.Choices(f.Tag) != nil {
		return oneOf, nil
	}
	k, ok := kinds[f.PlaceHolder]
	if !ok {
		return "", fmt.Errorf("--%s, placeholder %q: add it to kinds", f.Name, f.PlaceHolder)
	}
	return k, nil
}

// proposals returns the values of a flag that is completed from a list.
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
