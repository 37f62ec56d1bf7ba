package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// serverCommand becomes the server, which is a program of its own so that a run loads nothing
// of it. It is the one beside this program: another could be anybody's.
// args is the whole command line, rest the part after the command's name.
func serverCommand(args, rest []string, flags any) int {
	if err := cli.Parse(flags, rest); err != nil {
		return failUsage(flags, err)
	}
	server, err := safeopen.Sibling()
	if err != nil {
		return refuse(flags, err)
	}
	return refuse(flags, safeopen.SiblingError(server, unix.Exec(server, append([]string{server}, args...), os.Environ())))
}
