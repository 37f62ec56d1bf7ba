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
	commands := map[string]func(args []string) int{
		"run":     func(args []string) int { return runCommand(args, begin) },
		"start":   startCommand,
		"exec":    func(args []string) int { return execCommand(args, begin) },
		"wait":    with(waitCommand),
		"logs":    with(logsCommand),
		"cp":      with(cpCommand),
		"diff":    with(diffCommand),
		"apply":   with(applyCommand),
		"ps":      with(psCommand),
		"inspect": with(inspectCommand),
		"kill":    with(killCommand),
		"cleanup": with(cleanupCommand),
		"stats":   with(statsCommand),
		"doctor":  with(doctorCommand),
		"serve":   with(server[cli.Serve](args)),
		"gateway": with(server[cli.Gateway](args)),
		"nodes":   with(server[cli.Nodes](args)),
		"mcp":     with(server[cli.MCP](args)),
		"volume": group(&cli.Volume{}, map[string]func([]string) int{
			"ls":     with(onVolumes(listVolumes)),
			"rm":     with(onVolumes(removeVolumes)),
			"export": with(onVolumes(exportVolume)),
		}),
		"snapshot": group(&cli.Snapshot{}, map[string]func([]string) int{
			"create": with(server[cli.SnapshotCreate](args)),
			"ls":     with(server[cli.SnapshotLs](args)),
			"rm":     with(server[cli.SnapshotRm](args)),
			"export": with(server[cli.SnapshotExport](args)),
			"import": with(server[cli.SnapshotImport](args)),
		}),
		"image": group(&cli.Image{}, map[string]func([]string) int{
			"pull":    with(server[cli.ImagePull](args)),
			"import":  with(server[cli.ImageImport](args)),
			"ls":      with(server[cli.ImageLs](args)),
			"inspect": with(server[cli.ImageInspect](args)),
			"rm":      with(server[cli.ImageRm](args)),
			"export":  with(server[cli.ImageExport](args)),
			"commit":  with(server[cli.ImageCommit](args)),
		}),
		cli.CompleteWord: completeCommand,
		// Common names for flags.
		"version": func(args []string) int { return runCommand(append([]string{"--version"}, args...), begin) },
		"help":    helpCommand,
		"--help":  func([]string) int { return helpCommand(nil) },
		"-h":      func([]string) int { return helpCommand(nil) },
		"rm":      func([]string) int { return rmCommand(args, begin) },
		"ls":      func([]string) int { return lsCommand(args, begin) },
	}
	if len(args) > 0 && commands[args[0]] != nil {
		return commands[args[0]](args[1:])
	}
	return runCommand(args, begin)
}

// with returns a command that parses its flags.
func with[F any](command func(*F) (output.Result, error)) func([]string) int {
	return func(args []string) int { return cli.Execute(args, command) }
}

// group returns a command that runs one of several, or reports their names with kong's error.
func group(flags any, commands map[string]func([]string) int) func([]string) int {
	return func(args []string) int {
		if len(args) > 0 && commands[args[0]] != nil {
			return commands[args[0]](args[1:])
		}
		err := cli.Parse(flags, args)
		if _, ok := flags.(*cli.Snapshot); ok && len(args) > 0 && isSandbox(args[0]) {
			err = &result.Error{Code: "usage", Message: fmt.Sprintf("snapshot has no command %q, but that is a sandbox", args[0]),
				Hint: "use sbxrun snapshot create " + args[0]}
		}
		return cli.Finish(flags, output.Result{}, err)
	}
}

// completeCommand prints the completion of the last word for the completion functions of shells.
func completeCommand(words []string) int {
	return output.Finish(false, output.Line(nil, strings.Join(cli.Complete(words), "\n")), nil)
}

func helpCommand(names []string) int {
	return output.Finish(false, cli.Help(names...), nil)
}
