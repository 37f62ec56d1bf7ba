package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

// command is one that is run to its end and told of: what run and exec have in common.
type command struct {
	job.Job
	deadline *cli.DeadlineFlags
	printing *cli.OutputFlags
	asJSON   bool // print the report on stdout
	tty      bool
	where    string // "in the sandbox", or what else is ended
	leftover string // a hint after processes in the background were killed; "" reports none
	argv     []string
	signals  *signals
	report   *reportFile
	output   outputLimit
	buffers  [2]*stream.Buffer   // what --json has of stdout and stderr
	bwrap    *result.ReportBwrap // if a new one was used
	sayings  *sayings            // with --verbose
	record   *sandbox.Exec       // of an exec in the background
	used     *result.ReportNetwork
	changes  *result.ReportChanges
}

// prepare makes what the command needs beside its place. begin is when sbxrun began.
func (c *command) prepare(begin time.Time) (err error) {
	c.Terms = supervise.Terms{
		Timeout: time.Duration(c.deadline.Timeout), Signal: syscall.Signal(c.deadline.Signal), Grace: c.deadline.Period(), ProofTimeout: time.Duration(c.deadline.ProofTimeout),
		Begin: begin, Hurry: c.signals.hurry, Confirm: caller != nil,
	}
	if c.deadline.Foreground && !c.printing.Quiet {
		warn(errors.New("--foreground changes nothing: whatever the command has started is ended with it; for a terminal there is --tty"))
	}
	if c.printing.Verbose {
		c.sayings = saySignals(c.argv[0])
		c.Terms.Sending = c.sayings.sent
	}
	c.Streams, err = c.openStreams()
	return err
}

// sayings tells of signals on stderr; nil tells of none. It has a goroutine, because
// stderr may have no reader, and the end of a command waits for nobody.
type sayings struct {
	sent chan syscall.Signal
	said chan struct{} // closed after the last
}

func saySignals(command string) *sayings {
	s := &sayings{make(chan syscall.Signal, 2), make(chan struct{})}
	go func() {
		defer close(s.said)
		for sig := range s.sent {
			output.Note(fmt.Sprintf("sending signal %s to the command %q", result.SignalName(sig), command))
		}
	}()
	return s
}

// over comes back when all is said.
func (s *sayings) over() {
	if s != nil {
		close(s.sent)
		<-s.said
	}
}

// start lets the command begin, and reports whether it did.
func (c *command) start() bool {
	<-c.signals.ready
	if !c.Hold(c.signals.ctx) {
		return false
	}
	if c.record != nil {
		if err := c.record.Held(c.Kept()); err != nil {
			c.Refuse(err)
		}
	}
	if !c.Release(c.signals.ctx) {
		return false
	}
	if c.record == nil {
		c.signals.suspends(&c.Job)
		c.tellPublished()
	}
	return true
}

// tellPublished names the ports that were picked, which nobody else could know.
func (c *command) tellPublished() {
	if c.printing.Quiet {
		return
	}
	for _, p := range c.Parts.Picked() {
		output.Note(fmt.Sprintf("port %d of the sandbox is published at %s", p.Port, p.Address))
	}
}

// wait comes back when nothing of the command is left.
func (c *command) wait() (res result.Result, delivered bool) {
	if c.reports() {
		defer time.AfterFunc(soon, rehearse).Stop()
	}
	res, delivered, left := c.Wait(c.signals.ctx, signaled)
	c.sayings.over()
	res.PreserveStatus = c.deadline.PreserveStatus
	for _, err := range left {
		warn(err)
	}
	if c.record != nil {
		c.record.Settle(&res)
		c.output.hit.Store(c.record.Cut())
	}
	res.Limits = append(res.Limits, c.output.limits()...)
	return res, delivered
}

// reports says whether there will be a report.
func (c *command) reports() bool { return c.report != nil || c.record != nil || c.asJSON }

// rehearse makes a report of nothing. The first one takes package json a fifth of a
// millisecond, all others a hundredth of that, and nobody waits for it while the command runs.
func rehearse() { _, _ = result.Report{}.JSON() }

// soon is how long a command runs for which that is worth the while.
const soon = 20 * time.Millisecond

