package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
)

func waitCommand(flags *cli.Wait) (r output.Result, err error) {
	w := waiter{name: flags.Sandbox}
	if flags.Log != "" {
		if w.log, err = regexp.Compile(flags.Log); err != nil {
			return r, cli.UsageError(flags, fmt.Errorf("--log: %w", err))
		}
	}
	ctx, cancel := sandbox.Within(context.Background(), time.Duration(flags.Timeout))
	defer cancel()
	switch err = w.find(); {
	case err != nil:
	case flags.Ready:
		err = w.untilReady(ctx)
	case w.log != nil:
		err = w.untilLogged(ctx)
	default:
		err = w.untilEnded(ctx)
	}
	return w.result(err), err
}

// waitReady waits for a sandbox that was just started, as wait --ready does.
func waitReady(id string, timeout time.Duration) error {
	// The supervisor gives up earlier and records that, unless it cannot write.
	const margin = 10 * time.Second
	if timeout > 0 {
		timeout += margin
	}
	ctx, cancel := sandbox.Within(context.Background(), timeout)
	defer cancel()
	w := waiter{name: id}
	err := w.find()
	if err == nil {
		err = w.untilReady(ctx)
	}
	return err
}

type waiter struct {
	name    string
	log     *regexp.Regexp
	sandbox *state.Entry
	code    int // exit code of the sandbox's command
}

// waited is the JSON of wait.
type waited struct {
	ID       string              `json:"id,omitempty"`
	Sandbox  string              `json:"sandbox,omitempty"`
	Name     string              `json:"name,omitempty"`
	Status   string              `json:"status,omitempty"`
	ExitCode int                 `json:"exit_code"` // exit code of wait
	ReadyAt  string              `json:"ready_at,omitempty"`
	Report   *result.Report      `json:"report,omitempty"`
	Error    *result.ReportError `json:"error,omitempty"`
}

func (w *waiter) result(err error) output.Result {
	var v waited
	if e := w.sandbox; e != nil {
		v = waited{ID: e.ID, Sandbox: e.Record.Sandbox, Name: e.Record.Name, Status: e.Status(), Report: e.Record.Report}
		if r := e.Record.Ready; r != nil {
			v.ReadyAt = r.ReadyAt
		}
	}
	v.ExitCode = w.code
	if err != nil {
		v.ExitCode, v.Error = output.Code(err), output.Error(err).Report()
	}
	return output.Result{Value: v, Code: v.ExitCode}
}

func (w *waiter) find() (err error) {
	if w.sandbox, err = find(w.name); err == nil {
		_ = w.sandbox.Hold() // without it only the end of a sandbox with --rm is unknown
	}
	return err
}

// untilEnded waits until the supervisor has exited, which makes the record final.
func (w *waiter) untilEnded(ctx context.Context) error {
	if err := ended(ctx, w.sandbox); err != nil {
		return w.late(err)
	}
	if err := w.sandbox.Refresh(); err != nil {
		return err
	}
	if r := w.sandbox.Record.Report; r != nil {
		w.code = r.ExitCode
		return nil
	}
	return lostError(w.sandbox)
}

// late returns the error for a wait that ended early.
func (w *waiter) late(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return &result.Error{Code: "wait-timeout", ExitCode: result.ExitTimeout, Message: fmt.Sprintf("timed out; %s keeps running (%s)", w.sandbox.What(), w.sandbox.Status())}
	}
	return err
}

func lostError(e *state.Entry) error {
	return &result.Error{Code: "lost", Message: "the supervisor of " + e.What() + " was killed, so the end of its command is unknown", ExitCode: result.ExitKilled,
		Hint: "use sbxrun cleanup to remove the rest"}
}

const lookInterval = 20 * time.Millisecond

func (w *waiter) untilReady(ctx context.Context) error {
	if w.sandbox.Record.Ready == nil {
		return &result.Error{Code: "no-probe", Message: w.sandbox.What() + " was started without a probe", Hint: "start it with --ready-tcp, --ready-exec or --ready-log"}
	}
	err := sandbox.Poll(ctx, lookInterval, func(context.Context) (bool, error) {
		if err := w.sandbox.Refresh(); err != nil {
			return false, err
		}
		switch r := w.sandbox.Record.Ready; {
		case r.ReadyAt != "" && w.sandbox.Alive && w.sandbox.Record.Report == nil:
			return true, nil
		case !w.sandbox.Alive || w.sandbox.Record.Report != nil:
			return false, endedError(w.sandbox, "before it was ready")
		case r.Error != "":
			return false, notReady(w.sandbox, r.Error)
		}
		return false, nil
	})
	return w.late(err)
}

// notReady is the error for a probe that failed for the reason in the record.
func notReady(e *state.Entry, reason string) error {
	was := " is not ready: "
	if strings.HasPrefix(reason, "not ready within ") {
		was = " was "
	}
	return &result.Error{Code: "not-ready", ExitCode: result.ExitTimeout, Message: e.What() + was + reason + ", and keeps running",
		Hint: fmt.Sprintf("see sbxrun logs %s, or end it with sbxrun kill %[1]s", e.Title())}
}

func endedError(e *state.Entry, before string) error {
	how := e.Status()
	if r := e.Record.Report; r != nil {
		how = fmt.Sprintf("%s, with exit code %d", how, r.ExitCode)
	}
	return &result.Error{Code: "ended", Message: fmt.Sprintf("%s has ended %s: %s", e.What(), before, how), Hint: "see sbxrun logs " + e.Title()}
}

var errMatched = errors.New("matched")

func (w *waiter) untilLogged(ctx context.Context) error {
	over := make(chan struct{})
	follow, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go closeAtEnd(follow, w.sandbox, over, stop)
	var streams []stream.LogFile
	var matchers []*stream.Matcher
	for _, name := range sandbox.Logs {
		file, err := w.sandbox.OpenFile(name)
		if err != nil {
			return err
		}
		defer file.Close()
		m := stream.NewMatcher(w.log)
		matchers = append(matchers, m)
		streams = append(streams, stream.LogFile{File: file, Emit: func(p []byte) error {
			if m.Feed(p) {
				return errMatched
			}
			return nil
		}})
	}
	err := stream.Follow(follow, over, streams...)
	switch {
	case errors.Is(err, errMatched) || err == nil && (matchers[0].End() || matchers[1].End()):
		return nil
	case err != nil:
		return w.late(err)
	}
	if err := w.sandbox.Refresh(); err != nil {
		return err
	}
	return endedError(w.sandbox, "without such a line")
}
