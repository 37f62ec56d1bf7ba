package proxy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
)

// Bounds of the process.
const (
	maxMemory = 256 << 20 // from which on garbage is collected without a pause
	maxSpace  = 8 << 30   // of addresses, for what no collection helps against
	maxFiles  = 8192
	endBound  = time.Second
)

// process is this process in its role.
type process struct {
	control   *os.File
	server    *server
	ask       asking
	listeners []net.Listener
	conns     []*conns
}

// Main is the life of sbxrund as a proxy. It returns the exit code when sbxrun has shut the socket,
// or is dead.
func Main() int {
	p := new(process)
	err := p.confine()
	if err == nil {
		err = p.begin()
	}
	if err != nil {
		_ = network.Send(p.control, network.Message{Error: err.Error()}) // if there is nobody, that is all
		return 1
	}
	return p.work()
}

// confine makes the process what it has to be before it reads anything.
func (p *process) confine() error {
	unix.Close(network.ControlFD + 1)             // its own program
	_ = unix.SetNonblock(network.ControlFD, true) // for the poller
	p.control = os.NewFile(network.ControlFD, "control")
	p.ask.control, p.ask.replies = p.control, make(chan reply)
	// Nobody with its uid is to trace it or take its descriptors (ptrace(2)).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_DUMPABLE: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	if err := restrict(); err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	debug.SetMemoryLimit(maxMemory)
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		files.Max = min(files.Max, maxFiles)
		files.Cur = files.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &files) // a lower one than there is
	}
	return unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: maxSpace, Max: maxSpace})
}

// begin takes the rules and the sockets.
func (p *process) begin() error {
	m, fds, err := network.Receive(p.control)
	network.CloseAll(fds)
	if err != nil {
		return err
	}
	r, err := compile(m.Rules)
	if err != nil {
		return err
	}
	p.server = newServer(r)
	p.server.counts.control = p.control
	if err := network.Send(p.control, network.Message{Checked: true}); err != nil {
		return err
	}
	if m, fds, err = network.Receive(p.control); err != nil {
		return err
	}
	if len(fds) != len(m.Listeners) {
		network.CloseAll(fds)
		return errors.New("sockets are missing")
	}
	var serve []func()
	for i, want := range m.Listeners {
		l, err := listener(fds[i])
		if err != nil {
			return err
		}
		p.listeners = append(p.listeners, l)
		serve = append(serve, p.handler(want, l))
	}
	// Clients of a published port may be there already, and what they make us ask for must not come first.
	if err := network.Send(p.control, network.Message{Ready: true}); err != nil {
		return err
	}
	for _, run := range serve {
		go run()
	}
	return nil
}

// handler returns what takes connections at a listener.
func (p *process) handler(want network.Listener, l net.Listener) (run func()) {
	to := &p.server.conns
	run = func() { p.server.serve(l) }
	switch want.Kind {
	case network.KindPublish:
		to = new(conns)
		run = func() {
			p.forward(l, to, "published port "+strconv.Itoa(int(want.Port)), true, func() (net.Conn, error) { return p.ask.dialInside(p.server.ctx, want.Port) })
		}
	case network.KindConnect:
		to = new(conns)
		run = func() {
			p.forward(l, to, "unix socket "+strconv.Itoa(want.Index+1), false, func() (net.Conn, error) { return p.ask.dialUnix(want.Index) })
		}
	}
	p.conns = append(p.conns, to)
	return run
}

// work reads what sbxrun says until its end, and then sends the report.
func (p *process) work() int {
	go p.closeIdle(idleLook, idleBound)
	for {
		m, fds, err := network.Receive(p.control)
		if err != nil {
			break
		}
		p.ask.replies <- reply{m, fds}
	}
	p.server.end() // first: what gets no reply because of it is no refusal
	close(p.ask.replies)
	for _, l := range p.listeners {
		l.Close()
	}
	var ending sync.WaitGroup
	for _, c := range p.conns {
		ending.Go(func() { c.end(endBound) })
	}
	ending.Wait()
	report := p.server.counts.report()
	if network.Send(p.control, network.Message{Report: report}) != nil {
		return 1
	}
	return 0
}

// closeIdle ends connections that have moved nothing for long, whenever it looks.
func (p *process) closeIdle(look, idle time.Duration) {
	for range time.Tick(look) {
		for _, c := range p.conns {
			c.closeIdle(idle)
		}
	}
}
