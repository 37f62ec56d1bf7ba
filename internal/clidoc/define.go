package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// commandLine is what the templates need of kong's model.
type commandLine struct {
	Help     string
	Commands []command
}

type command struct {
	Name, Help string
	Flags      []option
}

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
)

// kinds maps the placeholders of the definition. One that is missing here is an
// error, so that a new flag is thought about.
var kinds = map[string]kind{
	"DIR":          dir,
	"DST[:SIZE]":   dir,
	"DUR":          anything,
	"FILE":         file,
	"NAME":         anything,
	"NAME[=VALUE]": variable,
	"PATH|fd:N":    file,
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
	line := commandLine{Help: k.Model.Help}
	for _, node := range k.Model.Children {
		c := command{Name: node.Name, Help: node.Help}
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
	if words := strings.Split(o.Placeholder, "|"); len(words) > 1 && o.Placeholder == strings.ToLower(o.Placeholder) {
		o.Values = values{Kind: oneOf, List: words}
		return o, nil
	}
	known, ok := kinds[o.Placeholder]
	if !ok {
		return o, fmt.Errorf("placeholder %q: how is it completed? (see kinds)", o.Placeholder)
	}
	o.Values = values{Kind: known}
	return o, nil
}

// command finds a command by its name; the templates name run and doctor.
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
