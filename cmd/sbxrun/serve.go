package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// server returns a command that executes the server with the whole command line args. The server is a program of
// its own, so that a run loads nothing of it, and must be the one next to this program: another could be anybody's.
func server[F any](args []string) func(*F) (output.Result, error) {
	return func(*F) (output.Result, error) {
		name, err := safeopen.Sibling()
		if err != nil {
			return output.Result{}, err
		}
		return output.Result{}, safeopen.SiblingError(name, unix.Exec(name, append([]string{name}, args...), os.Environ()))
	}
}
