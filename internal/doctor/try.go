package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Try runs the command of a policy in a sandbox, for example an interpreter with --version, and reports whether it
// works: it returns nil if the command exits with code 0 within 5 s. The calling process becomes a child subreaper.
func Try(ctx context.Context, caller room.Caller, policy room.Policy) error {
	policy.Alone = true
	plan, err := room.Prepare(policy, caller)
	if err != nil {
		return err
	}
	defer plan.Close()
	res, err := newExam(ctx, caller).carryOut(plan, supervise.Terms{Timeout: probeBound, Begin: time.Now()}, result.Exited)
	if err != nil {
		return err
	}
	if code := res.Payload.Code(); code != 0 {
		return fmt.Errorf("%q exited with code %d in the sandbox", policy.Command[0], code)
	}
	return nil
}
