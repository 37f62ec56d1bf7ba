// Command sbxrun runs a command in a bubblewrap sandbox and leaves nothing
// behind. Each of its commands has a file here: it parses its flags, does its work, and
// returns what package output prints.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/detach"
	_ "github.com/sbxrun/sbxrun/internal/entry"
	"github.com/sbxrun/sbxrun/internal/output"
)

func main() {
	begin := time.Now()
	growStack()
	args := os.Args[1:]
	if err := enoughDescriptors(); err != nil {
		os.Exit(output.Fail(err))
	}
	if len(args) == 1 && args[0] == detach.Argument {
		os.Exit(background(begin))
	}
	os.Exit(dispatch(args, begin))
}

// growStack grows the stack once to the size that a run needs. Otherwise the runtime would copy it at each
// doubling.
//
//go:noinline
func growStack() byte {
	var used [20 << 10]byte
	return used[len(os.Args)%len(used)]
}

// dispatch selects the command. Only the first word can name one, so that
// everything after a flag, and after --, belongs to the sandboxed command.
func dispatch(args []string, begin time.Time) int {
	if len(args) == 0 {
		return runCommand(nil, begin)
	}
	rest := args[1:]
	switch args[0] {
	case "run":
		return runCommand(rest, begin)
	case "start":
		return startCommand(rest)
	case "exec":
		return execCommand(rest, begin)
	case "wait":
		return cli.Execute(rest, waitCommand)
	case "logs":
		return cli.Execute(rest, logsCommand)
	case "cp":
		return cli.Execute(rest, cpCommand)
	case "diff":
		return cli.Execute(rest, diffCommand)
	case "apply":
		return cli.Execute(rest, applyCommand)
	case "ps":
		return cli.Execute(rest, psCommand)
	case "inspect":
		return cli.Execute(rest, inspectCommand)
	case "kill":
		return cli.Execute(rest, killCommand)
	case "cleanup":
		return cli.Execute(rest, cleanupCommand)
	case "volume":
		return volumeCommand(args)
	case "stats":
		return cli.Execute(rest, statsCommand)
	case "snapshot":
		return snapshotCommand(args)
	case "serve":
		return cli.Execute(rest, server[cli.Serve](args))
	case "gateway":
		return cli.Execute(rest, server[cli.Gateway](args))
	case "nodes":
		return cli.Execute(rest, server[cli.Nodes](args))
	case "mcp":
		return cli.Execute(rest, server[cli.MCP](args))
	case "doctor":
		return cli.Execute(rest, doctorCommand)
	// Common names for flags.
	case "version":
		return runCommand(append([]string{"--version"}, rest...), begin)
	case "help":
		return helpCommand(rest)
	case "--help", "-h":
		return helpCommand(nil)
	case "rm":
		return rmCommand(args, begin)
	case "ls":
		return lsCommand(args, begin)
	}
	return runCommand(args, begin)
}

// helpCommand prints the help of the command that names name, or of sbxrun.
func helpCommand(names []string) int {
	if len(names) > 0 && !cli.IsCommand(names...) {
		return cli.Finish(&cli.Run{}, output.Result{}, cli.UsageError(&cli.Run{}, fmt.Errorf("no command %q", strings.Join(names, " "))))
	}
	return output.Finish(false, cli.HelpOf(strings.Join(names, " ")), nil)
}

func volumeCommand(args []string) int {
	if len(args) > 1 {
		switch args[1] {
		case "ls":
			return cli.Execute(args[2:], onVolumes(listVolumes))
		case "rm":
			return cli.Execute(args[2:], onVolumes(removeVolumes))
		case "export":
			return cli.Execute(args[2:], onVolumes(exportVolume))
		}
	}
	return incomplete(args, &cli.Volume{})
}

func snapshotCommand(args []string) int {
	if len(args) > 1 {
		switch args[1] {
		case "create":
			return cli.Execute(args[2:], server[cli.SnapshotCreate](args))
		case "ls":
			return cli.Execute(args[2:], server[cli.SnapshotLs](args))
		case "rm":
			return cli.Execute(args[2:], server[cli.SnapshotRm](args))
		case "export":
			return cli.Execute(args[2:], server[cli.SnapshotExport](args))
		case "import":
			return cli.Execute(args[2:], server[cli.SnapshotImport](args))
		}
	}
	return incomplete(args, &cli.Snapshot{})
}

// incomplete reports a group of commands without one of them. kong words the error.
func incomplete(args []string, group any) int {
	err := cli.Parse(group, args[1:])
	if err == nil {
		err = cli.UsageError(group, fmt.Errorf("%s needs a command", args[0]))
	}
	if args[0] == "snapshot" && len(args) > 1 && isSandbox(args[1]) {
		err = &result.Error{Code: "usage", Message: fmt.Sprintf("snapshot has no command %q, but that is a sandbox", args[1]),
			Hint: "use sbxrun snapshot create " + args[1]}
	}
	return cli.Finish(group, output.Result{}, err)
}
