package main

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
)

func killCommand(flags *cli.Kill) (r output.Result, err error) {
	names := flags.Sandboxes
	k := killer{flags: flags}
	if err := k.check(names); err != nil {
		return r, cli.UsageError(flags, err)
	}
	if err := k.find(names); err != nil {
		return r, err
	}
	k.killAll()
	return k.result()
}

type killer struct {
	flags   *cli.Kill
	tags    map[string]string
	where   string // the directory that --all and --tag searched
	kills   []*kill
	unknown []killed // one for each name without a sandbox
	failed  *multierror.Error
}

// kill is the end of one sandbox or exec.
type kill struct {
	sandbox    *state.Entry
	supervisor *proc.Process // nil if it has ended
	err        error         // the reason for a failure
	apart      bool          // runs in another PID namespace
	already    bool          // had ended before
	removed    bool          // its record was removed at its end
	verdict    result.Verdict
	told       killed // set by result
}

func (k *killer) check(names []string) (err error) {
	switch {
	case k.many() && len(names) > 0:
		return errors.New("kill takes names, or --all or --tag, but not both")
	case !k.many() && len(names) == 0:
		return errors.New("nothing to kill: name a sandbox, or give --tag or --all")
	}
	k.tags, err = parseTags(k.flags.Tag)
	return err
}

// many reports whether --all or --tag selects the sandboxes.
func (k *killer) many() bool { return k.flags.All || len(k.flags.Tag) > 0 }

func (k *killer) find(names []string) error {
	if k.many() {
		entries, where, err := list("")
		k.where = where
		for _, e := range entries {
			if e.Lives() && tagged(e, k.tags) {
				k.kills = append(k.kills, &kill{sandbox: e})
			}
		}
		return err
	}
	seen := map[string]bool{}
	for _, name := range names {
		e, err := find(name)
		if err != nil {
			k.failed = multierror.Append(k.failed, err) // the others still end
			k.unknown = append(k.unknown, killed{Name: name, Verdict: result.NotApplicable, Survivors: []result.Survivor{}, Error: output.Error(err).Report()})
			continue
		}
		if !seen[e.ID] {
			seen[e.ID] = true
			k.kills = append(k.kills, &kill{sandbox: e})
		}
	}
	return nil
}

// killAll asks all supervisors first, so that their grace periods overlap, and then waits for each.
func (k *killer) killAll() {
	begin := time.Now()
	for _, one := range k.kills {
		one.request(state.Kill{Signal: result.SignalName(unix.Signal(k.flags.Signal)), GraceMS: min(result.Milliseconds(time.Duration(k.flags.Grace)), state.LongestGrace)})
	}
	// The supervisor gets another moment to record the verdict.
	const moment = 2 * time.Second
	graceOver := begin.Add(time.Duration(k.flags.Grace))
	proofBy := graceOver.Add(time.Duration(k.flags.ProofTimeout))
	var waiting sync.WaitGroup
	for _, one := range k.kills {
		waiting.Go(func() { one.await(graceOver.Add(moment), proofBy.Add(moment)) })
	}
	waiting.Wait()
}

// request asks the supervisor to end the sandbox. It writes the request before it sends the signal, so the cause is
// known before anything is killed.
func (k *kill) request(what state.Kill) {
	e := k.sandbox
	if k.already = !e.Lives(); k.already {
		// Only its own namespace shows whether remaining processes have exited by now.
		r := e.Record.Report
		k.apart = r != nil && r.Teardown.Verdict == result.Unproven && e.Record.Supervisor.Apart()
		return
	}
	if e.Record.Supervisor.Apart() {
		k.apart = true
		return
	}
	_ = e.Hold() // as in waiter.find
	supervisor, err := e.Record.Supervisor.Open()
	if errors.Is(err, proc.ErrGone) {
		return
	}
	if err == nil {
		k.supervisor = supervisor
		if err = e.WriteKill(what); err != nil {
			// A full disk must not keep a sandbox alive. Without a request the supervisor
			// handles SIGTERM like any other.
			warn(err)
		}
		err = supervisor.Signal(unix.SIGTERM)
	}
	if err != nil && !errors.Is(err, proc.ErrGone) {
		k.err = err
	}
}

// await waits until the supervisor has ended and recorded the end. If that has not happened by late, for example
// because the supervisor is stopped, await kills init itself.
func (k *kill) await(late, proofBy time.Time) {
	if k.apart {
		k.verdict = result.Unproven
		k.err = errors.New("it runs in another PID namespace, perhaps of a container; sbxrun kill can end it there")
		return
	}
	if k.supervisor != nil {
		defer k.supervisor.Close()
		// If init is dead, the supervisor's proof may take as long as ours.
		if k.supervisor.Wait(late) != nil && k.initEnded() {
			_ = k.supervisor.Wait(proofBy) // the record has the result
		}
	}
	// The record may have an init by now.
	err := k.sandbox.Refresh()
	if k.removed = errors.Is(err, unix.ENOENT); err != nil && !k.removed {
		k.err = err
	}
	// An unproven teardown can still be proven now.
	if r := k.sandbox.Record.Report; r != nil && r.Teardown.Verdict != result.Unproven {
		k.verdict = r.Teardown.Verdict
		return
	}
	k.killInit(proofBy)
}

