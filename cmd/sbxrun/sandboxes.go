package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
)

// What the commands for sandboxes that live on have in common.

// find is the sandbox of this name, or of this id or its beginning; or the exec in one, of a
// handle SANDBOX/EXEC.
func find(name string) (*state.Entry, error) {
	dir, err := state.Look(state.Mine())
	if err != nil {
		return nil, err
	}
	// Entries need it for as long as they are looked at: until we exit.
	return dir.Find(name)
}

// list returns all sandboxes of the caller, or the detached execs in one of them if in names it, and the directory of their
// records. It skips records that it cannot read, with a warning.
func list(in string) (entries []*state.Entry, where string, err error) {
	dir, err := state.Look(state.Mine())
	if err == nil && in != "" {
		var box *state.Entry
		if box, err = dir.Find(in); err == nil {
			dir, err = box.Execs()
		}
	}
	if err != nil {
		return nil, "", err
	}
	var warnings []error
	entries, warnings = dir.List() // which need it, as in find
	for _, w := range warnings {
		warn(w)
	}
	return entries, dir.Path(), nil
}

// tagged says whether a sandbox has all of the tags.
func tagged(e *state.Entry, tags map[string]string) bool {
	for key, value := range tags {
		if got, ok := e.Record.Tags[key]; !ok || got != value {
			return false
		}
	}
	return true
}

// parseTags parses KEY=VALUE; the last one of a key wins.
func parseTags(args []string) (map[string]string, error) {
	tags := map[string]string{}
	for _, arg := range args {
		key, value, found := strings.Cut(arg, "=")
		if !found || key == "" {
			return nil, fmt.Errorf("--tag %q: want KEY=VALUE", arg)
		}
		tags[key] = value
	}
	return tags, nil
}

// ended waits until a sandbox's supervisor is no more: then the record is final. With
// ctx done first it is os.ErrDeadlineExceeded, or the cause of ctx.
func ended(ctx context.Context, e *state.Entry) error {
	if !e.Alive {
		return nil
	}
	if e.Record.Supervisor.Apart() {
		return released(ctx, *e)
	}
	supervisor, err := e.Record.Supervisor.Open()
	if errors.Is(err, proc.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer supervisor.Close()
	return supervisor.WaitContext(ctx, time.Time{})
}

// closeAtEnd closes over when a sandbox has ended. If that cannot be told, nobody else would, and stop
// is called.
func closeAtEnd(ctx context.Context, e *state.Entry, over chan<- struct{}, stop context.CancelCauseFunc) {
	if err := ended(ctx, e); err != nil {
		stop(err)
		return
	}
	close(over)
}

// released waits until a supervisor gives up the lock on the record, which can be seen from other
// PID namespaces, where its pid means nothing.
func released(ctx context.Context, e state.Entry) error {
	return sandbox.Poll(ctx, lookInterval, func(context.Context) (bool, error) {
		err := e.Refresh()
		if errors.Is(err, unix.ENOENT) {
			return true, nil // its record was removed
		}
		return !e.Alive, err
	})
}
