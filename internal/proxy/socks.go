package proxy

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// SOCKS5 (RFC 1928) without authentication, and only the command CONNECT. No maintained library comes
// without a UDP relay.
const (
	socksVersion = 5

	socksNone         = 0 // the method without authentication
	socksConnect      = 1
	socksIPv4         = 1
	socksName         = 3
	socksIPv6         = 4
	socksOK           = 0
	socksFailed       = 1
	socksNotAllowed   = 2
	socksUnreachable  = 4
	socksRefused      = 5
	socksNoCommand    = 7
	socksNoAddrFormat = 8
)

// socks serves one connection, whose first byte was already read.
func (s *server) socks(conn *net.TCPConn) {
	t, code := socksTarget(conn)
	if code != socksOK {
		socksReply(conn, code)
		return
	}
	up, n, err := s.connect(s.ctx, t)
	if err != nil {
		socksReply(conn, socksCode(err))
		return
	}
	defer up.Close()
	if socksReply(conn, socksOK) != nil {
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	s.tunnel(conn, nil, up, t, n)
}

// socksTarget reads the request.
func socksTarget(conn *net.TCPConn) (t target, code byte) {
	var buf [256]byte
	read := func(n int) bool {
		_, err := io.ReadFull(conn, buf[:n])
		return err == nil
	}
	if !read(1) || !read(int(buf[0])) {
		return t, socksFailed
	}
	// Ignore the offered methods: only the sandbox reaches this listener.
	if _, err := conn.Write([]byte{socksVersion, socksNone}); err != nil {
		return t, socksFailed
	}
	if !read(4) || buf[0] != socksVersion {
		return t, socksFailed
	}
	command, kind, size := buf[1], buf[3], 0
	switch kind {
	case socksIPv4:
		size = 4
	case socksIPv6:
		size = 16
	case socksName:
		if !read(1) {
			return t, socksFailed
		}
		size = int(buf[0])
	default:
		return t, socksNoAddrFormat
	}
	if !read(size) {
		return t, socksFailed
	}
	host := string(buf[:size])
	if kind != socksName {
		addr, _ := netip.AddrFromSlice(buf[:size]) // its length is valid
		host = addr.String()
	}
	if !read(2) {
		return t, socksFailed
	}
	if command != socksConnect {
		return t, socksNoCommand
	}
	t, ok := newTarget(host, binary.BigEndian.Uint16(buf[:2]))
	if !ok || t.port == 0 {
		return t, socksNotAllowed
	}
	return t, socksOK
}

func socksCode(err error) byte {
	_, refused := errors.AsType[refusal](err)
	switch {
	case refused:
		return socksNotAllowed
	case errors.Is(err, unix.ECONNREFUSED):
		return socksRefused
	}
	return socksUnreachable
}

// socksReply sends a reply without an address, which no client needs.
func socksReply(conn *net.TCPConn, code byte) error {
	_, err := conn.Write([]byte{socksVersion, code, 0, socksIPv4, 0, 0, 0, 0, 0, 0})
	return err
}
