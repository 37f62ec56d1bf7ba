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

// Timeouts of the proxy's start and end.
const (
	startBound  = 10 * time.Second
	reportBound = 2 * time.Second
	endBound    = 5 * time.Second
)

// Proxy is the process that handles the connections of one sandbox. Call Start before building the
// sandbox, Serve before its command starts, and End when all processes in it have exited.
type Proxy struct {
	spec    Spec
	kept    proc.Kept
	socket  *os.File
	cred    *proc.Cred
	room    *proc.Process // our own reference
	host    []int         // listeners on the host, until the proxy has them
	unix    []int         // Unix sockets, opened with O_PATH
	served  chan struct{} // closed after the proxy's last message; nil before Serve
	refused chan result.ReportHost
	report  *result.ReportNetwork
	publish []result.ReportPublished
	once    sync.Once
}

// Start opens the sockets of spec on the host and starts the proxy as cred, the user of the sandbox. If
// it fails, with a *[result.Error], it has cleaned up.
func Start(spec Spec, cred *proc.Cred) (p *Proxy, err error) {
	p = &Proxy{spec: spec, cred: cred, refused: make(chan result.ReportHost, MaxLines)}
	defer func() {
		if err != nil {
			err = result.AsError(err, "setup", "cannot start the network proxy") // with the code "setup", a failed fork counts as busy
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
	if cred != nil { // the proxy opens no devices
		cred = &proc.Cred{UID: cred.UID, GID: cred.GID}
	}
	// By descriptor, because cred may lack access to the path.
	const programFD = ControlFD + 1
	p.kept.Keeper, err = proc.Keep(proc.Command{Cred: cred, Program: &proc.Program{
		Path: "/proc/self/fd/" + strconv.Itoa(programFD), Args: []string{"sbxrund", Role}, Files: []*os.File{null, null, null, theirs, program},
	}})
	if err != nil {
		return p, err
	}
	return p, Send(p.socket, Message{Rules: spec.Allow, Upstream: environmentProxy(os.Getenv)})
}

// Role is the first argument of sbxrund as a proxy.
const Role = "net-proxy"

// Serve creates the sockets in the sandbox whose PID 1 is room, and passes them to the proxy. It returns
// when the proxy accepts connections. The caller keeps room.
func (p *Proxy) Serve(ctx context.Context, room *proc.Process) (err error) {
	defer func() {
		if _, known := errors.AsType[*result.Error](err); err != nil && !known {
			err = &result.Error{Code: "network", Message: "cannot set up the network of the sandbox: " + p.because(err).Error(), Err: err}
		}
	}()
	stop := proc.ReadUntil(ctx, p.socket, time.Now().Add(startBound))
	defer func() {
		stop()
		_ = p.socket.SetReadDeadline(time.Time{})
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

// because returns the keeper's error if the proxy could not start, or err.
func (p *Proxy) because(err error) error {
	if errors.Is(err, ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		_, _ = p.kept.Empty(time.Now().Add(endBound)) // only its report matters
		if startErr := p.kept.Keeper.StartError(); startErr != nil {
			return startErr
		}
		return errors.New("the proxy has exited")
	}
	return err
}

// answer handles the proxy's requests until its last message. The proxy parses input from the sandbox,
// so answer does not trust it.
func (p *Proxy) answer() {
	defer close(p.served)
	defer close(p.refused)
	for {
		m, fds, err := Receive(p.socket)
		CloseAll(fds) // the proxy has no reason to send any
		switch {
		case err != nil:
			return
		case m.Report != nil:
			p.report = m.Report
			return
		case m.Refused != nil:
			select {
			case p.refused <- trustedHost(*m.Refused):
			default: // no reader, or more than a report lists
			}
		case m.Sockets > 0:
			p.reply(enter.Sockets(p.room, p.cred, nil, min(m.Sockets, enter.MaxSockets)))
		case m.Dial != nil:
			p.reply(p.dial(*m.Dial))
		}
	}
}

// reply sends descriptors and closes them, or sends an error.
func (p *Proxy) reply(fds []int, err error) {
	var m Message
	if err != nil {
		m.Errno = int(errnoOf(err))
	}
	_ = Send(p.socket, m, fds...) // fails only if the proxy is dead
	CloseAll(fds)
}

func errnoOf(err error) unix.Errno {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return unix.ECONNREFUSED
}

// Picked returns the published ports that sbxrun chose.
func (p *Proxy) Picked() (list []result.ReportPublished) {
	for i, published := range p.Published() {
		if p.spec.Publish[i].HostPort == 0 {
			list = append(list, published)
		}
	}
	return list
}

// Published returns the published ports.
func (p *Proxy) Published() []result.ReportPublished {
	if p == nil {
		return nil
	}
	return p.publish
}

// Refused delivers each refused host once, as it happens. It may drop some if there are many in a short time. The
// channel is closed when the proxy has ended after Serve.
func (p *Proxy) Refused() <-chan result.ReportHost { return p.refused }

// End ends the proxy, waits until its processes have exited, and returns its report, or nil.
// End may be called again, and on nil.
func (p *Proxy) End() *result.ReportNetwork {
	if p == nil {
		return nil
	}
	p.once.Do(p.end)
	return p.report
}

func (p *Proxy) end() {
	early := false // it ended by itself, so the report is incomplete
	if p.served != nil {
		select {
		case <-p.served:
			early = true
		default:
		}
		_ = unix.Shutdown(proc.Descriptor(p.socket), unix.SHUT_WR) // fails only if it is dead
		select {
		case <-p.served:
		case <-time.After(reportBound):
			_ = p.socket.SetDeadline(time.Unix(1, 0)) // answer may be writing to a proxy that does not read
			<-p.served
		}
	}
	if p.kept.Keeper != nil {
		_, _ = p.kept.Abandon(time.Now().Add(endBound)) // the keeper kills the rest
	}
	if p.spec.Wanted() && p.served != nil {
		p.report = trusted(p.report)
		p.report.Incomplete = p.report.Incomplete || early
		p.report.Published = p.publish
	}
	CloseAll(p.host)
	CloseAll(p.unix)
	p.socket.Close() // may be nil
	p.room.Close()
}
