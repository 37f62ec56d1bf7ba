package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/beside"
	"github.com/sbxrun/sbxrun/internal/cli"
)

// serverCommand becomes the server, which is a program of its own so that a run loads nothing
// of it. It is the one beside this program: another could be anybody's.
func serverCommand(args []string, flags any) int {
	if _, err := cli.Parse(flags, args[1:]); err != nil {
		return failUsage(flags, err)
	}
	server, err := beside.Server()
	if err != nil {
		return refuse(flags, err)
	}
	return refuse(flags, beside.Unusable(server, unix.Exec(server, append([]string{server}, args...), os.Environ())))
}
