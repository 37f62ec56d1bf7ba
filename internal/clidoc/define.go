package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// first returns the commands and groups of commands, which are the possible first words.
func first() []*kong.Node { return cli.Model().Model.Children }

// groupOf returns the title of a flag's topic.
func groupOf(f *kong.Flag) string {
	if f.Group == nil {
		return "flag"
	}
	return f.Group.Title
}

// find returns the command with this path, or all commands of a group.
func find(path string) (found []*kong.Node, err error) {
	for _, c := range cli.Commands() {
		if c.Path() == path || strings.HasPrefix(c.Path(), path+" ") {
			found = append(found, c)
		}
	}
	if found == nil {
		err = fmt.Errorf("no command %q", path)
	}
	return found, err
}
