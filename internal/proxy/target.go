package proxy

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
)

// target is a host and a port as the sandbox asks for them.
type target struct {
	host string     // lower case, without a dot at the end
	addr netip.Addr // if the host is one
	port uint16
}

// parseTarget takes HOST:PORT; fallback is the port if there is none, 0 for an error then.
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

// newTarget refuses what no name and no address is: with it the proxy would ask for one thing and
// somebody else understand another.
func newTarget(host string, port uint16) (t target, ok bool) {
	// Unicode has other letters that become ASCII, or fold to it: U+212A becomes k.
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
