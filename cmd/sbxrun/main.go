// Command sbxrun runs a command in a bubblewrap sandbox and leaves nothing
// behind. Each of its commands has a file here: it parses its flags, does its work, and
// returns what package output prints.
package main

import (
	"os"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	_ "github.com/sbxrun/sbxrun/internal/entry"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/sandbox"
)

func main() {
	begin := time.Now()
	proc.SpareThreads() // sbxrun mostly waits, and threads for more processors take a twentieth of a run
	growStack()
	args := os.Args[1:]
	if err := enoughDescriptors(); err != nil {
		os.Exit(output.Fail(err))
	}
	if len(args) == 1 && args[0] == sandbox.BackgroundArgument {
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
	served := func([]string) int { return serverCommand(args) }
	commands := map[string]func(args []string) int{
		"run":           func(args []string) int { return runCommand(args, begin) },
		"start":         startCommand,
		"exec":          func(args []string) int { return execCommand(args, begin) },
		"wait":          cli.Command(waitCommand),
		"logs":          cli.Command(logsCommand),
		"cp":            cli.Command(cpCommand),
		"diff":          cli.Command(diffCommand),
		"apply":         cli.Command(applyCommand),
		"ps":            cli.Command(psCommand),
		"inspect":       cli.Command(inspectCommand),
		"kill":          cli.Command(killCommand),
		"volume ls":     cli.Command(onVolumes(listVolumes)),
		"volume rm":     cli.Command(onVolumes(removeVolumes)),
		"volume export": cli.Command(onVolumes(exportVolume)),
		"volume":        func([]string) int { return cli.Group(args) },
		"cleanup":       cli.Command(cleanupCommand),
		"stats":         cli.Command(statsCommand),
		"doctor":        cli.Command(doctorCommand),
		"serve":         served,
		"gateway":       served,
		"nodes":         served,
		"mcp":           served,
		"snapshot":      served,
		"image":         served,

		"__complete": completeCommand,
		// Common names for flags.
		"version": func(args []string) int { return runCommand(append([]string{"--version"}, args...), begin) },
		"help":    helpCommand,
		"--help":  func([]string) int { return helpCommand(nil) },
		"-h":      func([]string) int { return helpCommand(nil) },
		"rm":      func([]string) int { return rmCommand(args, begin) },
		"ls":      func([]string) int { return lsCommand(args, begin) },
	}
	for n := min(2, len(args)); n > 0; n-- {
		if command := commands[strings.Join(args[:n], " ")]; command != nil {
			return command(args[n:])
		}
	}
	return runCommand(args, begin)
}

// completeCommand prints the completion of the last word for the completion functions of shells.
func completeCommand(words []string) int {
	return output.Finish(false, output.Line(nil, strings.Join(cli.Complete(words), "\n")), nil)
}

func helpCommand(names []string) int {
	return output.Finish(false, cli.Help(strings.Join(names, " ")), nil)
}
