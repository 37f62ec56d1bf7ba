package main

import (
	"os"

	"github.com/sbxrun/sbxrun/internal/environ"
	"github.com/sbxrun/sbxrun/internal/state"
)

// What the commands for sandboxes that live on have in common.

// Private files of a sandbox, beside those of package state.
const (
	stdoutFile = "stdout.log" // byte for byte what the command has written
	stderrFile = "stderr.log"
)

func stateCaller() state.Caller {
	return state.Caller{StateDir: os.Getenv("SBXRUN_STATE_DIR"), RuntimeDir: os.Getenv("XDG_RUNTIME_DIR"), UID: os.Geteuid()}
}

func lookAtState() (*state.Dir, error) { return state.Look(stateCaller()) }

// find is the sandbox of this name or id.
func find(name string) (*state.Entry, error) {
	dir, err := state.Look(stateCaller())
	if err != nil {
		return nil, err
	}
	// Entries need it for as long as they are looked at: until we exit.
	return dir.Find(name)
}

// title is what people call a sandbox.
func title(e *state.Entry) string {
	if e.Record.Name != "" {
		return e.Record.Name
	}
	return e.ID
}

// pairs is NAME=VALUE for each.
func pairs(vars []environ.Var) []string {
	list := make([]string, 0, len(vars))
	for _, v := range vars {
		list = append(list, v.Name+"="+v.Value)
	}
	return list
}
