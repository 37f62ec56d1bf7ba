package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// serverCommand executes the server, which is a separate program to keep runs fast, with the whole command line. Only the
// one next to this program is trusted.
func serverCommand(args []string) int {
	name, err := safeopen.Sibling()
	if err == nil {
		err = safeopen.SiblingError(name, unix.Exec(name, append([]string{name}, args...), os.Environ()))
	}
	return output.Finish(false, output.Result{}, err)
}
