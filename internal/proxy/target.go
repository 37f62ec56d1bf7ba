package proxy

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
)

// target is a requested host and port.
type target struct {
	host string     // lower case, without a trailing dot
	addr netip.Addr // valid if the host is an address
	port uint16
}

// parseTarget parses HOST:PORT. fallback is the default port; 0 requires one.
func parseTarget(s string, fallback uint16) (t target, ok bool) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		if fallback == 0 {
			return t, false
		}
		host, port = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"), strconv.Itoa(int(fallback))
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return t, false
	}
	return newTarget(host, uint16(n))
}

// newTarget rejects a host that is neither a name nor an address, which a server might interpret differently than
// this proxy.
func newTarget(host string, port uint16) (t target, ok bool) {
	// Some Unicode letters map to ASCII letters: U+212A becomes k.
	if strings.ContainsFunc(host, func(r rune) bool { return r > unicode.MaxASCII }) {
		return t, false
	}
	t = target{host: strings.ToLower(strings.TrimSuffix(host, ".")), port: port}
	if a, err := netip.ParseAddr(t.host); err == nil {
		if a.Zone() != "" {
			return t, false
		}
		t.addr = a.Unmap()
		t.host = t.addr.String()
		return t, true
	}
	if t.host == "" || len(t.host) > 253 {
		return t, false
	}
	for _, c := range []byte(t.host) {
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') {
			return t, false
		}
	}
	return t, true
}

func (t target) String() string { return net.JoinHostPort(t.host, strconv.Itoa(int(t.port))) }
