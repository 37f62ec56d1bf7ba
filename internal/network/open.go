package network

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// open opens the sockets of the spec on the host.
func (p *Proxy) open() error {
	for _, c := range p.spec.Connect {
		fd, err := openUnix(c.Path)
		if err != nil {
			return err
		}
		p.unix = append(p.unix, fd)
	}
	for _, want := range p.spec.Publish {
		fd, port, err := listen(want)
		if err != nil {
			return err
		}
		p.host = append(p.host, fd)
		p.publish = append(p.publish, result.ReportPublished{Address: join(want.Addr, port), Port: want.Port})
	}
	return nil
}

const loopback = "127.0.0.1"

func join(addr string, port int) string {
	if addr == "" {
		addr = loopback
	}
	return addr + ":" + strconv.Itoa(port)
}

// openUnix opens a Unix socket without connecting. Later connections reach this socket even if its path
// is replaced.
func openUnix(path string) (fd int, err error) {
	fail := func(why string, err error) error {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("--connect unix:%s: %s", path, why), Err: err, Hint: "give the path of a Unix socket with a listener"}
	}
	fd, err = safeopen.Open(path)
	if errors.As(err, new(*safeopen.Error)) {
		return -1, &result.Error{Code: "usage", Message: fmt.Sprintf("--connect unix:%s: %v", path, err), Err: err, Hint: safeopen.Hint}
	}
	if err != nil {
		return -1, fail(err.Error(), err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		err = unix.ENOTSOCK
	}
	if err == nil { // without connecting, which the server would take for a client
		err = unix.Faccessat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), unix.W_OK, unix.AT_EACCESS)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fail(err.Error(), err)
	}
	return fd, nil
}

// dial connects to a Unix socket of the spec. It does not block: it fails with EAGAIN if the backlog is
// full (connect(2)).
func (p *Proxy) dial(index int) (fds []int, err error) {
	if index < 0 || index >= len(p.unix) {
		return nil, unix.EINVAL
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err = unix.Connect(fd, &unix.SockaddrUnix{Name: "/proc/self/fd/" + strconv.Itoa(p.unix[index])}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return []int{fd}, nil
}

// listen listens on the host.
func listen(want Publish) (fd, port int, err error) {
	defer func() {
		if err != nil {
			e := &result.Error{Code: "network", Message: fmt.Sprintf("--publish: cannot listen on %s: %v", join(want.Addr, int(want.HostPort)), err), Err: err}
			switch err {
			case unix.EADDRINUSE:
				e.Hint = "another program uses the port; 0 picks a free one"
			case unix.EACCES:
				e.Hint = "ports below 1024 need root; choose a higher one"
			}
			err = e
		}
	}()
	addr, err := sockaddr(want.Addr, want.HostPort)
	if err != nil {
		return -1, 0, err
	}
	family := unix.AF_INET
	if _, six := addr.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, 0, err
	}
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.Bind(fd, addr)
	}
	if err == nil {
		err = unix.Listen(fd, 128)
	}
	var at unix.Sockaddr
	if err == nil {
		at, err = unix.Getsockname(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, 0, err
	}
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		port = at.Port
	case *unix.SockaddrInet6:
		port = at.Port
	}
	return fd, port, nil
}

// sockaddr parses an IPv4 address, [::1] or [::].
func sockaddr(addr string, port uint16) (unix.Sockaddr, error) {
	switch addr {
	case "":
		addr = loopback
	case "[::]", "[::1]":
		addr = addr[1 : len(addr)-1]
		a, err := netip.ParseAddr(addr)
		return &unix.SockaddrInet6{Port: int(port), Addr: a.As16()}, err
	}
	a, err := netip.ParseAddr(addr)
	if err != nil || !a.Is4() {
		return nil, unix.EINVAL
	}
	return &unix.SockaddrInet4{Port: int(port), Addr: a.As4()}, nil
}
