package place

import (
	"context"
	"os"
	"sync"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Rooms is the source of places that are built when they are asked for.
type Rooms struct{}

// Take builds a room.
func (Rooms) Take(ctx context.Context, _ string, p Policy) (Place, error) {
	c := &cold{room: bwrap.Room{Policy: p.Policy, Limits: p.Limits, Timeout: p.Lifetime}, dir: p.Dir}
	// A room ends with its context, and this one outlives the wait for it.
	started, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	if err := c.room.Start(started); err != nil {
		cancel()
		return nil, err
	}
	if !stop() {
		cancel()
		_, _ = c.room.Close() // nobody wants it any more
		return nil, &result.Error{Code: "ended", Message: "the call was ended before it began", Err: context.Cause(ctx)}
	}
	c.cancel = cancel
	return c, nil
}

// Rooms returns 0: none is made ahead.
func (Rooms) Rooms() (idle, all int) { return 0, 0 }

// cold is a room of its own.
type cold struct {
	room   bwrap.Room
	dir    string
	cancel context.CancelFunc

	mu    sync.Mutex
	files *workspace.Dir
}

func (c *cold) Kind() Kind { return Cold }

func (c *cold) Start(ctx context.Context, command Command) (Running, error) {
	run := c.room.Command(command.Args...)
	run.Env, run.Dir = command.Env, command.Dir
	run.Stdin, run.Stdout, run.Stderr, run.MaxOutput = command.Stdin, command.Stdout, command.Stderr, command.MaxOutput
	run.Limits, run.Timeout, run.Grace = command.Limits, command.Timeout, command.Grace
	if err := run.Start(ctx); err != nil {
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
	way := c.room.Way()
	init, err := proc.FromPidfd(way.Init)
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
	var user *proc.Cred
	if way.User != os.Geteuid() {
		user = &proc.Cred{UID: uint32(way.User), GID: uint32(way.Group)}
	}
	c.files, err = workspace.Open(root, dir, user)
	return c.files, err
}

func (c *cold) Ended() <-chan struct{} { return c.room.Ended() }

func (c *cold) Give() (*result.Result, error) {
	if c.files != nil {
		c.files.Close() // it holds the room's memory
	}
	res, err := c.room.Close()
	c.cancel()
	return res, err
}
