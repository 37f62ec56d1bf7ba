package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/environ"
	"github.com/sbxrun/sbxrun/internal/quantity"
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
	streams, err := openStreams(&r.flags, func() { r.signals.cancel(supervise.SignalError{Signal: syscall.SIGPIPE}) })
	if err != nil {
		return r.notStarted(err)
	}
	defer streams.restore()

	<-r.signals.ready
	res := supervise.Run(r.signals.ctx, r.plan, supervise.Options{
		Timeout:      time.Duration(r.flags.Timeout),
		Grace:        time.Duration(r.flags.Grace),
		ProofTimeout: time.Duration(r.flags.ProofTimeout),
		Stdio:        streams.payload,
		Terminal:     streams.terminal,
		Forked:       streams.started,
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

// prepare turns the flags into a policy, and that into a plan.
func (r *runner) prepare() error {
	policy, err := r.policy()
	if err != nil {
		return usageError(err)
	}
	r.plan, err = bwrap.Prepare(policy, thisCaller())
	return err
}

func (r *runner) policy() (p bwrap.Policy, err error) {
	f := &r.flags
	p = bwrap.Policy{
		Command:  r.command,
		Workdir:  f.Workdir,
		TmpSize:  int64(f.TmpSize),
		Network:  bwrap.Network(f.Net),
		Hostname: f.Hostname,
	}
	if f.JSON && f.Tty {
		return p, errors.New("--json and --tty do not go together: a terminal has one stream for both")
	}
	if f.TmpSize == 0 {
		return p, errors.New("--tmp-size: must be greater than 0")
	}
	if p.Mounts, err = mounts(f); err != nil {
		return p, err
	}
	if p.Env, err = environment(f); err != nil {
		return p, err
	}
	if p.User, err = parseUser(f.User); err != nil {
		return p, err
	}
	if f.Tty {
		if p.Terminal, err = os.Executable(); err != nil {
			return p, fmt.Errorf("--tty: %w", err)
		}
	}
	return p, nil
}

func mounts(f *cli.Run) (list []bwrap.Mount, err error) {
	dir, err := unix.Getwd()
	if err != nil {
		dir = "/" // a relative path will not be found, which is the truth
	}
	for _, kind := range []struct {
		args []string
		kind bwrap.MountKind
		try  bool
	}{
		{f.RoBind, bwrap.ReadOnly, false},
		{f.Bind, bwrap.ReadWrite, false},
		{f.RoBindTry, bwrap.ReadOnly, true},
		{f.BindTry, bwrap.ReadWrite, true},
	} {
		for _, arg := range kind.args {
			source, dest, err := bwrap.ParseBind(arg, dir)
			if err != nil {
				return nil, err
			}
			list = append(list, bwrap.Mount{Kind: kind.kind, Source: source, Dest: dest, Try: kind.try})
		}
	}
	for _, arg := range f.Tmpfs {
		dest, size, err := bwrap.ParseTmpfs(arg)
		if err != nil {
			return nil, err
		}
		m := bwrap.Mount{Kind: bwrap.Tmpfs, Dest: dest}
		if size != "" {
			if m.Size, err = quantity.ParseSize(size); err != nil {
				return nil, fmt.Errorf("tmpfs %q: %w", arg, err)
			}
			if m.Size == 0 {
				return nil, fmt.Errorf("tmpfs %q: the size must be greater than 0", arg)
			}
		}
		list = append(list, m)
	}
	return list, nil
}

// passed are the variables every payload gets from the caller, beside LC_*.
var passed = []string{"LANG", "LANGUAGE", "TERM", "TZ"}

// own are the variables that describe the sandbox and not the host.
var own = []string{"PATH", "HOME", "USER", "LOGNAME", "PWD", "OLDPWD"}

// environment is what the payload gets beside PATH, HOME and USER: what comes
// later wins.
func environment(f *cli.Run) (set environ.Set, err error) {
	for _, pair := range os.Environ() {
		v, ok, err := environ.Parse(pair, os.LookupEnv)
		if err != nil || !ok || slices.Contains(own, v.Name) {
			continue // names that no shell could set, such as exported functions
		}
		if f.InheritEnv || slices.Contains(passed, v.Name) || strings.HasPrefix(v.Name, "LC_") {
			set.Put(v)
		}
	}
	for _, name := range f.EnvFile {
		if err := environmentFile(&set, name); err != nil {
			return set, err
		}
	}
	for _, arg := range f.Env {
		v, ok, err := environ.Parse(arg, os.LookupEnv)
		if err != nil {
			return set, fmt.Errorf("--env: %w", err)
		}
		if ok {
			set.Put(v)
		}
	}
	return set, nil
}

func environmentFile(set *environ.Set, name string) error {
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("--env-file: %w", err)
	}
	defer file.Close()
	vars, err := environ.ParseFile(file, name, os.LookupEnv)
	if err != nil {
		return fmt.Errorf("--env-file: %w", err)
	}
	for _, v := range vars {
		set.Put(v)
	}
	return nil
}

// parseUser parses UID[:GID]; the group id is the user id unless given.
func parseUser(arg string) (*bwrap.User, error) {
	if arg == "" {
		return nil, nil
	}
	uid, gid, found := strings.Cut(arg, ":")
	if !found {
		gid = uid
	}
	u, err1 := strconv.ParseUint(uid, 10, 32)
	g, err2 := strconv.ParseUint(gid, 10, 32)
	if err1 != nil || err2 != nil || u == 1<<32-1 || g == 1<<32-1 {
		return nil, fmt.Errorf("--user %q: want UID or UID:GID, as numbers", arg)
	}
	return &bwrap.User{UID: uint32(u), GID: uint32(g)}, nil
}

// signals turn the first signal into a cancelled context, and the second into
// a closed channel.
type signals struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	hurry  chan struct{}
	ready  chan struct{} // closed when signals are listened to
}

// watchSignals begins to listen, in the background, because that takes package
// signal some tenths of a millisecond. Before ready a signal ends sbxrun, which
// must not have started anything.
func watchSignals() *signals {
	ctx, cancel := context.WithCancelCause(context.Background())
	s := &signals{ctx: ctx, cancel: cancel, hurry: make(chan struct{}), ready: make(chan struct{})}
	go s.listen()
	return s
}

func (s *signals) listen() {
	got := make(chan os.Signal, 2)
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		// What the caller ignores, as nohup(1) does SIGHUP, stays ignored.
		if !signal.Ignored(sig) {
			signal.Notify(got, sig)
		}
	}
	// A closed stdout is an error of write(2), and no reason to leave a sandbox
	// behind. (The payload gets the default back.)
	signal.Ignore(syscall.SIGPIPE)
	close(s.ready)
	sig := <-got
	s.cancel(supervise.SignalError{Signal: sig.(syscall.Signal)})
	<-got
	close(s.hurry)
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
