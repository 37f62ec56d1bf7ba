// Package result says how a run ended, as a value, and which exit code that
// means. It knows nothing of processes; whoever saw the end fills it in.
package result

import (
	"errors"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Cause is the one thing that ended a run. It is decided once, before anything
// is killed: afterwards every end looks like SIGKILL.
type Cause string

const (
	Exited      Cause = "exited"       // the command returned
	Signaled    Cause = "signaled"     // the command died of a signal that we did not cause
	Timeout     Cause = "timeout"      // the deadline
	IdleTimeout Cause = "idle-timeout" // no exec has run in it for long enough
	Killed      Cause = "killed"       // sbxrun was asked to kill it
	Canceled    Cause = "canceled"     // sbxrun itself was signalled
	StartFailed Cause = "start-failed" // the command never ran
	Lost        Cause = "lost"         // the sandbox was ended from outside, not by sbxrun
	OOM         Cause = "oom"          // the kernel killed for want of memory
	CPUTime     Cause = "cpu-time"     // the limit on CPU time
	OutputLimit Cause = "output-limit" // it has written more than it may
	FileSize    Cause = "fsize"        // the command died of SIGXFSZ, under a limit on files
)

// Status is the cause boiled down to what a list shows.
type Status string

const (
	StatusCompleted Status = "completed"
	StatusFailed    Status = "failed"
	StatusKilled    Status = "killed"
	StatusError     Status = "error"
)

// Verdict says whether the sandbox is known to be gone.
type Verdict string

const (
	Proven        Verdict = "proven"
	Unproven      Verdict = "unproven"
	NotApplicable Verdict = "not_applicable" // nothing was started
)

// Exit codes of sbxrun itself, next to the command's own and 128+n. They follow
// timeout(1) and the shells; 123 is free in both.
const (
	ExitOutput        = 74 // EX_IOERR of sysexits.h: it has happened, but could not be told
	ExitBusy          = 75 // EX_TEMPFAIL of sysexits.h: try again later
	ExitInUse         = 76 // a volume is in use: try again later
	ExitUnproven      = 123
	ExitTimeout       = 124
	ExitNotStarted    = 125
	ExitNotExecutable = 126
	ExitNotFound      = 127
	ExitKilled        = 137
	// As the shells show what died of the signal that the kernel has for such
	// a limit: SIGXCPU of RLIMIT_CPU, and SIGXFSZ of RLIMIT_FSIZE.
	ExitCPUTime     = 128 + int(unix.SIGXCPU)
	ExitOutputLimit = 128 + int(unix.SIGXFSZ)
)

// Payload is the command's own end. Exactly one of ExitCode and Signal counts:
// Signal is 0 if it exited.
type Payload struct {
	ExitCode int
	Signal   syscall.Signal
}

// FromWaitStatus is the payload's end as the kernel tells it.
func FromWaitStatus(ws unix.WaitStatus) Payload {
	if ws.Signaled() {
		return Payload{Signal: ws.Signal()}
	}
	return Payload{ExitCode: ws.ExitStatus()}
}

// Code is the exit code in the shells' convention, 128+n for a signal.
func (p Payload) Code() int {
	if p.Signal != 0 {
		return 128 + int(p.Signal)
	}
	return p.ExitCode
}

// SignalName is the name without SIG, as kill(1) takes it: "KILL".
func SignalName(sig syscall.Signal) string {
	if name := unix.SignalName(sig); name != "" {
		return strings.TrimPrefix(name, "SIG")
	}
	return strconv.Itoa(int(sig)) // a real-time signal has only its number
}

// Survivor is a process that was still there when the proof deadline passed.
type Survivor struct {
	PID   int    `json:"pid"`
	Comm  string `json:"comm"`
	State string `json:"state"`
}

// Limit is one requested limit, as the report shows it.
type Limit struct {
	Name      string  `json:"name"`      // as the flag, without dashes
	Requested float64 `json:"requested"` // bytes, tasks, CPUs, milliseconds, or the value itself
	Enforced  bool    `json:"enforced"`
	Mechanism string  `json:"mechanism,omitempty"` // "cgroup v2 memory.max"; "" if not enforced
	Hit       bool    `json:"hit"`
	Reason    string  `json:"reason,omitempty"` // why it is not enforced
}

// Result is how a run ended.
type Result struct {
	Started bool // the command was, or may have been, executed
	Cause   Cause
	Signal  syscall.Signal // Canceled: the signal that sbxrun got
	Payload *Payload       // nil if unknown

	StartedAt time.Time     // when sbxrun began
	Duration  time.Duration // from there to the end of the teardown
	Setup     time.Duration // from there until the command could run
	Teardown  time.Duration // from the decision to end it until the proof

	Verdict   Verdict
	Strays    int
	Survivors []Survivor
	Gone      <-chan struct{} // Unproven: closed when all survivors have exited; nil if unknown

	CPUUser, CPUSystem time.Duration
	MaxRSS             int64 // bytes
	MemoryPeak         int64 // bytes, of all together; 0 if unknown
	PidsPeak           int64 // tasks at once; 0 if unknown

	Limits []Limit // those that were asked for

	Err *Error // why the command did not start, or what the teardown could not do

	// PreserveStatus makes the exit code after a timeout that of the payload.
	PreserveStatus bool
}

// ExitCode is what sbxrun exits with.
func (r Result) ExitCode() int {
	if r.Verdict == Unproven {
		return ExitUnproven
	}
	// The end of the command counts first; but that its output was lost is not success.
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
		case r.Payload == nil: // killed with its init, which alone could tell
			return ExitKilled
		}
		return r.Payload.Code()
	case Canceled:
		return 128 + int(r.Signal)
	case Killed, Lost, OOM:
		// Lost too: init was killed, and the kernel killed the command with it.
		return ExitKilled
	}
	if r.Err != nil && r.Err.ExitCode != 0 {
		return r.Err.ExitCode
	}
	return ExitNotStarted
}

// Status is derived from the cause; an exit code counts only where the cause
// is the command's own end.
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

// Error is a failure that is not the command's: what happened, and what to type
// against it. Code is for programs and stable; Message and Hint are for people.
type Error struct {
	Code     string
	Message  string
	Hint     string
	ExitCode int   // 0 stands for ExitNotStarted
	Err      error // the cause, if there is one, already part of Message
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// Report is the error as JSON documents have it.
func (e *Error) Report() *ReportError {
	return &ReportError{Code: e.Code, Message: e.Message, Hint: e.Hint}
}

// AsError is the [*Error] that err is or wraps; or else one with this code, and what was being done
// before its words.
func AsError(err error, code, doing string) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Code: code, Message: doing + ": " + err.Error(), Err: err}
}

// ErrUnknown says that init was killed, and the payload with it, so that nobody can
// tell how the payload ended.
var ErrUnknown = errors.New("the command's end is unknown")
