package slot

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// OnDemand is a source that builds each slot on demand.
type OnDemand struct{}

// Take builds a sandbox.
func (OnDemand) Take(ctx context.Context, _ string, p Policy) (_ Slot, err error) {
	defer func() {
		if err != nil {
			p.Parts.Unused()
			p.Parts.End()
		}
	}()
	plan, err := room.Prepare(p.Policy, room.ThisCaller())
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	c := &cold{dir: p.Workdir, proof: p.ProofTimeout}
	own, release := supervise.Outlive(ctx)
	if c.room, err = sandbox.NewRoom(own, plan, p.Parts, supervise.Options{Limits: p.Limits, Timeout: p.Lifetime, ProofTimeout: p.ProofTimeout}); err != nil {
		return nil, err
	}
	if !release() {
		_, _ = c.room.Close() // the caller is gone
		return nil, &result.Error{Code: "ended", Message: "the call was canceled before it started", Err: context.Cause(ctx)}
	}
	return c, nil
}

// Rooms returns 0: there is no pool.
func (OnDemand) Rooms() (idle, all, left int) { return 0, 0, 0 }

// cold is a slot with its own sandbox.
type cold struct {
	room  *sandbox.Room
	dir   string
	proof time.Duration

	mu    sync.Mutex
	files *workspace.Dir
}

func (c *cold) Kind() Kind { return Cold }

func (c *cold) Start(ctx context.Context, command Command) (Running, error) {
	command.Attended = false // the deadline holds even if Wait is called late
	command.ProofTimeout = cmp.Or(command.ProofTimeout, c.proof)
	run, err := c.room.Exec(ctx, command.Args, command.Env, command.Dir, command.Options)
	if err != nil {
		return nil, err
	}
	return run, nil
}

func (c *cold) Files() (*workspace.Dir, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.files != nil {
		return c.files, nil
	}
	init, err := proc.FromPidfd(c.room.Access.Init)
	if err != nil {
		return nil, err
	}
	defer init.Close()
	root, err := init.OpenRoot()
	if err != nil {
		return nil, err
	}
	dir := c.dir
	if dir == "" {
		dir = room.Home
	}
	c.files, err = workspace.Open(root, dir, c.room.Access.Cred())
	return c.files, err
}

func (c *cold) Ended() <-chan struct{} { return c.room.Ended() }

func (c *cold) Give() (*result.Result, error) {
	if c.files != nil {
		c.files.Close() // it keeps the sandbox's memory in use
	}
	return c.room.Close()
}
