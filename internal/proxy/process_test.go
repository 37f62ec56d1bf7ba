package proxy

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
)

// Clients that are at published ports before there is a proxy have it ask for nothing until it has
// said that it is ready: sbxrun took their question for its answer, and failed.
func TestEarlyClients(t *testing.T) {
	t.Parallel()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{control: os.NewFile(uintptr(pair[0]), "control")}
	ours := os.NewFile(uintptr(pair[1]), "ours")
	p.ask.control, p.ask.replies = p.control, make(chan reply)
	var ports []network.Listener
	var fds []int
	for range 20 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		f, err := l.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		ports, fds = append(ports, network.Listener{Kind: network.KindPublish, Port: 8000}), append(fds, int(f.Fd()))
	}
	begun := make(chan error, 1)
	go func() { begun <- p.begin() }()
	_ = ours.SetReadDeadline(time.Now().Add(time.Minute)) // it takes deadlines
	receive := func() network.Message {
		m, fds, err := network.Receive(ours)
		network.CloseAll(fds)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	send := func(m network.Message, fds ...int) {
		if err := network.Send(ours, m, fds...); err != nil {
			t.Fatal(err)
		}
	}
	send(network.Message{})
	if m := receive(); !m.Checked {
		t.Fatalf("%+v", m)
	}
	send(network.Message{Listeners: ports}, fds...)
	if m := receive(); !m.Ready {
		t.Errorf("not ready: %+v", m)
	}
	if m := receive(); m.Sockets == 0 {
		t.Errorf("not asked: %+v", m)
	}
	if err := <-begun; err != nil {
		t.Error(err)
	}
	for _, l := range p.listeners {
		l.Close()
	}
	close(p.ask.replies)
	p.serving.Wait()
	ours.Close()
	p.control.Close()
}
