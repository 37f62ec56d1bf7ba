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
	maxMemory = 256 << 20 // soft limit of the garbage collector
	maxSpace  = 8 << 30   // of address space, the hard limit
	maxFiles  = 8192
)

// endBound is how long the process waits for connections at its end. Tests raise it on a slow machine.
var endBound = time.Second

// process is this process.
type process struct {
	control   *os.File
	server    *server
	ask       asking
	listeners []net.Listener
	conns     []*conns
}

// Main runs sbxrund as a proxy. It returns the exit code when sbxrun has shut the socket down or died.
func Main() int {
	p := new(process)
	err := p.confine()
	if err == nil {
		err = p.begin()
	}
	if err != nil {
		_ = network.Send(p.control, network.Message{Error: err.Error()}) // fails only if sbxrun is dead
		return 1
	}
	return p.work()
}

// confine drops privileges and sets limits before the process reads anything.
func (p *process) confine() error {
	unix.Close(network.ControlFD + 1)             // its own program
	_ = unix.SetNonblock(network.ControlFD, true) // for the poller
	p.control = os.NewFile(network.ControlFD, "control")
	p.ask.control, p.ask.replies = p.control, make(chan reply)
	// Prevent processes with the same UID from tracing it or taking its descriptors (ptrace(2)).
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
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &files) // lowering never fails
	}
	return unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: maxSpace, Max: maxSpace})
}

// begin receives the rules and the sockets.
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
	if p.server.upstream, err = newUpstream(m.Upstream); err != nil {
		return err
	}
	if err := network.Send(p.control, network.Message{Checked: true}); err != nil {
		return err
	}
	if m, fds, err = network.Receive(p.control); err != nil {
		return err
	}
	if len(fds) != len(m.Listeners) {
		network.CloseAll(fds)
		return errors.New("the message lacks sockets")
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
	// Clients of a published port may be waiting. Requests to sbxrun on their behalf must not precede this message.
	if err := network.Send(p.control, network.Message{Ready: true}); err != nil {
		return err
	}
	for _, run := range serve {
		go run()
	}
	return nil
}

// handler returns the function that accepts connections at a listener.
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

// work handles messages from sbxrun until it shuts its end down, and then sends the report.
func (p *process) work() int {
	go p.closeIdle(idleCheck, idleBound)
	for {
		m, fds, err := network.Receive(p.control)
		if err != nil {
			break
		}
		p.ask.replies <- reply{m, fds}
	}
	p.server.end() // first, so that requests without a reply do not count as refusals
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

// closeIdle closes idle connections, at every interval.
func (p *process) closeIdle(interval, idle time.Duration) {
	for range time.Tick(interval) {
		for _, c := range p.conns {
			c.closeIdle(idle)
		}
	}
}