func (k *kill) initEnded() bool {
	init, err := k.init()
	if err == nil {
		defer init.Close()
		return init.Exited()
	}
	return errors.Is(err, proc.ErrGone)
}

// init opens the init in the record. The error is [proc.ErrGone] if it has ended or never existed.
func (k *kill) init() (*proc.Process, error) {
	if k.sandbox.Record.Init == nil {
		return nil, proc.ErrGone
	}
	return k.sandbox.Record.Init.OpenInit()
}

// killInit ends the sandbox without its supervisor.
func (k *kill) killInit(proofBy time.Time) {
	switch e := k.sandbox; {
	case e.Record.Init != nil:
	case e.Alive && !k.removed:
		k.verdict = result.Unproven
		k.err = fmt.Errorf("its supervisor %d does not answer, and the record has no init", e.Record.Supervisor.PID)
		return
	default:
		k.verdict = result.NotApplicable // no init was ever released
		return
	}
	init, err := k.init()
	if errors.Is(err, proc.ErrGone) {
		k.verdict = result.Proven // init exits last (pid_namespaces(7))
		return
	}
	if err == nil {
		defer init.Close()
		if err = init.Signal(unix.SIGKILL); err == nil || errors.Is(err, proc.ErrGone) {
			err = init.Wait(proofBy)
		}
	}
	if err != nil {
		k.verdict = result.Unproven
		k.err = fmt.Errorf("init %d: %w", k.sandbox.Record.Init.PID, err)
		return
	}
	k.verdict = result.Proven
}

// killed is what kill --json prints of one sandbox.
type killed struct {
	ID        string              `json:"id"`
	Sandbox   string              `json:"sandbox,omitempty"`
	Name      string              `json:"name,omitempty"`
	Status    string              `json:"status"`
	Already   bool                `json:"already_ended"`
	Verdict   result.Verdict      `json:"verdict"`
	ExitCode  *int                `json:"exit_code,omitempty"` // of the sandbox
	Survivors []result.Survivor   `json:"survivors"`
	Error     *result.ReportError `json:"error,omitempty"`
}

func (k *kill) outcome() killed {
	e := k.sandbox
	t := killed{ID: e.ID, Sandbox: e.Record.Sandbox, Name: e.Record.Name, Status: e.Status(), Already: k.already, Verdict: k.verdict, Survivors: []result.Survivor{}}
	if k.removed || !k.already && e.Record.Report == nil && k.verdict == result.Proven {
		t.Status = string(result.StatusKilled) // presumably by this kill
	}
	if r := e.Record.Report; r != nil {
		t.ExitCode = &r.ExitCode
	}
	if k.verdict == result.Unproven && e.Record.Init != nil {
		for _, st := range proc.Members(100, e.Record.Init.PIDNS) {
			t.Survivors = append(t.Survivors, result.Survivor{PID: st.PID, Comm: st.Comm, State: st.State})
		}
	}
	if k.err != nil {
		t.Error = output.Error(k.err).Report()
	}
	return t
}

func (k *killer) result() (output.Result, error) {
	r := output.Result{Text: k.printLines}
	all := []killed{}
	for _, one := range k.kills {
		one.told = one.outcome()
		all = append(all, one.told)
		if one.verdict == result.Unproven {
			r.Code = result.ExitUnproven
		}
		if one.err != nil {
			k.failed = multierror.Append(k.failed, fmt.Errorf("%s: %w", one.sandbox.Title(), one.err))
		}
	}
	r.Value = append(all, k.unknown...)
	return r, k.failed.ErrorOrNil()
}

func (k *killer) printLines(w io.Writer) error {
	gone := 0
	for _, one := range k.kills {
		t := one.told
		of := "in"
		if one.sandbox.IsExec() {
			of = "of"
		}
		line := fmt.Sprintf("%s %s, everything %s it is gone (%s)", one.sandbox.Title(), t.Status, of, t.Verdict)
		switch {
		case t.Verdict == result.Unproven:
			line = one.sandbox.Title() + ": unproven" + listSurvivors(t.Survivors)
		case t.Already:
			line = one.sandbox.Title() + " had ended: " + t.Status
		}
		if t.Verdict != result.Unproven {
			gone++
		}
		fmt.Fprintln(w, line)
	}
	switch {
	case k.many() && len(k.kills) == 0:
		fmt.Fprintln(w, "0 killed, looked in", k.where)
	case k.many():
		fmt.Fprintln(w, gone, "killed")
	}
	return nil
}

// listSurvivors lists the remaining processes that are visible from here.
func listSurvivors(left []result.Survivor) string {
	text := ", " + output.Count(len(left), "process", "es")
	switch len(left) {
	case 0:
		return ""
	case 1:
		text += " is left"
	default:
		text += " are left"
	}
	for _, s := range left {
		text += fmt.Sprintf("\n  %d %s %s", s.PID, s.State, output.Printable(s.Comm))
	}
	return text
}
