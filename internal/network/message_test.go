package network

import (
	"errors"
	"os"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The report of a proxy that ended early is incomplete.
func TestEndedEarly(t *testing.T) {
	for _, early := range []bool{true, false} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		check.Must(t, err)
		theirs := os.NewFile(uintptr(pair[0]), "theirs")
		p := &Proxy{spec: Spec{Proxied: true}, socket: os.NewFile(uintptr(pair[1]), "ours"), served: make(chan struct{}), refused: make(chan result.ReportHost)}
		go p.answer()
		report := func() {
			check.OK(t, Send(theirs, Message{Report: &result.ReportNetwork{Hosts: []result.ReportHost{{Host: "a:80"}}}}))
			theirs.Close()
		}
		if early {
			report()
			<-p.served
		} else {
			go func() {
				_, _, _ = Receive(theirs) // until the shutdown
				report()
			}()
		}
		got := p.End()
		check.That(t, len(got.Hosts) == 1 && got.Incomplete == early, "early: %v: %+v", early, got)
	}
}

// If not all descriptors of a message fit into the table, Receive keeps none and still returns the message.
func TestNoRoom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which would close files of earlier tests
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check.Must(t, err)
	theirs, ours := os.NewFile(uintptr(pair[0]), "theirs"), os.NewFile(uintptr(pair[1]), "ours")
	defer theirs.Close()
	defer ours.Close()
	free, err := unix.FcntlInt(uintptr(pair[0]), unix.F_DUPFD_CLOEXEC, 0)
	check.Must(t, err)
	unix.Close(free)
	check.Must(t, Send(ours, Message{Sockets: 7}, pair[0], pair[1]))
	restore := harness.LimitDescriptors(t, free+1) // room for one more
	m, fds, err := Receive(theirs)
	restore()
	check.That(t, err == nil && m.Sockets == 7 && len(fds) == 0, "%+v, %v, %v", m, fds, err)
	_, err = unix.FcntlInt(uintptr(free), unix.F_GETFD, 0)
	check.That(t, errors.Is(err, unix.EBADF), "the received descriptor is open: %v", err)
}
