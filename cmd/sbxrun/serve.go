package main

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
)

// serverCommand becomes the server, which is a program of its own so that a run loads nothing
// of it. It is the one beside this program: another could be anybody's.
func serverCommand(args []string, flags any) int {
	if _, err := cli.Parse(flags, args[1:]); err != nil {
		return failUsage(flags, err)
	}
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fail(err)
	}
	server := filepath.Join(filepath.Dir(self), "sbxrund")
	err = unix.Exec(server, append([]string{server}, args...), os.Environ())
	return fail(&result.Error{
		Code: "setup", Message: "cannot execute the server " + server + ": " + err.Error(),
		Hint: "install sbxrund in the directory that sbxrun is in", Err: err,
	})
}
