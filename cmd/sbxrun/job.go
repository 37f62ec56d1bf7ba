package main

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/quantity"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// job is a command that is run to its end and told of: what run and exec have in
// common.
type job struct {
	id      string
	ends    *cli.Ends
	tells   *cli.Tells
	tty     bool
	where   string // "in the sandbox", or what else is ended
	command []string
	begin   time.Time
	signals *signals
	report  *reportFile
	limits  *limits.Plan // nil for none
	output  outputLimit
	bwrap   *result.ReportBwrap // if a new one was used

	admitted *admission
}

// carryOut starts the command and comes back with the exit code when nothing of
// it is left. over, if not nil, gets the result first.
func (j *job) carryOut(start func(*streams, proc.Bounds) supervise.Start, o supervise.Options, over func(*result.Result)) int {
	streams, err := j.openStreams()
	if err != nil {
		return j.notStarted(err)
	}
	defer streams.restore()
	group, err := makeGroup(j.limits, j.id, false)
	if err != nil {
		return j.notStarted(err)
	}
	defer removeGroup(group)
	j.admitted.reserved()
	var bounds proc.Bounds
	if group != nil {
		bounds = group.Bounds()
	}

	<-j.signals.ready
	o.Timeout, o.Grace, o.ProofTimeout = time.Duration(j.ends.Timeout), time.Duration(j.ends.Grace), time.Duration(j.ends.ProofTimeout)
	o.Begin, o.Hurry, o.Limits = j.begin, j.signals.hurry, group
	if streams.terminal != nil {
		// The last output first, or it would come to a terminal that is not raw any more.
		o.Emptied = func(proven bool) {
			streams.drain(j.signals.ctx, proven)
			streams.restore()
		}
	}
	released := o.Released
	o.Released = func() {
		j.admitted.running()
		released()
	}
	res := supervise.Run(j.signals.ctx, start(streams, bounds), o)
	j.admitted.end()
	if res.Cause == result.StartFailed {
		res.Err = j.admitted.explain(res.Err)
	}
	if over != nil {
		over(&res)
	}
	streams.drain(j.signals.ctx, res.Verdict != result.Unproven)
	streams.restore()
	res.Limits = append(res.Limits, j.output.limits()...)
	return j.finish(res, streams)
}

// notStarted finishes a run that came to nothing before there was a sandbox.
func (j *job) notStarted(err error) int {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: err.Error(), Err: err}
	}
	e = j.admitted.explain(e)
	if j.signals == nil {
		j.signals = watchSignals()
	}
	res := result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: j.begin, Duration: time.Since(j.begin), Err: e}
	return j.finish(res, nil)
}

// finish prints what there is to say and returns the exit code.
func (j *job) finish(res result.Result, streams *streams) int {
	if lost := j.output.lost.Load(); lost != nil && res.Err == nil {
		res.Err = lost
	}
	code := res.ExitCode()
	if res.Err != nil {
		fail(res.Err)
	} else if !j.tells.Quiet {
		j.note(res)
	}
	if j.report == nil && !j.tells.JSON {
		return code
	}
	rep := res.Report(j.id, j.command)
	rep.Bwrap = j.bwrap
	if j.tells.JSON {
		if streams != nil {
			rep.SetOutput(streams.captured())
		} else {
			rep.SetOutput(result.Stream{UTF8: true}, result.Stream{UTF8: true})
		}
	}
	if err := j.report.write(rep); err != nil {
		fail(err)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	if j.tells.JSON {
		b, err := rep.JSON()
		if err == nil {
			err = j.print(b)
		}
		if err != nil && !errors.Is(err, syscall.EPIPE) { // nobody who wants to read it is no failure
			fail(printError(err))
			return cmp.Or(code, result.ExitOutput)
		}
	}
	return code
}

// print writes to stdout, and does not insist on a reader when it is told to end.
func (j *job) print(b []byte) error {
	written := make(chan error, 1)
	go func() {
		_, err := os.Stdout.Write(b)
		written <- err
	}()
	select {
	case err := <-written:
		return err
	case <-j.signals.ctx.Done():
	}
	select {
	case err := <-written:
		return err
	case <-time.After(500 * time.Millisecond):
		return errors.New("nobody reads it")
	}
}

// note tells on stderr why a command was ended that did not end itself.
func (j *job) note(res result.Result) {
	why := ""
	switch res.Cause {
	case result.Timeout:
		why = "timeout after " + j.ends.Timeout.String()
	case result.Lost:
		why = "the sandbox was killed from outside"
	case result.Killed:
		why = "the sandbox was ended"
	case result.OOM:
		why = "out of memory"
		if limit := limitOf(res.Limits, "memory"); limit != "" {
			why += " (--memory " + limit + ")"
		}
	case result.CPUTime:
		why = "CPU time used up (--cpu-time)"
	case result.OutputLimit:
		why = "too much output (--max-output " + j.tells.MaxOutput.String() + ")"
	case result.FileSize:
		why = "a file grew too large (--fsize " + limitOf(res.Limits, "fsize") + ")"
	default:
		return
	}
	fmt.Fprintf(os.Stderr, "sbxrun: %s; everything %s is gone (%s)\n", why, j.where, res.Verdict)
}

// limitOf is a limit in bytes as its flag takes it; "" if there was none.
func limitOf(list []result.Limit, name string) string {
	for _, l := range list {
		if l.Name == name {
			return quantity.Size(l.Requested).String()
		}
	}
	return ""
}

// newID is a name for the run that nobody else has.
func newID() string {
	var b [8]byte
	if _, err := unix.Getrandom(b[:], 0); err != nil {
		// Only before the machine's generator is seeded, early in its boot.
		return strconv.FormatInt(time.Now().UnixNano(), 16)
	}
	return hex.EncodeToString(b[:])
}
