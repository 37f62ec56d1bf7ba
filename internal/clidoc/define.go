package main

import (
	"fmt"
	"regexp"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// commandLine is what the templates need of kong's model.
type commandLine struct {
	Help     string
	Default  string // the command that need not be named
	Commands []command
}

// command is one command. Words is what follows its name; of that the rest but
// the flags is derived.
type command struct {
	Name, Help, Words string
	Flags             []option

	Payload   bool   // the words end with a command line of its own
	Sandboxes string // how many names of sandboxes are among the words: none, one or many
	Ended     bool   // the names may be of sandboxes that have ended
}

// ended says of the commands that take names of sandboxes whether one that has
// ended is worth proposing. A command that is missing here is an error.
var ended = map[string]bool{"exec": false, "kill": false, "inspect": true, "wait": true, "logs": true}

// option is one flag. Values is what may follow it.
type option struct {
	Name, Short, Placeholder, Default, Help string
	Topic                                   string // key of its group
	Repeats                                 bool
	Values                                  values
}

// values says how the value of a flag is completed: by a kind, or from a list.
type values struct {
	Kind kind
	List []string
}

type kind string

const (
	noValue  kind = ""         // the flag is a switch
	anything kind = "anything" // there is nothing to propose
	oneOf    kind = "list"
	file     kind = "file"
	dir      kind = "directory"
	variable kind = "variable"
	signal   kind = "signal"
)

// signals are those that somebody would choose to end a sandbox with. The shells'
// own lists have dozens, with names that are spelt differently in each.
var signals = []string{"TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"}

// kinds maps the placeholders of the definition. One that is missing here is an
// error, so that a new flag is thought about.
var kinds = map[string]kind{
	"DIR":          dir,
	"DST[:SIZE]":   dir,
	"COMMAND":      anything,
	"DUR":          anything,
	"FILE":         file,
	"KEY=VALUE":    anything,
	"N":            anything,
	"NAME":         anything,
	"NAME[=VALUE]": variable,
	"PATH|fd:N":    file,
	"PERCENT":      anything,
	"PORT":         anything,
	"RE":           anything,
	"SIGNAL":       signal,
	"SIZE":         anything,
	"SRC[:DST]":    file,
	"UID[:GID]":    anything,
}

// define reads the command line's definition.
func define() (commandLine, error) {
	k, err := cli.New(&cli.CLI{})
	if err != nil {
		return commandLine{}, err
	}
	line := commandLine{Help: k.Model.Help, Default: k.Model.DefaultCmd.Name}
	for _, node := range k.Model.Children {
		c, err := newCommand(node.Name, node.Help, cli.Words(node))
		if err != nil {
			return line, fmt.Errorf("sbxrun %s: %w", node.Name, err)
		}
		for _, f := range node.Flags {
			o, err := newOption(f)
			if err != nil {
				return line, fmt.Errorf("sbxrun %s --%s: %w", c.Name, f.Name, err)
			}
			c.Flags = append(c.Flags, o)
		}
		line.Commands = append(line.Commands, c)
	}
	return line, nil
}

func newCommand(name, help, words string) (command, error) {
	c := command{Name: name, Help: help, Words: words, Sandboxes: "none"}
	for _, word := range regexp.MustCompile(`[A-Z]+(\.\.\.)?`).FindAllString(words, -1) {
		switch word {
		case "SANDBOX":
			c.Sandboxes = "one"
		case "SANDBOX...":
			c.Sandboxes = "many"
		case "COMMAND":
			c.Payload = true
		case "ARG...":
		default:
			return c, fmt.Errorf("%s among its words: what is it?", word)
		}
	}
	var known bool
	if c.Ended, known = ended[name]; known != (c.Sandboxes != "none") {
		return c, fmt.Errorf("words %q: which sandboxes are proposed? (see ended)", words)
	}
	return c, nil
}

func newOption(f *kong.Flag) (option, error) {
	o := option{Name: f.Name, Help: f.Help, Default: f.Default, Repeats: f.IsSlice()}
	if f.Short != 0 {
		o.Short = string(f.Short)
	}
	if f.Group != nil {
		o.Topic = f.Group.Key
	}
	if f.IsBool() {
		return o, nil
	}
	o.Placeholder = f.PlaceHolder
	if choices := cli.Choices(f); choices != nil {
		o.Values = values{Kind: oneOf, List: choices}
		return o, nil
	}
	known, ok := kinds[o.Placeholder]
	switch {
	case !ok:
		return o, fmt.Errorf("placeholder %q: how is it completed? (see kinds)", o.Placeholder)
	case known == signal:
		o.Values = values{Kind: oneOf, List: signals}
	default:
		o.Values = values{Kind: known}
	}
	return o, nil
}

// command finds a command by its name.
func (l commandLine) command(name string) (command, error) {
	for _, c := range l.Commands {
		if c.Name == name {
			return c, nil
		}
	}
	return command{}, fmt.Errorf("no command %q", name)
}

// TakesValue says whether the flag is followed by a value.
func (o option) TakesValue() bool { return o.Values.Kind != noValue }

// Words are the spellings of the flag: --quiet, -q.
func (o option) Words() []string {
	if o.Short == "" {
		return []string{"--" + o.Name}
	}
	return []string{"--" + o.Name, "-" + o.Short}
}
