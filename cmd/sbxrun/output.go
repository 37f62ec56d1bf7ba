package main

import (
	"errors"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// What becomes of more output than there may be: the values of --output-limit.
const (
	outputKill     = "kill"
	outputTruncate = "truncate"
)

// outputLimit is how much a command may write, and whether it did.
type outputLimit struct {
	action string // "" if there is none
	size   int64
	hit    atomic.Bool
	lost   atomic.Pointer[result.Error] // why output could not be passed on
}

// broken ends the run because its output cannot be passed on. A pipe that nobody reads
// any more is what SIGPIPE is for; any other error is told, and has its own exit code.
func (j *job) broken(err error) {
	if !errors.Is(err, syscall.EPIPE) {
		j.output.lost.CompareAndSwap(nil, &result.Error{Code: "output", ExitCode: result.ExitOutput, Message: "cannot pass on the command's output: " + err.Error(), Err: err})
	}
	j.signals.cancelBy(syscall.SIGPIPE)
}

// checkStandardStreams refuses a directory as stdin, stdout or stderr: the command would
// have it, and openat(2) finds its way from there to all files of the host, whatever the
// sandbox shows.
func checkStandardStreams() error {
	for fd, name := range []string{"stdin", "stdout", "stderr"} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return &result.Error{Code: "setup", Message: name + " is a directory, from which the command could reach all files of the host", Hint: "redirect it, to /dev/null for example"}
		}
	}
	return nil
}

// openStreams makes the payload's streams as the flags say.
func (j *job) openStreams() (*streams, error) {
	if err := checkStandardStreams(); err != nil {
		return nil, err
	}
	j.output.action, j.output.size = j.tells.OutputLimit, int64(j.tells.MaxOutput)
	b := bound{size: j.output.size, limited: j.output.action != ""}
	b.exceeded = func() {
		if !j.output.hit.Swap(true) && j.output.action == outputKill {
			j.signals.cancel(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
		}
	}
	return openStreams(j.tells.JSON, j.tty, b, j.broken)
}

// checkOutput finds what is wrong with the flags for the output.
func (j *job) checkOutput() error {
	if j.tells.JSON && j.tty {
		return usageError(errJSONOnTerminal)
	}
	return nil
}

var errJSONOnTerminal = errors.New("--json and --tty do not go together: a terminal has one stream for both")

// limits is the limit as the report has it, if it was asked for.
func (o *outputLimit) limits() []result.Limit {
	if o.action == "" {
		return nil
	}
	return []result.Limit{{Name: "max-output", Requested: float64(o.size), Enforced: true, Mechanism: o.action, Hit: o.hit.Load()}}
}
