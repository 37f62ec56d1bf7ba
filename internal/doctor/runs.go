package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// plan prepares a sandbox as the run command does.
func (e *exam) plan(policy room.Policy) (*room.Plan, error) {
	policy.Workdir, policy.Alone = "/", true
	return room.Prepare(policy, e.caller)
}

// runBound limits a complete run.
const runBound = 10 * time.Second

// carryOut executes a plan as the run command does. It is an error if the run ends with a cause other than want.
func (e *exam) carryOut(plan *room.Plan, c *supervise.Command, want result.Cause) (res result.Result, err error) {
	stderr, err := memoryFile()
	if err != nil {
		return res, err
	}
	defer stderr.Close()
	ctx, cancel := e.withinBound()
	defer cancel()
	c.Place.Plan, c.Stderr, c.ProofTimeout = plan, stderr, probeBound
	res = *c.Run(ctx)
	return res, judge(res, readFrom(stderr), want)
}

// withinBound returns a context in which a run is canceled after runBound.
func (e *exam) withinBound() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(e.ctx, runBound, supervise.Request{Cause: result.Canceled, Signal: unix.SIGTERM})
}

// judge checks the result of a run. words is bwrap's stderr.
func judge(res result.Result, words string, want result.Cause) error {
	f := understand(words)
	switch {
	case res.Verdict == result.Unproven && res.Err != nil:
		return fmt.Errorf("the sandbox did not end in time: %s", res.Err.Message)
	case res.Verdict == result.Unproven:
		return errors.New("the sandbox did not end in time")
	case res.Cause == want && res.Verdict == result.Proven:
		return nil
	case res.Cause == result.Canceled:
		return fmt.Errorf("the run did not end within %v", runBound)
	case f.step != stepOther && f.step != stepPayload || f.errno == unix.EAGAIN:
		return f
	}
	err := fmt.Errorf("the run ended with cause %s instead of %s", res.Cause, want)
	if res.Err != nil {
		err = res.Err
	}
	if f.text != "" {
		err = fmt.Errorf("%w: %s", err, f.text)
	}
	return err
}

// run prepares a policy and executes it with carryOut.
func (e *exam) run(want result.Cause, o supervise.Options, group *limits.Group, policy room.Policy) (res result.Result, err error) {
	begin := time.Now()
	plan, err := e.plan(policy)
	if err != nil {
		return res, err
	}
	defer plan.Close()
	return e.carryOut(plan, &supervise.Command{Options: o, Group: group, Begin: begin}, want)
}

// checkRun measures a run from start to end.
func (e *exam) checkRun() (string, error) {
	res, err := e.run(result.Exited, supervise.Options{Timeout: probeBound}, nil, room.Policy{Command: []string{"true"}})
	if err != nil {
		return "", err
	}
	if code := res.Payload.Code(); code != 0 {
		return "", fmt.Errorf("`true` exited with code %d in the sandbox", code)
	}
	ms := result.Milliseconds(res.Duration)
	e.RoundTrip = &ms
	return fmt.Sprintf("`true` from start to %s end in %.1f ms", res.Verdict, ms), nil
}

// trialTimeout is the deadline of runs that must time out.
const trialTimeout = 20 * time.Millisecond

func (e *exam) checkDeadline() (string, error) {
	res, err := e.run(result.Timeout, supervise.Options{Timeout: trialTimeout}, nil, room.Policy{Command: []string{"sleep", "60"}})
	return fmt.Sprintf("killed after %v; all processes had exited %.1f ms later, %s", trialTimeout, result.Milliseconds(res.Teardown), res.Verdict), err
}

// checkGrace lets init send SIGTERM to all processes of a command.
func (e *exam) checkGrace() (string, error) {
	res, err := e.run(result.Timeout, supervise.Options{Timeout: trialTimeout, Grace: probeBound}, nil, room.Policy{Command: []string{"sleep", "60"}})
	if err == nil && res.Err != nil {
		err = warning{failure{step: stepCall, text: res.Err.Message}, "--grace does not work"}
	}
	return "SIGTERM to all processes of the command, from its init", err
}

