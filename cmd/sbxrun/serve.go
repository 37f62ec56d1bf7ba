package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// server returns a command that executes the server with the whole command line args. The server is a separate
// program to keep runs fast. Only the one next to this program is trusted.
func server[F any](args []string) func(*F) (output.Result, error) {
	return func(*F) (output.Result, error) {
		name, err := safeopen.Sibling()
		if err != nil {
			return output.Result{}, err
		}
		return output.Result{}, safeopen.SiblingError(name, unix.Exec(name, append([]string{name}, args...), os.Environ()))
	}
}
