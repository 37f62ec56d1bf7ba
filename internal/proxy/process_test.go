package proxy

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// controls returns the two ends of a proxy's socket to sbxrun.
func controls(t *testing.T) (theirs, ours *os.File) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check.Must(t, err)
	theirs, ours = os.NewFile(uintptr(pair[0]), "control"), os.NewFile(uintptr(pair[1]), "ours")
	t.Cleanup(func() { theirs.Close(); ours.Close() })
	_ = ours.SetReadDeadline(time.Now().Add(time.Minute))
	return theirs, ours
}

// noFiles uses up the descriptors of the process until restore. Tests that use it are not parallel.
func noFiles(t *testing.T) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	set := func(r unix.Rlimit) {
		check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &r))
	}
	// A low limit alone would also prevent sending descriptors while the user has more of them in flight
	// (unix(7)), and other processes of the user may have some.
	const most = 512
	var all []int
	for fd := -1; fd < most; all = append(all, fd) {
		var err error
		fd, err = unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		check.Must(t, err)
	}
	set(unix.Rlimit{Cur: most, Max: before.Max})
	return func() {
		set(before)
		network.CloseAll(all)
	}
}

// The proxy loses a socket that arrives while its descriptor table is full, and continues.
func TestFullTable(t *testing.T) {
	theirs, ours := controls(t)
	p := &process{control: theirs, server: newServer(listing(t, "example.org", nil))}
	p.ask.control, p.ask.replies = theirs, make(chan reply)
	over := make(chan int, 1)
	go func() { over <- p.work() }()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	defer network.CloseAll(pair[:])
	for _, want := range []error{unix.EMFILE, nil} {
		asked := make(chan error, 1)
		go func() {
			conn, err := p.ask.dialUnix(0)
			if err == nil {
				conn.Close()
			}
			asked <- err
		}()
		m, _, err := network.Receive(ours)
		check.Require(t, err == nil && m.Dial != nil, "%+v, %v", m, err)
		restore := func() {}
		if want != nil {
			restore = noFiles(t)
		}
		err = network.Send(ours, network.Message{}, pair[0])
		if err != nil {
			restore()
			t.Fatal(err)
		}
		got := <-asked
		restore()
		check.That(t, got == want, "%v, want %v", got, want)
	}
	_ = unix.Shutdown(proc.Descriptor(ours), unix.SHUT_WR) // its exit is checked below
	m, _, err := network.Receive(ours)
	check.That(t, err == nil && m.Report != nil, "%+v, %v", m, err)
	code := <-over
	check.That(t, code == 0, "exit code %d", code)
}

// Clients that connect to a published port before the proxy is ready cause no request before its Ready
// message, which sbxrun expects first.
func TestEarlyClients(t *testing.T) {
	t.Parallel()
	theirs, ours := controls(t)
	p := &process{control: theirs}
	p.ask.control, p.ask.replies = p.control, make(chan reply)
	var ports []network.Listener
	var fds []int
	for range 20 {
		l := harness.Listen(t)
		c, err := net.Dial("tcp", l.Addr().String())
		check.Must(t, err)
		defer c.Close()
		f, err := l.(*net.TCPListener).File()
		check.Must(t, err)
		defer f.Close()
		ports, fds = append(ports, network.Listener{Kind: network.KindPublish, Port: 8000}), append(fds, int(f.Fd()))
	}
	begun := make(chan error, 1)
	go func() { begun <- p.begin() }()
	receive := func() network.Message {
		m, fds, err := network.Receive(ours)
		network.CloseAll(fds)
		check.Must(t, err)
		return m
	}
	send := func(m network.Message, fds ...int) {
		check.Must(t, network.Send(ours, m, fds...))
	}
	send(network.Message{})
	m := receive()
	check.Require(t, m.Checked, "%+v", m)
	send(network.Message{Listeners: ports}, fds...)
	m = receive()
	check.That(t, m.Ready, "not ready: %+v", m)
	m = receive()
	check.That(t, m.Sockets != 0, "not asked: %+v", m)
	check.OK(t, <-begun)
	for _, l := range p.listeners {
		l.Close()
	}
	close(p.ask.replies)
}
