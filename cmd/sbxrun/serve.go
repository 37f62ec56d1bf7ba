package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// serverCommand executes the server with the whole command line, if that is right. The server is a separate program to
// keep runs fast. Only the one next to this program is trusted.
func serverCommand(args []string) int {
	flags, rest := cli.Flags(args)
	err := cli.Parse(flags, rest)
	if err != nil && args[0] == "snapshot" && len(args) > 1 && isSandbox(args[1]) {
		err = &result.Error{Code: "usage", Message: fmt.Sprintf("snapshot has no command %q, but that is a sandbox", args[1]),
			Hint: "use sbxrun snapshot create " + args[1]}
	}
	if err == nil {
		var name string
		if name, err = safeopen.Sibling(); err == nil {
			err = safeopen.SiblingError(name, unix.Exec(name, append([]string{name}, args...), os.Environ()))
		}
	}
	return cli.Finish(flags, output.Result{}, err)
}
