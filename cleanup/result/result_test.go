package result

import (
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestFromWaitStatus(t *testing.T) {
	tests := []struct {
		status unix.WaitStatus
		want   Payload
		code   int
	}{
		{0, Payload{}, 0},
		{1 << 8, Payload{ExitCode: 1}, 1},
		{137 << 8, Payload{ExitCode: 137}, 137}, // not SIGKILL
		{255 << 8, Payload{ExitCode: 255}, 255},
		{9, Payload{Signal: syscall.SIGKILL}, 137},
		{15, Payload{Signal: syscall.SIGTERM}, 143},
		{11 | 0x80, Payload{Signal: syscall.SIGSEGV}, 139}, // core dumped
		{34, Payload{Signal: 34}, 162},                     // a real-time signal
		{64, Payload{Signal: 64}, 192},
	}
	for _, tt := range tests {
		got := FromWaitStatus(tt.status)
		check.NoDiff(t, cmp.Diff(tt.want, got), "wait status %#x (-want +got)", tt.status)
		check.That(t, got.Code() == tt.code, "wait status %#x: code %d, want %d", tt.status, got.Code(), tt.code)
	}
}

func TestSignalName(t *testing.T) {
	for sig, want := range map[syscall.Signal]string{1: "HUP", 2: "INT", 9: "KILL", 13: "PIPE", 15: "TERM", 31: "SYS", 34: "34", 64: "64"} {
		check.Equal(t, SignalName(sig), want, "signal %d", int(sig))
	}
	for _, sig := range []syscall.Signal{0, 34, 64, 65, -1} {
		got := SignalName(sig)
		check.That(t, got != "" && !strings.HasPrefix(got, "SIG"), "signal %d: %q", int(sig), got)
	}
}

func TestExitCodeAndStatus(t *testing.T) {
	type end struct {
		Code   int
		Status Status
	}
	exited := func(code int) *Payload { return &Payload{ExitCode: code} }
	died := func(sig syscall.Signal) *Payload { return &Payload{Signal: sig} }
	tests := []struct {
		name string
		in   Result
		want end
	}{
		{"exit 0", Result{Cause: Exited, Payload: exited(0)}, end{0, StatusCompleted}},
		{"exit 1", Result{Cause: Exited, Payload: exited(1)}, end{1, StatusFailed}},
		// The command's own codes, whatever else they mean.
		{"exit 124", Result{Cause: Exited, Payload: exited(124)}, end{124, StatusFailed}},
		{"exit 125", Result{Cause: Exited, Payload: exited(125)}, end{125, StatusFailed}},
		{"exit 137", Result{Cause: Exited, Payload: exited(137)}, end{137, StatusFailed}},
		{"died of KILL", Result{Cause: Signaled, Payload: died(unix.SIGKILL)}, end{137, StatusFailed}},
		{"died of a real-time signal", Result{Cause: Signaled, Payload: died(34)}, end{162, StatusFailed}},

		{"timeout", Result{Cause: Timeout, Payload: died(unix.SIGKILL)}, end{124, StatusKilled}},
		{"timeout, end unknown", Result{Cause: Timeout}, end{124, StatusKilled}},
		{"timeout, went by itself in the grace period", Result{Cause: Timeout, Payload: exited(0)}, end{124, StatusKilled}},
		{"timeout, status preserved", Result{Cause: Timeout, PreserveStatus: true, Payload: exited(7)}, end{7, StatusKilled}},
		{"timeout, end by a signal preserved", Result{Cause: Timeout, PreserveStatus: true, Payload: died(unix.SIGINT)}, end{130, StatusKilled}},
		{"timeout, end with its init preserved", Result{Cause: Timeout, PreserveStatus: true}, end{137, StatusKilled}},
		{"timeout, preserved but unproven", Result{Cause: Timeout, PreserveStatus: true, Verdict: Unproven, Payload: exited(0)}, end{123, StatusKilled}},
		{"preserved, no timeout", Result{Cause: Canceled, PreserveStatus: true, Signal: unix.SIGTERM, Payload: exited(0)}, end{143, StatusKilled}},
		{"killed", Result{Cause: Killed}, end{137, StatusKilled}},
		{"killed, went by itself in the grace period", Result{Cause: Killed, Payload: exited(0)}, end{137, StatusKilled}},
		{"Ctrl-C", Result{Cause: Canceled, Signal: unix.SIGINT}, end{130, StatusKilled}},
		{"Ctrl-C, command took it well", Result{Cause: Canceled, Signal: unix.SIGINT, Payload: exited(0)}, end{130, StatusKilled}},
		{"terminal closed", Result{Cause: Canceled, Signal: unix.SIGHUP}, end{129, StatusKilled}},
		{"killed from outside", Result{Cause: Lost}, end{137, StatusError}},
		{"killed from outside, end known", Result{Cause: Lost, Payload: died(unix.SIGKILL)}, end{137, StatusError}},

		{"not started", Result{Cause: StartFailed}, end{125, StatusError}},
		{"not started, error without a code", Result{Cause: StartFailed, Err: &Error{}}, end{125, StatusError}},
		{"not executable", Result{Cause: StartFailed, Err: &Error{ExitCode: ExitNotExecutable}}, end{126, StatusError}},
		{"not found", Result{Cause: StartFailed, Err: &Error{ExitCode: ExitNotFound}}, end{127, StatusError}},
		{"zero value", Result{}, end{125, StatusError}},

		// An unproven teardown takes precedence over any cause.
		{"unproven, exit 0", Result{Verdict: Unproven, Cause: Exited, Payload: exited(0)}, end{123, StatusCompleted}},
		{"unproven, timeout", Result{Verdict: Unproven, Cause: Timeout}, end{123, StatusKilled}},
		{"unproven, Ctrl-C", Result{Verdict: Unproven, Cause: Canceled, Signal: unix.SIGINT}, end{123, StatusKilled}},
		{"proven, error beside it", Result{Verdict: Proven, Cause: Exited, Payload: exited(3), Err: &Error{ExitCode: 126}}, end{3, StatusFailed}},
	}
	for _, tt := range tests {
		check.NoDiff(t, cmp.Diff(tt.want, end{tt.in.ExitCode(), tt.in.Status()}), "%s (-want +got)", tt.name)
	}
}
