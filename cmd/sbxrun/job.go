package main

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
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
// it is left. running, if not nil, is called when the command runs; ended gets the
// result before it is told.
func (j *job) carryOut(start func(*streams, proc.Bounds, supervise.Terms) (*supervise.Command, error), running func(), ended func(*result.Result)) int {
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
	terms := supervise.Terms{
		Timeout: time.Duration(j.ends.Timeout), Grace: time.Duration(j.ends.Grace), ProofTimeout: time.Duration(j.ends.ProofTimeout),
		Begin: j.begin, Hurry: j.signals.hurry, Limits: group, Confirm: caller != nil,
	}
	<-j.signals.ready
	ctx := j.signals.ctx
	var res result.Result
	command, err := (*supervise.Command)(nil), ctx.Err()
	if err == nil {
		command, err = start(streams, bounds, terms)
	}
	streams.started()
	if err != nil {
		res = supervise.NotStarted(ctx, err, terms)
	} else {
		defer command.Close()
		if command.Release(ctx) {
			j.admitted.running()
			j.signals.suspends(command)
			running()
		}
		command.Watch(ctx)
		res = command.End(ctx)
	}
	j.admitted.end()
	if res.Cause == result.StartFailed {
		res.Err = j.admitted.explain(res.Err)
	}
	ended(&res)
	// The last output first, or it would come to a terminal that is not raw any more.
	complete := streams.drain(signaled)
	streams.restore()
	if command != nil {
		if err := command.Collect(); err != nil {
			warn(err)
		}
	}
	res.Limits = append(res.Limits, j.output.limits()...)
	code := j.finish(res, streams)
	if !complete {
		fail(errUndelivered)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	return code
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
	var rep result.Report
	if j.report != nil || j.tells.JSON {
		rep = res.Report(j.id, j.command)
		rep.Bwrap = j.bwrap
	}
	if j.tells.JSON {
		if streams != nil {
			rep.SetOutput(streams.captured())
		} else {
			rep.SetOutput(result.Stream{UTF8: true}, result.Stream{UTF8: true})
		}
	}
	// Before what is said on stderr, which may have to wait for a reader.
	unwritten := j.report.write(rep)
	if res.Err != nil {
		fail(res.Err)
	} else if !j.tells.Quiet {
		j.note(res)
	}
	if unwritten != nil {
		fail(unwritten)
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

// print writes to stdout, as long as somebody reads it.
func (j *job) print(b []byte) error {
	var err error
	written, passed := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(written)
		for part := range slices.Chunk(b, pieceSize) {
			if _, err = os.Stdout.Write(part); err != nil {
				return
			}
			progress(passed)
		}
	}()
	if !await(written, passed, signaled) {
		return errUndelivered
	}
	return err
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
	say(fmt.Sprintf("sbxrun: %s; everything %s is gone (%s)", why, j.where, res.Verdict))
}

// limitOf is a limit in bytes as its flag takes it; "" if there was none.
func limitOf(list []result.Limit, name string) string {
	for _, l := range list {
		if l.Name == name {
			return values.Size(l.Requested).String()
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