// checkExec runs a command in a running sandbox.
func (e *exam) checkExec() (string, error) {
	plan, err := e.plan(room.Policy{})
	if err != nil {
		return "", err
	}
	defer plan.Close()
	ctx, cancel := e.withinBound()
	defer cancel()
	bounds := supervise.Options{Timeout: probeBound, ProofTimeout: probeBound, Attended: true}
	sandbox := &supervise.Command{Options: bounds, Place: supervise.Place{Plan: plan}}
	if err := sandbox.Start(ctx); err != nil {
		return "", err
	}
	entry := plan.Entry()
	entry.Command = []string{"/bin/true"}
	command := &supervise.Command{Options: bounds, Place: supervise.Place{Entry: entry, Room: sandbox.Kept().Room}}
	inside := command.Run(ctx)
	sandbox.Kill()
	outside, _ := sandbox.Wait()
	text := fmt.Sprintf("`true` ended with cause %q", inside.Cause)
	switch {
	case inside.Cause == result.Exited && inside.ExitCode() == 0:
		return fmt.Sprintf("`true` in a running sandbox, from start to %s end in %.1f ms (setns with a pidfd)", inside.Verdict, result.Milliseconds(inside.Duration)), nil
	case inside.Err != nil:
		text = inside.Err.Message
	case outside.Err != nil:
		text = outside.Err.Message
	}
	return "", warning{failure{step: stepCall, text: text}, "sbxrun exec does not work"}
}

// checkStaged binds a directory that only root can reach, through a descriptor in bwrap's mount namespace
// (open_tree(2), move_mount(2)), and writable with an idmapped owner (mount_setattr(2)).
func (e *exam) checkStaged() (string, error) {
	dir, err := os.MkdirTemp("", "sbxrun-doctor-")
	if err != nil {
		return "", warning{error: fmt.Errorf("not tried, for lack of a directory: %w", err)}
	}
	defer os.RemoveAll(dir) // best effort
	// dir has mode 0700.
	inner := filepath.Join(dir, "inner")
	if err := os.Mkdir(inner, 0o700); err != nil {
		return "", warning{error: fmt.Errorf("not tried, for lack of a directory: %w", err)}
	}
	bind := func(kind room.MountKind) error {
		_, err := e.run(result.Exited, supervise.Options{Timeout: probeBound}, nil,
			room.Policy{Command: []string{"true"}, Mounts: []room.Mount{{Kind: kind, Source: inner, Dest: "/mnt/bound"}}})
		return err
	}
	const seen = "bound by descriptor (open_tree, move_mount)"
	mapped := bind(room.ReadWrite)
	if mapped == nil {
		return seen + ", and writable with an idmapped owner (mount_setattr)", nil
	}
	if err := bind(room.ReadOnly); err != nil {
		return "", warning{failed(stepStaged, "", err), "--bind and a current directory do not work where only root can reach them"}
	}
	if errors.Is(mapped, unix.EINVAL) { // only this file system cannot be idmapped
		return seen + "; " + mapped.Error(), nil
	}
	return "", warning{failed(stepMapped, "", mapped), "-w and --bind do not work for root's files"}
}

// checkImages starts a sandbox in a root directory that has only an empty program, which cannot be executed, so the
// expected error comes after all mounts.
func (e *exam) checkImages() (string, error) {
	dir, err := os.MkdirTemp("", "sbxrun-doctor-")
	if err == nil {
		defer os.RemoveAll(dir) // best effort
		err = errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, e.uid, e.gid), os.WriteFile(dir+"/true", nil, 0o755))
	}
	if err != nil {
		return "", warning{error: fmt.Errorf("not tried, for lack of a directory: %w", err)}
	}
	res, err := e.run(result.StartFailed, supervise.Options{Timeout: probeBound}, nil,
		room.Policy{Command: []string{"/true"}, Cwd: room.CwdNone, Mounts: []room.Mount{{Kind: room.ReadOnly, Source: dir, Dest: "/", Owned: true}}})
	if err == nil && res.Err != nil && res.Err.Code != "not-found" && res.Err.Code != "not-executable" {
		err = res.Err
	}
	if err != nil {
		err = warning{err, "--image and --rootfs do not work"}
	}
	return "its own root directory, by overlayfs", err
}

// limit checks a run with one limit. Where the limit cannot be enforced, the finding is the refusal.
func (e *exam) limit(name string, request limits.Request) {
	e.warn(name, func() (string, error) {
		mechanism, err := e.tryLimit(request)
		if own, ok := errors.AsType[*result.Error](err); ok && strings.HasPrefix(own.Hint, limits.WritableCgroups) {
			err = failure{step: stepCgroups, text: err.Error()}
		}
		return mechanism, err
	})
}

func (e *exam) tryLimit(request limits.Request) (mechanism string, err error) {
	machine, err := limits.Detect()
	if err != nil {
		return "", err
	}
	plan, err := machine.Plan(request, true)
	if err != nil {
		return "", err
	}
	group, err := plan.Make("doctor-"+strconv.Itoa(os.Getpid()), false)
	if err != nil {
		return "", err
	}
	defer func() { _ = group.Remove(time.Now().Add(probeBound)) }() // best effort: usually the keeper has removed it
	if _, err = e.run(result.Exited, supervise.Options{Timeout: probeBound}, group, room.Policy{Command: []string{"true"}}); err != nil {
		err = warning{err, "a run with this limit does not work"}
	}
	return plan.Limits[0].Mechanism, err
}
