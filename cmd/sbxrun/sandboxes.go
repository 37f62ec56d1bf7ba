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

// find returns the sandbox with this name, ID or beginning of an ID, or the exec with this handle, SANDBOX/EXEC.
func find(name string) (*state.Entry, error) {
	dir, err := state.Look(state.Mine())
	if err != nil {
		return nil, err
	}
	// Entries need dir until sbxrun exits.
	return dir.Find(name)
}

// list returns all sandboxes of the caller, or the detached execs in the sandbox named in, and the directory of their
// records. It skips unreadable records with a warning.
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
	entries, warnings = dir.List()
	for _, w := range warnings {
		warn(w)
	}
	return entries, dir.Path(), nil
}

func tagged(e *state.Entry, tags map[string]string) bool {
	for key, value := range tags {
		if got, ok := e.Record.Tags[key]; !ok || got != value {
			return false
		}
	}
	return true
}

// parseTags parses KEY=VALUE. The last value of a key wins.
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

// ended waits until a sandbox's supervisor has exited, which makes the record final. If ctx is done first, it returns
// os.ErrDeadlineExceeded or the cause of ctx.
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

// closeAtEnd closes over when a sandbox has ended, or calls stop if it cannot find out.
func closeAtEnd(ctx context.Context, e *state.Entry, over chan<- struct{}, stop context.CancelCauseFunc) {
	if err := ended(ctx, e); err != nil {
		stop(err)
		return
	}
	close(over)
}

// released waits until a supervisor in another PID namespace releases the lock on its record.
func released(ctx context.Context, e state.Entry) error {
	return sandbox.Poll(ctx, lookInterval, func(context.Context) (bool, error) {
		err := e.Refresh()
		if errors.Is(err, unix.ENOENT) {
			return true, nil // the record was removed
		}
		return !e.Alive, err
	})
}
