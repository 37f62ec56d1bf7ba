package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

// command is the part that run and exec share: a command that runs to its end and is reported.
type command struct {
	*supervise.Command
	Parts    *sandbox.Parts // of a new sandbox
	shared   *cli.ForegroundFlags
	asJSON   bool // print the report on stdout
	tty      bool
	where    string // the scope of the teardown in messages, such as "in the sandbox"
	leftover string // a hint after processes in the background were killed; "" reports none
	argv     []string
	signals  *signals
	report   *destination
	output   outputLimit
	buffers  [2]*stream.Buffer   // stdout and stderr for --json
	bwrap    *result.ReportBwrap // nil for an exec
	signaled *signalLog          // with --verbose
	record   *sandbox.Exec       // of a detached exec
	used     *result.ReportNetwork
	changes  *result.ReportChanges
}

// prepare sets the deadline and opens the streams.
func (c *command) prepare() (err error) {
	c.Options = supervise.Options{
		Timeout: time.Duration(c.shared.Timeout), Signal: syscall.Signal(c.shared.Signal), Grace: period(&c.shared.DeadlineFlags), ProofTimeout: time.Duration(c.shared.ProofTimeout),
		Hurry: c.signals.hurry, Attended: true,
	}
	c.Confirm, c.Cut = caller != nil, signaled
	if c.shared.Foreground && !c.shared.Quiet {
		warn(errors.New("--foreground has no effect: all processes end with the command; use --tty for a terminal"))
	}
	if c.shared.Verbose {
		c.signaled = logSignals(c.argv[0])
		c.Sending = c.signaled.sent
	}
	c.Streams, err = c.openStreams()
	return err
}

// period returns the time between the first signal and SIGKILL. Without --grace, the command has 5 s to handle a
// named signal.
func period(f *cli.DeadlineFlags) time.Duration {
	if f.Grace == 0 && f.Signal != 0 && f.Signal != values.Signal(syscall.SIGKILL) {
		return 5 * time.Second
	}
	return time.Duration(f.Grace)
}

// signalLog prints signals on stderr; nil prints none. It has a goroutine because a write to stderr can block, and
// the end of a command must not.
type signalLog struct {
	sent chan syscall.Signal
	done chan struct{}
}

func logSignals(command string) *signalLog {
	l := &signalLog{make(chan syscall.Signal, 2), make(chan struct{})}
	go func() {
		defer close(l.done)
		for sig := range l.sent {
			output.Note(fmt.Sprintf("sending signal %s to the command %q", result.SignalName(sig), command))
		}
	}()
	return l
}

func (l *signalLog) close() {
	if l != nil {
		close(l.sent)
		<-l.done
	}
}

func (c *command) start() bool {
	<-c.signals.ready
	if c.Start(c.signals.ctx) != nil {
		return false
	}
	if c.record == nil {
		c.signals.suspends(c.Command)
		c.printPublished()
	}
	return true
}

func (c *command) printPublished() {
	if c.shared.Quiet {
		return
	}
	for _, p := range c.Parts.Picked() {
		output.Note(fmt.Sprintf("port %d of the sandbox is published at %s", p.Port, p.Address))
	}
}

// wait waits until all processes of the command have exited. delivered is false if output was lost.
func (c *command) wait() (res result.Result, delivered bool) {
	if c.reports() {
		defer time.AfterFunc(soon, rehearse).Stop()
	}
	r, _ := c.Wait()
	res, delivered = *r, !c.Undelivered
	c.signaled.close()
	res.PreserveStatus = c.shared.PreserveStatus
	for _, err := range c.Left {
		warn(err)
	}
	if c.record != nil {
		c.output.hit.Store(c.record.Cut())
	}
	res.Limits = append(res.Limits, c.output.limits()...)
	return res, delivered
}

func (c *command) reports() bool { return c.report != nil || c.record != nil || c.asJSON }

// rehearse encodes an empty report while the command runs. The first one takes package json 0.2 ms, and later ones a
// hundredth of that.
func rehearse() { _, _ = result.Report{}.JSON() }

