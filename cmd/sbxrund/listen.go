package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/server"
)

// certificate is the server's current certificate. A reload replaces it, because a restart would end sessions.
var certificate atomic.Pointer[tls.Certificate]

// loadCertificate reads the certificate of a configuration, if it has one.
func loadCertificate(c *config.Config) (*tls.Certificate, error) {
	if c.TLSCert == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("tls_cert %s, tls_key %s: %w", c.TLSCert, c.TLSKey, err)
	}
	return &pair, nil
}

// activated reports whether systemd has passed sockets (sd_listen_fds(3)).
func activated() bool { return os.Getenv("LISTEN_PID") == fmt.Sprint(os.Getpid()) }

// listen opens all sockets. Those from systemd come first.
func listen(c *config.Config) ([]net.Listener, error) {
	var secure *tls.Config
	if c.TLSCert != "" {
		secure = &tls.Config{
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate.Load(), nil },
			MinVersion:     tls.VersionTLS12,
		}
	}
	all, err := activation.Listeners()
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		if l == nil {
			return nil, errors.New("systemd passed a socket that does not listen")
		}
		if l.Addr().Network() != "unix" && c.TokenFile == "" {
			return nil, errors.New("systemd passed a TCP socket, which requires token_file")
		}
	}
	for _, where := range c.Listen {
		network, address, _ := strings.Cut(where, ":")
		var l net.Listener
		remedy := "use an address of this machine and a free port that this user may bind"
		if network == "unix" {
			remedy = "use an unused path in a directory that this user can write to"
			l, err = listenUnix(address)
		} else {
			l, err = net.Listen(network, address)
		}
		if err != nil {
			return nil, fmt.Errorf("listen %q: %w; %s", where, err, remedy)
		}
		all = append(all, l)
	}
	most := server.NewConnections(c.Connections)
	for i, l := range all {
		if all[i] = most.Of(l); l.Addr().Network() != "unix" && secure != nil {
			all[i] = tls.NewListener(all[i], secure)
		}
	}
	return all, nil
}

// listenUnix listens on a socket that only this user can connect to. It replaces the socket of a killed server, but
// refuses to replace a running server's.
func listenUnix(name string) (net.Listener, error) {
	if st, err := os.Lstat(name); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, errors.New("the path exists and is not a socket")
	}
	// Create only the last directory, in case the path is misspelled.
	if err := os.Mkdir(filepath.Dir(name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	// The kernel releases the lock when the process ends, so a free lock means that no server uses the socket.
	lock, err := os.OpenFile(name+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, errors.New("in use by another server")
	}
	locks = append(locks, lock)
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// Set the mode before bind(2), which copies it to the file, so that no other user can connect in between. A umask
	// would affect files of other threads.
	own := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var failed error
		err := socket.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) })
		return cmp.Or(err, failed)
	}}
	return own.Listen(context.Background(), "unix", name)
}

// locks are held until the process ends.
var locks []*os.File
