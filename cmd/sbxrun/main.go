// Command sbxrun runs a command in a bubblewrap sandbox and leaves nothing
// behind. Each of its commands has a file of its own here; this package is the
// only one that prints and exits.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/detach"
	_ "github.com/sbxrun/sbxrun/internal/entry"
	"github.com/sbxrun/sbxrun/internal/stream"
)

func main() {
	begin := time.Now()
	growStack()
	args := os.Args[1:]
	if err := enoughDescriptors(); err != nil {
		os.Exit(fail(err))
	}
	if len(args) == 1 && args[0] == detach.Argument {
		os.Exit(background(begin))
	}
	os.Exit(dispatch(args, begin))
}

// growStack makes the stack as large as a run needs it, at once. It would be copied for each
// doubling on the way there, with more and more on it.
//
//go:noinline
func growStack() byte {
	var used [20 << 10]byte
	return used[len(os.Args)%len(used)]
}

// dispatch picks the command. Only the first word can name one, so that
// everything after a flag, and after --, belongs to the sandboxed command.
func dispatch(args []string, begin time.Time) int {
	if len(args) > 0 {
		switch args[0] {
		case "run":
			return runCommand(args[1:], begin)
		case "start":
			return startCommand(args[1:])
		case "exec":
			return execCommand(args[1:], begin)
		case "wait":
			return with(args[1:], waitCommand)
		case "logs":
			return with(args[1:], logsCommand)
		case "cp":
			return with(args[1:], cpCommand)
		case "diff":
			return with(args[1:], diffCommand)
		case "apply":
			return with(args[1:], applyCommand)
		case "ps":
			return with(args[1:], psCommand)
		case "inspect":
			return with(args[1:], inspectCommand)
		case "kill":
			return with(args[1:], killCommand)
		case "cleanup":
			return with(args[1:], cleanupCommand)
		case "volume":
			return volumeCommand(args)
		case "stats":
			return with(args[1:], statsCommand)
		case "snapshot":
			return snapshotCommand(args)
		case "serve":
			return serverCommand(args, args[1:], &cli.Serve{})
		case "gateway":
			return serverCommand(args, args[1:], &cli.Gateway{})
		case "nodes":
			return serverCommand(args, args[1:], &cli.Nodes{})
		case "mcp":
			return serverCommand(args, args[1:], &cli.MCP{})
		case "doctor":
			return with(args[1:], doctorCommand)
		// Common names for flags.
		case "version":
			return runCommand(append([]string{"--version"}, args[1:]...), begin)
		case "help":
			return helpCommand(args[1:])
		case "--help", "-h":
			return helpCommand(nil)
		case "rm":
			return rmCommand(args, begin)
		case "ls":
			return lsCommand(args, begin)
		}
	}
	return runCommand(args, begin)
}

// helpCommand prints the help of the command that names name, or of sbxrun.
func helpCommand(names []string) int {
	if len(names) > 0 && !cli.IsCommand(names...) {
		return failUsage(&cli.Run{}, fmt.Errorf("no command %q", strings.Join(names, " ")))
	}
	return printed(cli.Help(os.Stdout, names...))
}

func volumeCommand(args []string) int {
	if len(args) > 1 {
		switch args[1] {
		case "ls":
			return with(args[2:], onVolumes(listVolumes))
		case "rm":
			return with(args[2:], onVolumes(removeVolumes))
		case "export":
			return with(args[2:], onVolumes(exportVolume))
		}
	}
	return incomplete(args, &cli.Volume{})
}

func snapshotCommand(args []string) int {
	if len(args) > 1 {
		switch args[1] {
		case "create":
			return serverCommand(args, args[2:], &cli.SnapshotCreate{})
		case "ls":
			return serverCommand(args, args[2:], &cli.SnapshotLs{})
		case "rm":
			return serverCommand(args, args[2:], &cli.SnapshotRm{})
		case "export":
			return serverCommand(args, args[2:], &cli.SnapshotExport{})
		case "import":
			return serverCommand(args, args[2:], &cli.SnapshotImport{})
		}
	}
	return incomplete(args, &cli.Snapshot{})
}

// incomplete reports a group of commands without one of them. kong words the error.
func incomplete(args []string, group any) int {
	err := cli.Parse(group, args[1:])
	if err == nil {
		err = fmt.Errorf("%s needs a command", args[0])
	}
	if args[0] == "snapshot" && len(args) > 1 && isSandbox(args[1]) {
		err = &result.Error{Code: "usage", Message: fmt.Sprintf("snapshot has no command %q, and that is a sandbox", args[1]),
			Hint: "to create a snapshot of it write sbxrun snapshot create " + args[1]}
	}
	return failUsage(group, err)
}

