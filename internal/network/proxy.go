package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Bounds of the proxy's start and end.
const (
	startBound  = 10 * time.Second
	reportBound = 2 * time.Second
	endBound    = 5 * time.Second
)

// Proxy is the process that takes and makes connections for one sandbox. Start it before the room
// is built, Serve when the room is there and nothing of the command has run, and End it when the
// sandbox is gone.
type Proxy struct {
	spec    Spec
	kept    proc.Kept
	socket  *os.File
	cred    *proc.Cred
	room    *proc.Process // a hold of our own
	host    []int         // descriptors of what listens on the host, until the proxy has it
	unix    []int         // of the unix sockets, O_PATH
	served  chan struct{} // closed when the proxy has said its last; nil before Serve
	refused chan result.ReportHost
	report  *result.ReportNetwork
	publish []result.ReportPublished
	once    sync.Once
}

// Start opens what the spec names on the host, and starts the proxy; cred is who the sandbox runs
// as. After an error, a *[result.Error], nothing is left.
func Start(spec Spec, cred *proc.Cred) (p *Proxy, err error) {
	p = &Proxy{spec: spec, cred: cred, refused: make(chan result.ReportHost, MaxLines)}
	defer func() {
		if err != nil {
			err = result.AsError(err, "setup", "cannot start the proxy of the network") // "setup": that no process can be forked is to be busy
			p.End()
			p = nil
		}
	}()
	if err = p.open(); err != nil {
		return p, err
	}
	name, err := safeopen.Sibling()
	if err != nil {
		return p, err
	}
	program, err := os.Open(name)
	if err != nil {
		return p, safeopen.SiblingError(name, err)
	}
	defer program.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return p, fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "proxy")
	defer theirs.Close()
	_ = unix.SetNonblock(pair[0], true) // for the poller
	p.socket = os.NewFile(uintptr(pair[0]), "proxy")
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return p, err
	}
	defer null.Close()
	// By its descriptor: who it runs as may not reach its path.
	const programFD = ControlFD + 1
	p.kept.Keeper, err = proc.Keep(proc.Command{Cred: cred, Program: &proc.Program{
		Path: "/proc/self/fd/" + strconv.Itoa(programFD), Args: []string{"sbxrund", Role}, Files: []*os.File{null, null, null, theirs, program},
	}})
	if err != nil {
		return p, err
	}
	return p, Send(p.socket, Message{Rules: spec.Allow})
}

// Role is the first argument of sbxrund that makes it a proxy.
const Role = "net-proxy"

// Serve makes the sockets in a room, whose PID 1 stays the caller's, and has the proxy take
// connections at them. It returns when it does.
func (p *Proxy) Serve(ctx context.Context, room *proc.Process) (err error) {
	defer func() {
		if _, known := errors.AsType[*result.Error](err); err != nil && !known {
			err = &result.Error{Code: "network", Message: "cannot set up the network of the sandbox: " + p.because(err).Error(), Err: err}
		}
	}()
	stop := proc.ReadUntil(ctx, p.socket, time.Now().Add(startBound))
	defer func() {
		stop()
		_ = p.socket.SetReadDeadline(time.Time{}) // it takes deadlines
		if err == nil {
			p.served = make(chan struct{})
			go p.answer()
		}
	}()
	m, _, err := Receive(p.socket)
	if err != nil {
		return err
	}
	if !m.Checked {
		return &result.Error{Code: "usage", Message: "--net allow=: " + m.Error}
	}
	if p.room, err = room.Dup(); err != nil {
		return err
	}
	listeners, ports := []Listener(nil), []uint16(nil)
	if p.spec.Proxied {
		listeners, ports = append(listeners, Listener{Kind: KindProxy}), append(ports, ProxyPort)
	}
	for i, c := range p.spec.Connect {
		listeners, ports = append(listeners, Listener{Kind: KindConnect, Index: i}), append(ports, c.Port)
	}
	inside, err := enter.Sockets(p.room, p.cred, ports, 0)
	if err != nil {
		return err
	}
	defer CloseAll(inside)
	for i := range p.host {
		listeners = append(listeners, Listener{Kind: KindPublish, Port: p.spec.Publish[i].Port})
	}
	if err := Send(p.socket, Message{Listeners: listeners}, slices.Concat(inside, p.host)...); err != nil {
		return err
	}
	CloseAll(p.host)
	p.host = nil
	if m, _, err = Receive(p.socket); err != nil {
		return err
	}
	if !m.Ready {
		return errors.New(m.Error)
	}
	return nil
}