// soon is the age of a command that makes rehearse worthwhile.
const soon = 20 * time.Millisecond

func (c *command) end(res result.Result, delivered bool) int {
	code := c.conclude(res)
	if !delivered {
		fail(errUndelivered)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	return code
}

// errUndelivered means that the reader of our stdout or stderr has stopped reading.
var errUndelivered = &result.Error{Code: "output", Message: "the rest of the output is lost: its reader has stopped reading",
	Hint: "read stdout and stderr to their ends while sbxrun runs"}

// notStarted reports a command that failed to start, and returns the exit code.
func (c *command) notStarted(err error) int {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: err.Error(), Err: err}
	}
	e = c.Permit.Explain(e)
	if c.Streams != nil {
		c.Streams.Drain(signaled)
		c.Streams.Restore()
	}
	if c.signals == nil {
		c.signals = watchWaiting()
		close(c.signals.admitted)
	}
	return c.conclude(result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: c.Begin, Duration: time.Since(c.Begin), Err: e})
}

// refuse reports a wrong command line, in the report if that goes to stdout, and returns the exit code. flags is the
// struct of the command.
func (c *command) refuse(flags any, err error) int {
	if !errors.Is(err, cli.ErrHelp) {
		err = cli.UsageError(flags, err)
		if c.shared.JSON {
			c.asJSON = true
			return c.notStarted(err)
		}
	}
	return cli.Finish(flags, output.Result{}, err)
}

// conclude writes the report, prints messages, and returns the exit code.
func (c *command) conclude(res result.Result) int {
	if lost := c.output.lost.Load(); lost != nil && res.Err == nil {
		res.Err = lost
	}
	code := res.ExitCode()
	var rep result.Report
	if c.reports() {
		rep = res.Report(c.ID, c.argv)
		rep.Bwrap, rep.Network, rep.Changes = c.bwrap, c.used, c.changes
		if c.Place.Plan != nil {
			rep.Devices = c.Place.Plan.Devices
		}
		if c.Parts != nil {
			rep.Copied, rep.Image = c.Parts.Files.Report(), c.Parts.Image
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
	// Write the report first, because a message may have to wait for the reader of stderr.
	unwritten := c.report.report(rep)
	if res.Err != nil {
		if !c.shared.Quiet || res.Err.Code != "get" { // the exit code and the report show it
			fail(res.Err)
		}
	} else if !c.shared.Quiet {
		c.note(res)
	}
	if unwritten != nil {
		fail(unwritten)
		code = cmp.Or(code, result.ExitOutput) // the command has run, so not 125
	}
	if c.asJSON {
		b, err := rep.JSON()
		if err == nil {
			if err = writeUnlessStalled(os.Stdout, b, signaled); errors.Is(err, os.ErrDeadlineExceeded) {
				err = errUndelivered
			}
		}
		if err != nil && !errors.Is(err, syscall.EPIPE) { // EPIPE is not a failure: the reader has closed stdout
			fail(output.Lost(err))
			return cmp.Or(code, result.ExitOutput)
		}
	}
	return code
}

// note prints why sbxrun or the kernel ended a command.
func (c *command) note(res result.Result) {
	cause := ""
	switch res.Cause {
	case result.Timeout:
		cause = "timeout after " + c.shared.Timeout.String()
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
	case result.Exited, result.Signaled:
		if res.Strays > 0 && c.leftover != "" && !c.asJSON {
			output.Note("killed " + output.Count(res.Strays, "leftover process", "es") + "; " + c.leftover)
		}
		return
	default:
		return
	}
	output.Note(fmt.Sprintf("%s; everything %s is gone (%s)", cause, c.where, res.Verdict))
}

// limitOf returns a limit in bytes in the form of its flag, or "" for no limit.
func limitOf(list []result.Limit, name string) string {
	for _, l := range list {
		if l.Name == name {
			return values.Size(l.Requested).String()
		}
	}
	return ""
}
