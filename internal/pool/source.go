package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sync"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Source provides warm slots for calls with one policy, and cold slots for all others: for calls with parts of
// their own, for sandboxes with a lifetime, which run more than one command, and for the server's own commands,
// whose tenant is "": a room would belong to that tenant, and the first tenant's call would find none.
type Source struct {
	cold slot.Source
	pool *Pool

	aheadMutex sync.Mutex
	ahead      []*ahead
	pending    []*ahead // being started: only tenant and policy are set
	closed     bool
	starting   sync.WaitGroup
}

// NewSource returns a Source and starts to build rooms as [New] does. The caller closes it.
func NewSource(cold slot.Source, policy slot.Policy, sizes Sizes, failed func(error)) *Source {
	return &Source{cold: cold, pool: New(policy, sizes, failed)}
}

// Take implements [slot.Source].
func (s *Source) Take(ctx context.Context, tenant string, p slot.Policy) (slot.Slot, error) {
	if !fits(p) {
		return s.take(ctx, tenant, p)
	}
	if a := s.takeAhead(tenant, p); a != nil {
		return a, nil
	}
	at, err := s.take(ctx, tenant, p)
	if err != nil {
		return nil, err
	}
	return before{at, func() { s.prepare(tenant, p) }}, nil
}

func (s *Source) take(ctx context.Context, tenant string, p slot.Policy) (slot.Slot, error) {
	if r := s.takeWarm(tenant, p); r != nil {
		return &warm{room: r, again: func(ctx context.Context) (slot.Slot, error) { return s.cold.Take(ctx, tenant, p) }}, nil
	}
	return s.cold.Take(ctx, tenant, p)
}

// takeWarm returns a room, or nil if none is available.
func (s *Source) takeWarm(tenant string, p slot.Policy) *Room {
	commands := p.Commands
	p.Commands, p.Program = limits.Request{}, nil
	if tenant == "" || !reflect.DeepEqual(s.pool.policy, p) {
		return nil
	}
	return s.pool.Take(tenant, commands)
}

// Rooms implements [slot.Source].
func (s *Source) Rooms() (idle, all, left int) {
	s.pool.mutex.Lock()
	defer s.pool.mutex.Unlock()
	return len(s.pool.idle), s.pool.rooms, s.pool.left
}

// Close ends all rooms and interpreters that are not taken and waits for their end.
func (s *Source) Close() {
	s.closeAhead()
	s.pool.Close()
}

// warm is a slot for one command.
type warm struct {
	room  *Room
	run   *supervise.Command
	files *workspace.Dir

	again   func(context.Context) (slot.Slot, error)
	instead slot.Slot // cold slot instead of an unusable room
}

func (w *warm) Kind() slot.Kind {
	if w.instead != nil {
		return slot.Cold
	}
	return slot.Warm
}

// Start starts the command. If the room turns out to be unusable and no files were put into it, Start uses a
// cold slot.
func (w *warm) Start(ctx context.Context, c slot.Command) (slot.Running, error) {
	run, err := w.room.Start(ctx, c)
	if err == nil {
		w.run = run
		return run, nil
	}
	e, ok := errors.AsType[*result.Error](err)
	if ok && e.Code == "usage" || w.files != nil || ctx.Err() != nil {
		return nil, err
	}
	if !ok || e.Code != "limit" { // a limit can fail while the kernel still frees the last command's resources
		w.room.pool.failed(fmt.Errorf("use a new sandbox instead: %w", err))
	}
	if w.instead, err = w.again(ctx); err != nil {
		return nil, err
	}
	return w.instead.Start(ctx, c)
}

func (w *warm) Files() (*workspace.Dir, error) {
	if w.instead != nil {
		return w.instead.Files()
	}
	if w.files != nil {
		return w.files, nil
	}
	dir, user, err := w.room.Workdir()
	if err != nil {
		return nil, err
	}
	w.files, err = workspace.Open(dir, ".", user)
	return w.files, err
}

func (w *warm) Ended() <-chan struct{} {
	if w.instead != nil {
		return w.instead.Ended()
	}
	return w.room.room.Ended()
}

func (w *warm) Give() (res *result.Result, err error) {
	if w.files != nil {
		w.files.Close()
	}
	if w.run != nil {
		w.run.Kill() // no effect if it has ended
		res, err = w.run.Wait()
	}
	w.room.Give()
	if w.instead != nil {
		return w.instead.Give()
	}
	return res, err
}

// Workdir returns a descriptor of the next command's working directory, which the caller closes, and the owner
// of the files there, or nil for this process's identity. The descriptor stays valid after the command has ended.
func (r *Room) Workdir() (fd int, user *proc.Cred, err error) {
	if err := r.maker.Meet(r.pool.ctx); err != nil {
		return -1, nil, err
	}
	fd, err = proc.Duplicate(r.maker.Workdir())
	if err != nil {
		return -1, nil, os.NewSyscallError("dup", err)
	}
	return fd, r.user, nil
}
