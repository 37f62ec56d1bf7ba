// Package result describes how a run ended, as a value, and the resulting exit code. It does not deal with processes:
// its users fill in the values.
package result

import (
	"errors"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Cause is the single reason for the end of a run. It is decided once, before anything is killed, because
// afterwards every end looks like SIGKILL.
type Cause string

const (
	Exited      Cause = "exited"       // the command exited
	Signaled    Cause = "signaled"     // the command died of a signal not caused by sbxrun
	Timeout     Cause = "timeout"      // the deadline passed
	IdleTimeout Cause = "idle-timeout" // no exec ran for the idle timeout
	Killed      Cause = "killed"       // sbxrun was asked to kill it
	Canceled    Cause = "canceled"     // sbxrun itself got a signal
	StartFailed Cause = "start-failed" // the command never ran
	Lost        Cause = "lost"         // the sandbox was ended from outside, not by sbxrun
	OOM         Cause = "oom"          // the kernel killed a process because memory ran out
	CPUTime     Cause = "cpu-time"     // the limit on CPU time was reached
	OutputLimit Cause = "output-limit" // too much output
	FileSize    Cause = "fsize"        // the command died of SIGXFSZ, under a limit on files
)

// Status summarises the cause for lists.
type Status string

const (
	StatusCompleted Status = "completed"
	StatusFailed    Status = "failed"
	StatusKilled    Status = "killed"
	StatusError     Status = "error"
)

// Verdict tells whether all processes of the sandbox are known to have exited.
type Verdict string

const (
	Proven        Verdict = "proven"
	Unproven      Verdict = "unproven"
	NotApplicable Verdict = "not_applicable" // nothing was started
)

// Exit codes of sbxrun itself, besides the command's own and 128+n. They follow timeout(1) and the shells;
// 123 is unused by both.
const (
	ExitOutput        = 74 // EX_IOERR of sysexits.h: done, but the output or report was lost
	ExitBusy          = 75 // EX_TEMPFAIL of sysexits.h: try again later
	ExitInUse         = 76 // a volume or an image is in use: try again later
	ExitUnproven      = 123
	ExitTimeout       = 124
	ExitNotStarted    = 125
	ExitNotExecutable = 126
	ExitNotFound      = 127
	ExitKilled        = 137
	// The shells' code for the signal of a similar kernel limit: SIGXCPU for RLIMIT_CPU, and SIGXFSZ for
	// RLIMIT_FSIZE.
	ExitCPUTime     = 128 + int(unix.SIGXCPU)
	ExitOutputLimit = 128 + int(unix.SIGXFSZ)
)

// Payload is the command's own end: either an exit code, or a signal that is not 0.
type Payload struct {
	ExitCode int
	Signal   syscall.Signal
}

// FromWaitStatus converts a wait status.
func FromWaitStatus(ws unix.WaitStatus) Payload {
	if ws.Signaled() {
		return Payload{Signal: ws.Signal()}
	}
	return Payload{ExitCode: ws.ExitStatus()}
}

// Code returns the exit code in the shells' convention, 128+n for a signal.
func (p Payload) Code() int {
	if p.Signal != 0 {
		return 128 + int(p.Signal)
	}
	return p.ExitCode
}

// SignalName returns the name without SIG, as in kill(1): "KILL".
func SignalName(sig syscall.Signal) string {
	if name := unix.SignalName(sig); name != "" {
		return strings.TrimPrefix(name, "SIG")
	}
	return strconv.Itoa(int(sig)) // real-time signals have only numbers
}

// Survivor is a process that was still alive at the proof timeout.
type Survivor struct {
	PID   int    `json:"pid"`
	Comm  string `json:"comm"`
	State string `json:"state"`
}

// Limit is a requested limit, as in the report.
type Limit struct {
	Name      string  `json:"name"`      // name of the flag without dashes
	Requested float64 `json:"requested"` // bytes, tasks, CPUs, milliseconds, or the value itself
	Enforced  bool    `json:"enforced"`
	Mechanism string  `json:"mechanism,omitempty"` // "cgroup v2 memory.max"; "" if not enforced
	Hit       bool    `json:"hit"`
	Reason    string  `json:"reason,omitempty"` // why it is not enforced
}

// Result describes how a run ended.
type Result struct {
	Started bool // whether the command was, or may have been, executed
	Cause   Cause
	Signal  syscall.Signal // signal received by sbxrun, for Canceled
	Payload *Payload       // nil if unknown

	StartedAt time.Time     // start of sbxrun
	Duration  time.Duration // from StartedAt to the end of the teardown
	Setup     time.Duration // from StartedAt until the command could run
	Teardown  time.Duration // from the decision to end the run until the proof

	Verdict   Verdict
	Strays    int
	Survivors []Survivor
	Gone      <-chan struct{} // Unproven: closed when all survivors have exited; nil if unknown

	CPUUser, CPUSystem time.Duration
	MaxRSS             int64 // bytes
	MemoryPeak         int64 // bytes of all processes together; 0 if unknown
	PidsPeak           int64 // maximum number of tasks; 0 if unknown

	Limits []Limit // requested limits

	Err *Error // why the command did not start, or what failed in the teardown

	// PreserveStatus keeps the command's exit code for a run that timed out.
	PreserveStatus bool
}

// ExitCode returns the exit code of sbxrun.
func (r Result) ExitCode() int {
	if r.Verdict == Unproven {
		return ExitUnproven
	}
	// The command's end takes precedence, but lost output is not a success.
	if lost := r.Err != nil && r.Err.ExitCode == ExitOutput; lost && (r.Cause == Canceled || r.Cause == Exited && r.Payload.Code() == 0) {
		return ExitOutput
	}
	switch r.Cause {
	case Exited, Signaled, FileSize:
		return r.Payload.Code()
	case CPUTime:
		return ExitCPUTime
	case OutputLimit:
		return ExitOutputLimit
	case Timeout, IdleTimeout:
		switch {
		case !r.PreserveStatus:
			return ExitTimeout
		case r.Payload == nil: // killed with its init, which did not report the code
			return ExitKilled
		}
		return r.Payload.Code()
	case Canceled:
		return 128 + int(r.Signal)
	case Killed, Lost, OOM:
		// In case of Lost, the kernel killed the command when init was killed.
		return ExitKilled
	}
	if r.Err != nil && r.Err.ExitCode != 0 {
		return r.Err.ExitCode
	}
	return ExitNotStarted
}

// Status returns the status for the cause; the exit code matters only if the command exited by itself.
func (r Result) Status() Status {
	switch r.Cause {
	case Exited:
		if r.Payload.Code() == 0 {
			return StatusCompleted
		}
		return StatusFailed
	case Signaled, FileSize:
		return StatusFailed
	case Timeout, IdleTimeout, Killed, Canceled, OOM, CPUTime, OutputLimit:
		return StatusKilled
	}
	return StatusError
}

// Error is a failure of sbxrun, not of the command. Code is stable and meant for programs; Message and Hint are for
// people, and Hint is the remedy.
type Error struct {
	Code     string
	Message  string
	Hint     string
	ExitCode int   // 0 means ExitNotStarted
	Err      error // the cause, if any; Message includes it
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// Report returns the error in the form of JSON documents.
func (e *Error) Report() *ReportError {
	return &ReportError{Code: e.Code, Message: e.Message, Hint: e.Hint}
}

// AsError returns the [*Error] that err is or wraps, or else one with this code, whose message begins with
// the failed operation.
func AsError(err error, code, doing string) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Code: code, Message: doing + ": " + err.Error(), Err: err}
}

// CodeOf returns the code of the [*Error] that err is or wraps. It is empty for any other error.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

// ErrUnknown means that the command's end is unknown, because init was killed, and the command with it.
var ErrUnknown = errors.New("the command's end is unknown")
