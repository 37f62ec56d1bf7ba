package main

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/values"
)

// What timeout(1) and docker call by other names. A program of such a name runs all the same.

// rmCommand runs rm(1), unless all that is to be removed are sandboxes, as for docker's rm. rm(1)
// would say that there is no such file, and with -f nothing at all.
func rmCommand(args []string, begin time.Time) int {
	var name string
	for _, arg := range args[1:] {
		if strings.HasPrefix(arg, "-") {
			continue
		}
		if _, err := os.Lstat(arg); err == nil || !isSandbox(arg) {
			return runCommand(args, begin)
		}
		name = arg
	}
	if name == "" {
		return runCommand(args, begin)
	}
	return output.Fail(&result.Error{Code: "usage", Message: fmt.Sprintf("rm removes files, and %q is a sandbox", name),
		Hint: fmt.Sprintf("to end it write sbxrun kill %s, to remove the record of one that has ended sbxrun cleanup %[1]s; for a file of that name sbxrun -- rm %[1]s", name)})
}

// isSandbox reports whether a word is the name or the id of a sandbox. A word that only begins
// an id may be a file's name.
func isSandbox(word string) bool {
	e, err := find(word)
	return err == nil && (e.Record.Name == word || e.ID == word)
}

// lsCommand runs ls(1). If there are sandboxes, a person who types nothing more may mean those.
func lsCommand(args []string, begin time.Time) int {
	code := runCommand(args, begin)
	if len(args) > 1 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return code
	}
	dir, err := state.Look(state.Mine())
	if err != nil {
		return code
	}
	entries, _ := dir.List() // what cannot be read is sbxrun ps's to say
	if slices.ContainsFunc(entries, func(e *state.Entry) bool { return e.Alive }) {
		output.Hint("ls lists files", "sbxrun ps lists sandboxes")
	}
	return code
}

// builtins are commands of shells that are no programs.
var builtins = []string{"alias", "cd", "eval", "exit", "export", "set", "source", "ulimit", "umask", "unset"}

// meant returns what to write where the command that was not found is none: a word that
// timeout(1) or docker take there, a file that is not in PATH, what only a shell knows, or a
// misspelt command of sbxrun's;
// "" if it is nothing of that.
func meant(word string, tty bool) string {
	switch word {
	case "stop":
		return "to end a sandbox write sbxrun kill"
	case "list", "status":
		return "to list sandboxes write sbxrun ps"
	case "prune":
		return "to remove what has ended write sbxrun cleanup"
	case "create":
		return "to start a sandbox that lives on write sbxrun start"
	case "attach", "shell":
		return "for a shell in a sandbox write sbxrun exec -t NAME sh"
	case "completion":
		return "completions are files, which the packages install, and ./setup.sh completions writes"
	case "cd":
		return "to start in another directory write --workdir DIR, or change to it first"
	}
	if cli.IsCommand(word) {
		return "a command of sbxrun's own is its first word: sbxrun " + word
	}
	if slices.Contains(builtins, word) {
		return "it is built into shells: write sh -c 'COMMAND' for a command line"
	}
	if strings.ContainsAny(word, " \t\n") {
		return "a command line in one word is for a shell: write sh -c before it"
	}
	if name, _, found := strings.Cut(word, "="); found && !strings.Contains(name, "/") {
		return "to set a variable write --env " + name + "=VALUE before the command"
	}
	if path.IsAbs(word) && strings.Contains(word, ":") {
		return "to show a directory write --ro-bind SRC:DST, or --bind SRC:DST to let it write"
	}
	if _, dst, found := strings.Cut(word, ":"); found && path.IsAbs(dst) && !strings.HasPrefix(dst, "//") { // that is a URL
		return "to show a volume write --volume NAME:DST, a directory --bind SRC:DST"
	}
	if new(values.Duration).UnmarshalText([]byte(word)) == nil {
		hint := "for a deadline write --timeout " + word
		if tty {
			hint = "-t is --tty; " + hint
		}
		return hint
	}
	if st, err := os.Stat(word); err == nil && !strings.Contains(word, "/") && st.Mode().IsRegular() {
		return "a file of the current directory is named by a path: ./" + word
	}
	return cli.Similar(word)
}