// with runs a command with its flags, or reports the error in them.
func with[F any](args []string, command func(flags *F) int) int {
	flags := new(F)
	if err := cli.Parse(flags, args); err != nil {
		return failUsage(flags, err)
	}
	return command(flags)
}

// fail prints an error in one line, with the remedy if it is known, or tells it the
// caller of a detached command, and returns the exit code.
func fail(err error) int {
	e := asError(err)
	code := cmp.Or(e.ExitCode, result.ExitNotStarted)
	if caller != nil {
		caller.Fail(e, code)
	} else {
		say("sbxrun: error: " + inOneLine(e))
	}
	return code
}

// warn says on stderr what does not stop us.
func warn(err error) { say("sbxrun: warning: " + inOneLine(asError(err))) }

// stderrStalled is set when nobody has read our stderr for [stream.Stalled].
var stderrStalled atomic.Bool

// say writes a line to stderr. The payload may have filled that pipe, and if nobody reads
// it a write would keep us for ever: then the line is dropped, and all that follow.
func say(line string) {
	if stderrStalled.Load() {
		return
	}
	// A pipe that can be written to has room for so much (PIPE_BUF, pipe(7)). Not by a
	// goroutine: it could want a thread, and that there can be none may be what is said.
	const part = 4096
	for b := range slices.Chunk([]byte(line+"\n"), part) {
		if !stream.TakesOutput(os.Stderr, stream.Stalled) {
			stderrStalled.Store(true)
			return
		}
		_, _ = stream.WriteBlocking(os.Stderr, b) // nobody to tell it
	}
}

// inOneLine is an error with its remedy, if that is known, for a terminal.
func inOneLine(e *result.Error) string {
	line := e.Message
	if e.Hint != "" {
		line += "; " + e.Hint
	}
	return printable(line)
}

// asError is an error as a [result.Error], so that all have a code.
func asError(err error) *result.Error {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "failed", Message: err.Error(), Err: err}
	}
	return e
}

// refuse tells of an error, on stdout too if that is for JSON, and returns the exit code.
// flags is the struct of the command.
func refuse(flags any, err error) int {
	code := fail(err)
	if cli.WantsJSON(flags) && asError(err).Code != "output" { // which says that nothing can be printed there
		return cmp.Or(printed(printJSON(cli.Refusal{ExitCode: code, Error: asError(err).Report()})), code)
	}
	return code
}

// failUsage tells what is wrong with a command line, or prints the help that it asks for, and
// returns the exit code.
func failUsage(flags any, err error) int {
	if !errors.Is(err, cli.ErrHelp) {
		return refuse(flags, usageError(flags, err))
	}
	return printed(cli.Help(os.Stdout, strings.Fields(cli.Name(flags))...))
}

// usageError makes an error of the command line of err, and names the help of the command with these
// flags, unless err is an error with a hint of its own, or not about the command line.
func usageError(flags any, err error) error {
	if e := (*result.Error)(nil); errors.As(err, &e) && (e.Code != "usage" || e.Hint != "") {
		return e
	}
	return &result.Error{Code: "usage", Message: err.Error(), Hint: "see sbxrun " + strings.TrimPrefix(cli.Name(flags)+" --help", "run "), Err: err}
}

// printError is that something could not be written to stdout: a full disk, above all. It
// has an exit code of its own, because what was to be told has happened all the same. nil of nil.
func printError(err error) error {
	if err == nil {
		return nil
	}
	return &result.Error{Code: "output", ExitCode: result.ExitOutput, Message: "cannot print: " + err.Error(), Err: err}
}

// printed returns the exit code of what had nothing left to do but to print.
func printed(err error) int {
	if err != nil {
		return fail(printError(err))
	}
	return 0
}

// printJSON prints a value as one line of JSON.
func printJSON(v any) error { return writeJSON(os.Stdout, v) }

func writeJSON(w io.Writer, v any) error {
	b, err := result.JSON(v)
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

// printLine prints a line that is all there is to say, and returns the exit code.
func printLine(line string) int {
	_, err := fmt.Println(line)
	return printed(err)
}

// printable makes one line of a text, without what a terminal would obey: names
// of files may come from a payload.
func printable(text string) string {
	var b strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, "\\x%02x", r)
		}
	}
	return b.String()
}
