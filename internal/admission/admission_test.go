package admission

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Explain turns errors that a lack of tasks caused into busy, and leaves others unchanged.
func TestExplain(t *testing.T) {
	start := &proc.StartError{Step: "fork the keeper", Err: unix.EAGAIN}
	// explained calls Explain while no fork of another process is refused.
	explained := func(permit *Permit, err *result.Error) *result.Error {
		if permit == nil {
			return permit.Explain(err)
		}
		for {
			now, lookErr := Look()
			check.Must(t, lookErr)
			own := *permit
			own.refused += now.Refused
			e := own.Explain(err)
			later, lookErr := Look()
			check.Must(t, lookErr)
			if later.Refused == now.Refused {
				return e
			}
		}
	}
	unpressed := &Permit{need: 1} // refused counts from the current number
	for _, tt := range []struct {
		name string
		a    *Permit
		err  *result.Error
		busy bool
	}{
		{"a fork, without a permit", nil, &result.Error{Code: "setup", Message: "m", Err: fmt.Errorf("x: %w", start)}, true},
		{"a fork", unpressed, &result.Error{Code: "setup", Message: "m", Err: start}, true},
		{"into a sandbox", unpressed, &result.Error{Code: "enter", Message: "m", Err: start}, true},
		{"of a supervisor", nil, &result.Error{Code: "detach", Message: "m", Err: unix.EAGAIN}, true},
		{"another errno", unpressed, &result.Error{Code: "setup", Message: "m", Err: unix.EPERM}, false},
		{"bubblewrap failed, no fork was refused", unpressed, &result.Error{Code: "setup", Message: "m"}, false},
		{"bubblewrap failed, forks were refused", &Permit{refused: -1, need: 1}, &result.Error{Code: "setup", Message: "m"}, true},
		{"bubblewrap failed, no task is free", &Permit{need: 1 << 40}, &result.Error{Code: "setup", Message: "m"}, true},
		{"a lock's EAGAIN", unpressed, &result.Error{Code: "state", Message: "m", Err: unix.EAGAIN}, false},
		{"no such command, no task is free", &Permit{refused: -1, need: 1 << 40}, &result.Error{Code: "not-found", Message: "m", ExitCode: result.ExitNotFound}, false},
	} {
		e := explained(tt.a, tt.err)
		busy := e.Code == "busy" && e.ExitCode == result.ExitBusy && e.Hint != ""
		check.That(t, busy == tt.busy, "%s: %+v", tt.name, e)
		check.That(t, errors.Is(e, tt.err), "%s: the cause is lost: %v", tt.name, e)
	}
	e := unpressed.Explain(nil)
	check.That(t, e == nil, "no error is %v", e)
}
