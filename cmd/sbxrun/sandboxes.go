package main

import (
	"os"
	"strings"

	"github.com/sbxrun/sbxrun/internal/environ"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/state"
)

// What the commands for sandboxes that live on have in common.

// Private files of a sandbox, beside those of package state.
const (
	envFile    = "env"        // the command's variables, each ended by a NUL: exec's are the same
	stdoutFile = "stdout.log" // byte for byte what the command has written
	stderrFile = "stderr.log"
)

func stateCaller() state.Caller {
	return state.Caller{StateDir: os.Getenv("SBXRUN_STATE_DIR"), RuntimeDir: os.Getenv("XDG_RUNTIME_DIR"), UID: os.Geteuid()}
}

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

// initOf takes hold of a living sandbox's init, which may have ended since.
func initOf(e *state.Entry) (*proc.Process, error) {
	switch {
	case !e.Alive || e.Record.Phase == state.Ended:
		return nil, &result.Error{Code: "ended", Message: "the sandbox " + title(e) + " has ended: " + e.Status()}
	case e.Record.Init == nil:
		return nil, &result.Error{Code: "starting", Message: "the sandbox " + title(e) + " is still being set up"}
	}
	init, err := e.Record.Init.Open()
	if err == proc.ErrGone {
		return nil, &result.Error{Code: "ended", Message: "the sandbox " + title(e) + " has just ended"}
	}
	return init, err
}

// credOf is who the sandbox runs as; nil if as its owner.
func credOf(r *state.Record) *proc.Cred {
	if r.UID == nil || r.GID == nil {
		return nil
	}
	return &proc.Cred{UID: *r.UID, GID: *r.GID}
}

// variables reads a sandbox's variables.
func variables(e *state.Entry) (set environ.Set, err error) {
	data, err := e.ReadFile(envFile)
	for pair := range strings.SplitSeq(string(data), "\x00") {
		if name, value, ok := strings.Cut(pair, "="); ok {
			set.Put(environ.Var{Name: name, Value: value})
		}
	}
	return set, err
}

// pairs is NAME=VALUE for each.
func pairs(vars []environ.Var) []string {
	list := make([]string, 0, len(vars))
	for _, v := range vars {
		list = append(list, v.Name+"="+v.Value)
	}
	return list
}
