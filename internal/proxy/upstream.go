package proxy

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/sbxrun/sbxrun/internal/network"
)

// upstream chooses the proxy of this host for a target. A company's proxy also resolves the names of
// hosts, so their addresses are not checked here.
type upstream func(u *url.URL) (*url.URL, error)

// newUpstream reads the proxy variables of sbxrun's environment. nil connects directly.
func newUpstream(env *network.Upstream) (upstream, error) {
	if env == nil {
		return nil, nil
	}
	for _, p := range []struct{ name, value string }{{"http_proxy", env.HTTP}, {"https_proxy", env.HTTPS}} {
		value := p.value
		if value != "" && !strings.Contains(value, "://") {
			value = "http://" + value
		}
		if u, err := url.Parse(value); value != "" && (err != nil || u.Scheme != "http" || u.Hostname() == "") {
			return nil, fmt.Errorf("the environment variable %s is not the URL of an HTTP proxy: want http://HOST:PORT", p.name)
		}
	}
	c := httpproxy.Config{HTTPProxy: env.HTTP, HTTPSProxy: env.HTTPS, NoProxy: env.No}
	return c.ProxyFunc(), nil
}

// of returns the proxy for a target and a scheme, or nil.
func (up upstream) of(scheme string, t target) (*url.URL, error) {
	if up == nil || t.host == network.HostName {
		return nil, nil
	}
	return up(&url.URL{Scheme: scheme, Host: t.String()})
}

// connectBy makes a tunnel to a target through another proxy.
func (s *server) connectBy(ctx context.Context, proxy *url.URL, t target) (net.Conn, error) {
	conn, err := s.dialProxy(ctx, proxy)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(past) })
	err = requestTunnel(conn, proxy, t)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, conn.SetDeadline(time.Time{})
}

func (s *server) dialProxy(ctx context.Context, proxy *url.URL) (net.Conn, error) {
	port := proxy.Port()
	if port == "" {
		port = "80"
	}
	conn, err := s.dialer.DialContext(ctx, "tcp", net.JoinHostPort(proxy.Hostname(), port))
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the proxy of this host: %w", err)
	}
	return conn, nil
}

// requestTunnel sends CONNECT and reads the response. It reads single bytes, because the bytes after the header
// belong to the tunnel.
func requestTunnel(conn net.Conn, proxy *url.URL, t target) error {
	request := "CONNECT " + t.String() + " HTTP/1.1\r\nHost: " + t.String() + "\r\n"
	if u := proxy.User; u != nil {
		password, _ := u.Password()
		request += "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)) + "\r\n"
	}
	if _, err := conn.Write([]byte(request + "\r\n")); err != nil {
		return err
	}
	var header []byte
	var b [1]byte
	for !bytes.HasSuffix(header, []byte("\r\n\r\n")) {
		if len(header) > maxBegin {
			return errors.New("the response of this host's proxy is too long")
		}
		if n, err := conn.Read(b[:]); n == 0 {
			return fmt.Errorf("the proxy of this host did not answer: %w", err)
		}
		header = append(header, b[0])
	}
	status, _, _ := strings.Cut(string(header), "\r\n")
	words := strings.Fields(status)
	if len(words) < 2 || !strings.HasPrefix(words[0], "HTTP/1.") || words[1] != "200" {
		return fmt.Errorf("the proxy of this host answered %q", network.Clean(status))
	}
	return nil
}

// byUpstream returns a transport for plain HTTP requests through this host's proxy: many proxies refuse CONNECT to
// port 80. Each request has its own connection, whose bytes count for its host.
func (s *server) byUpstream() *http.Transport {
	return &http.Transport{
		DisableKeepAlives: true,
		Proxy: func(r *http.Request) (*url.URL, error) {
			t, ok := parseTarget(r.URL.Host, 80)
			if !ok {
				return nil, refusal("no host and port")
			}
			return s.upstream.of("http", t)
		},
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			n := ctx.Value(counterKey{}).(*counter)
			ctx, cancel := context.WithTimeout(ctx, dialBound)
			defer cancel()
			conn, err := s.dialer.DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, fmt.Errorf("cannot connect to the proxy of this host: %w", err)
			}
			n.connections.Add(1)
			return &counted{conn, n}, nil
		},
	}
}

// counterKey is the context key for the counter of a request's host.
type counterKey struct{}
