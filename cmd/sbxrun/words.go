package main

import (
	"fmt"
	"os"
	"os/exec"
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

// rmCommand runs rm(1), unless all arguments are sandboxes, as for docker rm. rm(1) would report missing files, or
// nothing with -f.
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
	return output.Fail(&result.Error{Code: "usage", Message: fmt.Sprintf("rm removes files, but %q is a sandbox", name),
		Hint: fmt.Sprintf("use sbxrun kill %s to end it, sbxrun cleanup %[1]s to remove its record, or sbxrun -- rm %[1]s for a file of that name", name)})
}

// isSandbox reports whether a word is the name or the whole ID of a sandbox.
func isSandbox(word string) bool {
	e, err := find(word)
	return err == nil && (e.Record.Name == word || e.ID == word)
}

// lsCommand runs ls(1). If ls is the whole command line and sandboxes are running, it adds a hint.
func lsCommand(args []string, begin time.Time) int {
	code := runCommand(args, begin)
	if len(args) > 1 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return code
	}
	dir, err := state.Look(state.Mine())
	if err != nil {
		return code
	}
	entries, _ := dir.List() // sbxrun ps reports unreadable records
	if slices.ContainsFunc(entries, func(e *state.Entry) bool { return e.Alive }) {
		output.Hint("ls lists files", "use sbxrun ps to list sandboxes")
	}
	return code
}

// meant returns a hint for a command that was not found: an argument of timeout(1) or docker, a file outside PATH, a
// shell builtin, or a misspelled command of sbxrun. It returns "" for other words and for programs of the host.
func meant(word string, tty bool) string {
	hint, similar := cli.Instead(word)
	if hint != "" {
		return hint
	}
	if strings.ContainsAny(word, " \t\n") {
		return "use sh -c before a command line in one word"
	}
	if name, _, found := strings.Cut(word, "="); found && !strings.Contains(name, "/") {
		return "use --env " + name + "=VALUE before the command to set a variable"
	}
	if path.IsAbs(word) && strings.Contains(word, ":") {
		return "use --ro-bind SRC:DST to mount a directory, or --bind SRC:DST to mount it writable"
	}
	if _, dst, found := strings.Cut(word, ":"); found && path.IsAbs(dst) && !strings.HasPrefix(dst, "//") { // that is a URL
		return "use --volume NAME:DST to mount a volume, or --bind SRC:DST for a directory"
	}
	if new(values.Duration).UnmarshalText([]byte(word)) == nil {
		hint := "use --timeout " + word + " for a deadline"
		if tty {
			hint = "-t is --tty; " + hint
		}
		return hint
	}
	if st, err := os.Stat(word); err == nil && !strings.Contains(word, "/") && st.Mode().IsRegular() {
		return "use ./" + word + " for a file in the current directory"
	}
	if _, err := exec.LookPath(word); err == nil {
		return "" // an image lacks it
	}
	return similar
}
