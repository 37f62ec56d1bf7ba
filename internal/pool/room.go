package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Room is a warm room.
type Room struct {
	pool   *Pool
	tenant string
	used   int // calls

	room  *sandbox.Room
	init  *proc.Process // PID 1 of the room
	maker *enter.Maker
	group *limits.Group // limits of its calls; without cgroups on some machines
	user  *proc.Cred    // identity of its commands; nil for this process's
	env   []string
	dir   string
	run   *supervise.Command // the current call

	// /proc/PID/net/sockstat and /proc/PID/net/dev; nil if the room has the host's network.
	sockets, devices *os.File
	untouched        string // content of devices before the first call
}

// build builds a room with a maker in it.
func build(ctx context.Context, policy slot.Policy) (_ *Room, err error) {
	plan, err := room.Prepare(policy.Policy, room.ThisCaller())
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	e := plan.Entry()
	if e.Fresh = plan.Fresh(); len(e.Fresh) == 0 {
		return nil, &result.Error{Code: "usage", Message: "a warm room must have nothing mounted within a directory in memory"}
	}
	r := &Room{env: e.Env, dir: e.Workdir, user: e.Cred}
	own, release := supervise.Outlive(ctx)
	if r.room, err = sandbox.NewRoom(own, plan, nil, supervise.Options{ProofTimeout: policy.ProofTimeout}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = r.end() // the error says more
		}
	}()
	if !release() { // end ends the room, after the processes in it
		return nil, ctx.Err()
	}
	if r.init, err = proc.FromPidfd(r.room.Access.Init); err != nil {
		return nil, err
	}
	if policy.Network != room.NetHost {
		if r.sockets, err = os.Open(fmt.Sprintf("/proc/%d/net/sockstat", r.init.PID)); err != nil {
			return nil, err
		}
		if r.devices, err = os.Open(fmt.Sprintf("/proc/%d/net/dev", r.init.PID)); err != nil {
			return nil, err
		}
		if r.untouched = text(r.devices); r.untouched == "" {
			return nil, errors.New("/proc/PID/net/dev of the room cannot be read")
		}
	}
	if r.group, err = limits.Lasting(safeopen.RandomName()); err != nil {
		return nil, err
	}
	e.Bounds = r.group.Bounds()
	r.maker, err = e.Make(ctx, r.init)
	return r, err
}

// end ends the room and waits until all its processes have exited.
func (r *Room) end() error {
	var left error
	if r.maker != nil {
		left = r.maker.Close()
	}
	if r.init != nil {
		r.init.Close()
	}
	for _, f := range []*os.File{r.sockets, r.devices} {
		if f != nil {
			f.Close()
		}
	}
	if r.group != nil { // the keeper may have removed it
		if err := r.group.Remove(time.Now().Add(time.Second)); err != nil {
			left = err
		}
	}
	if _, err := r.room.Close(); err != nil {
		left = err
	}
	return left
}

// usable reports whether the room's processes are alive.
func (r *Room) usable() bool { return r.maker.Usable() && !r.init.Exited() }

// quiet reports whether the room's network is as it was before the first call, and if not, whether it may
// become so later. A closed connection stays in TIME_WAIT for a minute (tcp(7)), a socket in an unread message
// until the kernel's garbage collection (unix(7)), and the metrics of a peer address as long as the network
// namespace (tcp_metrics). The next call could read these, or find a port in use.
func (r *Room) quiet() (is, later bool) {
	if r.sockets == nil {
		return true, true
	}
	// sockets: used 0 / TCP: inuse 0 orphan 0 tw 0 alloc 1 mem 0
	fields := strings.Fields(text(r.sockets))
	later = len(fields) > 9 && fields[5] == "0" && fields[9] == "0" && text(r.devices) == r.untouched
	return later && fields[2] == "0", later
}

// awaitQuiet waits up to a second for quiet and returns its result. The kernel frees netlink sockets, which C
// libraries use to look up addresses, some hundredths of a second after their close (RCU).
func (r *Room) awaitQuiet() bool {
	const moment = time.Second
	for end := time.Now().Add(moment); ; time.Sleep(moment / 200) {
		is, later := r.quiet()
		if is || !later || time.Now().After(end) || r.pool.ctx.Err() != nil {
			return is
		}
	}
}

// text reads the beginning of an open file in /proc again. It returns "" if that fails. The kernel returns the text
// in one piece, so there is no second call for the end of the file.
func text(f *os.File) string {
	b := make([]byte, 1024) // more than one device
	n, _ := unix.Pread(proc.Descriptor(f), b, 0)
	return string(b[:max(n, 0)])
}

// Start starts the call's command. It does not wait for the execve(2): if that fails, the Run's Wait returns
// the error. It is called once for each Take.
func (r *Room) Start(ctx context.Context, c slot.Command) (*supervise.Command, error) {
	if r.run != nil {
		return nil, &result.Error{Code: "usage", Message: "a warm room runs one command each time it is taken"}
	}
	if len(c.Args) == 0 {
		return nil, &result.Error{Code: "usage", Message: "no command given"}
	}
	env := values.Environment{}
	if err := env.PutPairs(append(r.env[:len(r.env):len(r.env)], c.Env...)); err != nil {
		return nil, err
	}
	if c.Dir == "" {
		c.Dir = r.dir
	}
	env.Put(values.Var{Name: "PWD", Value: c.Dir})
	path, _ := env.Lookup("PATH")
	e := &enter.Entry{Command: c.Args, Path: path, Env: values.Pairs(env.Vars()), Workdir: c.Dir}
	if err := r.group.Renew(c.Limits); err != nil {
		return nil, err
	}
	c.ProofTimeout = cmp.Or(c.ProofTimeout, r.pool.policy.ProofTimeout)
	run := &supervise.Command{Options: c.Options, Place: supervise.Place{Entry: e, Maker: r.maker}, Group: r.group}
	if err := run.Start(ctx); err != nil {
		return nil, err
	}
	r.run = run
	return run, nil
}

// Give returns the room to the pool. If a command was started, Give first waits for its end.
func (r *Room) Give() {
	again := false
	if r.run != nil {
		res, _ := r.run.Wait() // any other error is the command's
		again = res != nil && res.Verdict == result.Proven && res.Cause != result.Lost && res.Cause != result.OOM
	}
	r.run = nil
	again = again && r.usable() && r.group.Idle() == nil
	if is, later := r.quiet(); again && !is && later {
		r.pool.work.Go(func() { r.pool.give(r, r.awaitQuiet()) })
	} else {
		r.pool.give(r, again && is)
	}
}