// because is what the keeper has told of a proxy that could not be started, or err.
func (p *Proxy) because(err error) error {
	if errors.Is(err, ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		_, _ = p.kept.Empty(time.Now().Add(endBound)) // what it has told is what counts
		if startErr := p.kept.Keeper.StartError(); startErr != nil {
			return startErr
		}
		return errors.New("the proxy has ended")
	}
	return err
}

// answer gives the proxy what it asks for, until it has said its last. What it says was written by
// a process that reads what the sandbox sends, so it is believed as little as possible.
func (p *Proxy) answer() {
	defer close(p.served)
	defer close(p.refused)
	for {
		m, fds, err := Receive(p.socket)
		CloseAll(fds) // nobody sends any
		switch {
		case err != nil:
			return
		case m.Report != nil:
			p.report = m.Report
			return
		case m.Refused != nil:
			select {
			case p.refused <- trustedHost(*m.Refused):
			default: // nobody reads them, or there are more than a report names
			}
		case m.Sockets > 0:
			p.reply(enter.Sockets(p.room, p.cred, nil, min(m.Sockets, enter.MaxSockets)))
		case m.Dial != nil:
			p.reply(p.dial(*m.Dial))
		}
	}
}

// reply sends descriptors, or an error, and closes them.
func (p *Proxy) reply(fds []int, err error) {
	var m Message
	if err != nil {
		m.Errno = int(errnoOf(err))
	}
	_ = Send(p.socket, m, fds...) // an error means that the proxy is dead
	CloseAll(fds)
}

func errnoOf(err error) unix.Errno {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return unix.ECONNREFUSED
}

// Picked are the published ports that nobody has named.
func (p *Proxy) Picked() (list []result.ReportPublished) {
	for i, published := range p.Published() {
		if p.spec.Publish[i].HostPort == 0 {
			list = append(list, published)
		}
	}
	return list
}

// Published is what leads into the sandbox.
func (p *Proxy) Published() []result.ReportPublished {
	if p == nil {
		return nil
	}
	return p.publish
}

// Refused has the hosts that were refused, each once, when that happens; of many in a short time
// some may be left out. It is closed when the proxy has ended, after Serve.
func (p *Proxy) Refused() <-chan result.ReportHost { return p.refused }

// End ends the proxy, and returns when nothing of it is left. The report is nil if the proxy could
// not say anything. It may be called again, and on nil.
func (p *Proxy) End() *result.ReportNetwork {
	if p == nil {
		return nil
	}
	p.once.Do(p.end)
	return p.report
}

func (p *Proxy) end() {
	early := false // it has ended by itself, and what came then is in no report
	if p.served != nil {
		select {
		case <-p.served:
			early = true
		default:
		}
		_ = unix.Shutdown(proc.Descriptor(p.socket), unix.SHUT_WR) // an error means that it is dead
		select {
		case <-p.served:
		case <-time.After(reportBound):
			_ = p.socket.SetDeadline(time.Unix(1, 0)) // an answer may wait as well, for a proxy that reads none
			<-p.served
		}
	}
	if p.kept.Keeper != nil {
		_, _ = p.kept.Abandon(time.Now().Add(endBound)) // it is the keeper that kills what is left
	}
	if p.spec.Wanted() && p.served != nil {
		p.report = trusted(p.report)
		p.report.Incomplete = p.report.Incomplete || early
		p.report.Published = p.publish
	}
	CloseAll(p.host)
	CloseAll(p.unix)
	p.socket.Close() // nil is an error, and no more
	p.room.Close()
}