// end tells of the command and returns the exit code.
func (c *command) end(res result.Result, delivered bool) int {
	code := c.tell(res)
	if !delivered {
		fail(errUndelivered)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	return code
}

// errUndelivered means that whatever reads our stdout or stderr has stopped reading.
var errUndelivered = &result.Error{Code: "output", Message: "the rest of the output is lost: its reader has stopped reading",
	Hint: "read stdout and stderr to their ends while sbxrun runs"}

// notStarted tells of a command that came to nothing before there was a sandbox, and
// returns the exit code.
func (c *command) notStarted(err error) int {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: err.Error(), Err: err}
	}
	e = c.Leave.Explain(e)
	if c.Streams != nil {
		c.Streams.Drain(signaled)
		c.Streams.Restore()
	}
	if c.signals == nil {
		c.signals = watchWaiting()
		close(c.signals.admitted)
	}
	return c.tell(result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: c.Terms.Begin, Duration: time.Since(c.Terms.Begin), Err: e})
}

// refuse reports a wrong command line, in the report if stdout is for that, and returns the exit code. flags is the
// struct of the command.
func (c *command) refuse(flags any, err error) int {
	if !errors.Is(err, cli.ErrHelp) {
		err = cli.UsageError(flags, err)
		if c.printing.JSON {
			c.asJSON = true
			return c.notStarted(err)
		}
	}
	return cli.Finish(flags, output.Result{}, err)
}

// tell prints what there is to say and returns the exit code.
func (c *command) tell(res result.Result) int {
	if lost := c.output.lost.Load(); lost != nil && res.Err == nil {
		res.Err = lost
	}
	code := res.ExitCode()
	var rep result.Report
	if c.reports() {
		rep = res.Report(c.ID, c.argv)
		rep.Bwrap, rep.Network, rep.Changes = c.bwrap, c.used, c.changes
		if c.Parts != nil {
			rep.Copied = c.Parts.Files.Report()
		}
	}
	if c.asJSON {
		out := [2]result.Stream{{UTF8: true}, {UTF8: true}}
		for i, b := range c.buffers {
			if b != nil {
				out[i] = b.Stream()
			}
		}
		rep.SetOutput(out[0], out[1])
	}
	if c.record != nil {
		if err := c.record.Finish(res, rep); err != nil {
			warn(err)
		}
	}
	// Before what is said on stderr, which may have to wait for a reader.
	unwritten := c.report.write(rep)
	if res.Err != nil {
		if !c.printing.Quiet || res.Err.Code != "get" { // the exit code and the report have that
			fail(res.Err)
		}
	} else if !c.printing.Quiet {
		c.note(res)
	}
	if unwritten != nil {
		fail(unwritten)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	if c.asJSON {
		b, err := rep.JSON()
		if err == nil {
			err = c.print(b)
		}
		if err != nil && !errors.Is(err, syscall.EPIPE) { // nobody who wants to read it is no failure
			fail(output.Lost(err))
			return cmp.Or(code, result.ExitOutput)
		}
	}
	return code
}

// print writes to stdout, as long as somebody reads it.
func (c *command) print(b []byte) error {
	var err error
	written, passed := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(written)
		for part := range slices.Chunk(b, stream.PieceSize) {
			if _, err = stream.WriteBlocking(os.Stdout, part); err != nil {
				return
			}
			stream.Progress(passed)
		}
	}()
	if !stream.Await(written, passed, signaled) {
		return errUndelivered
	}
	return err
}

// note tells on stderr why a command was ended that did not end itself.
func (c *command) note(res result.Result) {
	cause := ""
	switch res.Cause {
	case result.Timeout:
		cause = "timeout after " + c.deadline.Timeout.String()
	case result.Lost:
		cause = "the sandbox was killed from outside"
	case result.Killed:
		cause = "the sandbox was ended"
	case result.OOM:
		cause = "out of memory"
		if limit := limitOf(res.Limits, "memory"); limit != "" {
			cause += " (--memory " + limit + ")"
		}
	case result.CPUTime:
		cause = "CPU time used up (--cpu-time)"
	case result.OutputLimit:
		cause = "too much output (--max-output " + values.Size(c.output.size).String() + ")"
	case result.FileSize:
		cause = "a file grew too large (--fsize " + limitOf(res.Limits, "fsize") + ")"
	default:
		if res.Strays > 0 && c.leftover != "" && !c.asJSON {
			output.Note("killed " + output.Count(res.Strays, "leftover process", "es") + "; " + c.leftover)
		}
		return
	}
	output.Note(fmt.Sprintf("%s; everything %s is gone (%s)", cause, c.where, res.Verdict))
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
