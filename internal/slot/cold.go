package slot

import (
	"context"
	"sync"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// OnDemand is the source of places that are built when they are asked for.
type OnDemand struct{}

// Take builds a room.
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
	c := &cold{dir: p.Workdir}
	if c.room, err = job.NewRoom(ctx, plan, job.Spec{Limits: p.Limits, Timeout: p.Lifetime, Parts: p.Parts}); err != nil {
		return nil, err
	}
	if !c.room.Outlive() {
		_, _ = c.room.Close() // nobody wants it any more
		return nil, &result.Error{Code: "ended", Message: "the call was canceled before it started", Err: context.Cause(ctx)}
	}
	return c, nil
}

// Rooms returns 0: none is made ahead.
func (OnDemand) Rooms() (idle, all, left int) { return 0, 0, 0 }

// cold is a room of its own.
type cold struct {
	room *job.Room
	dir  string

	mu    sync.Mutex
	files *workspace.Dir
}

func (c *cold) Kind() Kind { return Cold }

func (c *cold) Start(ctx context.Context, command Command) (Running, error) {
	command.Attended = false // its deadline is kept, however late Wait is called
	run, err := c.room.Start(ctx, command.Args, command.Env, command.Dir, command.Spec)
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
	init, err := proc.FromPidfd(c.room.Init)
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
	c.files, err = workspace.Open(root, dir, c.room.Access.Cred)
	return c.files, err
}

func (c *cold) Ended() <-chan struct{} { return c.room.Ended() }

func (c *cold) Give() (*result.Result, error) {
	if c.files != nil {
		c.files.Close() // it holds the room's memory
	}
	return c.room.Close()
}
