package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

func runCommand(args []string, begin time.Time) int {
	r := runner{begin: begin, signals: watchSignals()}
	var err error
	if r.command, err = cli.Parse(&r.flags, args); err != nil {
		return fail(usageError(err))
	}
	switch {
	case r.flags.Help:
		return help("")
	case r.flags.Version:
		fmt.Println("sbxrun " + version)
		return 0
	}
	return r.run()
}

// runner is one run of the run command.
type runner struct {
	flags   cli.Run
	command []string
	begin   time.Time
	signals *signals

	plan   *bwrap.Plan
	report *reportFile
}

func (r *runner) run() int {
	var err error
	// The report's place first, so that every later failure can be written there.
	if r.report, err = openReport(r.flags.Report); err != nil {
		return fail(err)
	}
	if err = r.prepare(); err != nil {
		return r.notStarted(err)
	}
	defer r.plan.Close()
	if r.flags.PrintCommand {
		fmt.Println(r.plan.ShellCommand())
		return 0
	}
	streams, err := openStreams(r.flags.JSON, r.flags.Tty, int64(r.flags.MaxOutput), func() { r.signals.cancelBy(syscall.SIGPIPE) })
	if err != nil {
		return r.notStarted(err)
	}
	defer streams.restore()

	<-r.signals.ready
	start := supervise.InSandbox(r.plan, streams.payload, streams.terminal, streams.started)
	res := supervise.Run(r.signals.ctx, start, supervise.Options{
		Timeout:      time.Duration(r.flags.Timeout),
		Grace:        time.Duration(r.flags.Grace),
		ProofTimeout: time.Duration(r.flags.ProofTimeout),
		Begin:        r.begin,
		Hurry:        r.signals.hurry,
	})
	r.plan.Close() // descriptors may be few
	streams.drain(r.signals.ctx, res.Verdict)
	streams.restore()
	r.diagnose(&res)
	return r.finish(res, streams)
}

// diagnose finds out why a sandbox could not be set up, if it is this machine.
func (r *runner) diagnose(res *result.Result) {
	const bound = 1500 * time.Millisecond
	if res.Err == nil || res.Err.Code != "setup" {
		return
	}
	// What is scarce for us is scarce for the diagnosis.
	for _, scarce := range []error{unix.EMFILE, unix.ENFILE, unix.EAGAIN, unix.ENOMEM, unix.ENOSPC} {
		if errors.Is(res.Err, scarce) {
			return
		}
	}
	ctx, cancel := context.WithTimeout(r.signals.ctx, bound)
	defer cancel()
	if e := doctor.Diagnose(ctx, thisCaller()); e != nil && ctx.Err() == nil {
		res.Err = e
	}
}

var errJSONOnTerminal = errors.New("--json and --tty do not go together: a terminal has one stream for both")

// prepare turns the flags into a policy, and that into a plan.
func (r *runner) prepare() error {
	if r.flags.JSON && r.flags.Tty {
		return usageError(errJSONOnTerminal)
	}
	policy, err := policyOf(&r.flags.View, r.command)
	if err != nil {
		return usageError(err)
	}
	if r.flags.Tty {
		if policy.Terminal, err = os.Executable(); err != nil {
			return usageError(fmt.Errorf("--tty: %w", err))
		}
	}
	r.plan, err = bwrap.Prepare(policy, thisCaller())
	return err
}

// notStarted finishes a run that came to nothing before there was a sandbox.
func (r *runner) notStarted(err error) int {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: err.Error(), Err: err}
	}
	res := result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: r.begin, Duration: time.Since(r.begin), Err: e}
	return r.finish(res, nil)
}

// finish prints what there is to say and returns the exit code.
func (r *runner) finish(res result.Result, streams *streams) int {
	code := res.ExitCode()
	if res.Err != nil {
		fail(res.Err)
	} else if !r.flags.Quiet {
		r.note(res)
	}
	if r.report == nil && !r.flags.JSON {
		return code
	}
	rep := res.Report(newID(), r.command)
	if r.plan != nil {
		rep.Bwrap = &result.ReportBwrap{Path: r.plan.Program.Path, Version: r.plan.Program.Version}
	}
	if r.flags.JSON {
		if streams != nil {
			rep.SetOutput(streams.captured())
		} else {
			rep.SetOutput(result.Stream{UTF8: true}, result.Stream{UTF8: true})
		}
	}
	if err := r.report.write(rep); err != nil {
		fail(err)
		code = max(code, 1) // the command has run, so not 125
	}
	if r.flags.JSON {
		b, err := rep.JSON()
		if err == nil {
			err = r.print(b)
		}
		if err != nil && !errors.Is(err, syscall.EPIPE) { // nobody who wants to read it is no failure
			fail(fmt.Errorf("print the report: %w", err))
			return max(code, 1)
		}
	}
	return code
}

// print writes to stdout, and does not insist on a reader when it is told to end.
func (r *runner) print(b []byte) error {
	written := make(chan error, 1)
	go func() {
		_, err := os.Stdout.Write(b)
		written <- err
	}()
	select {
	case err := <-written:
		return err
	case <-r.signals.ctx.Done():
	}
	select {
	case err := <-written:
		return err
	case <-time.After(500 * time.Millisecond):
		return errors.New("nobody reads it")
	}
}

// note tells on stderr why a command was ended that did not end itself.
func (r *runner) note(res result.Result) {
	why := ""
	switch res.Cause {
	case result.Timeout:
		why = "timeout after " + r.flags.Timeout.String()
	case result.Lost:
		why = "the sandbox was killed from outside"
	default:
		return
	}
	fmt.Fprintf(os.Stderr, "sbxrun: %s; everything in the sandbox is gone (%s)\n", why, res.Verdict)
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
