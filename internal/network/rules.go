package network

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Matcher is a compiled [Rule].
type Matcher struct {
	Name   string       // a host name, or a domain with a leading dot; "" for a network
	Prefix netip.Prefix // a network, or a single address
	ports  []uint16
}

// defaultPorts are the ports of a rule without one.
var defaultPorts = []uint16{80, 443}

// Compile compiles a rule. It fails if the host looks like an address but is invalid.
func Compile(r Rule) (Matcher, error) {
	out := Matcher{ports: defaultPorts}
	if r.Port != 0 {
		out.ports = []uint16{r.Port}
	}
	if !strings.ContainsAny(r.Host, ":/") && strings.Trim(r.Host, "0123456789.") != "" {
		out.Name = strings.TrimPrefix(r.Host, "*")
		return out, nil
	}
	var err error
	if out.Prefix, err = parsePrefix(r.Host); err != nil {
		return out, fmt.Errorf("invalid address or network %q: want one such as 192.0.2.7, 10.1.2.0/24 or [2001:db8::1]", Clean(r.Host))
	}
	return out, nil
}

// Contains reports whether the rule allows an address. A network that extends beyond a special range
// allows nothing in that range. own lists the addresses of this host.
func (m Matcher) Contains(a netip.Addr, port uint16, own []netip.Addr) bool {
	return m.Prefix.Contains(a) && slices.Contains(m.ports, port) && confined(m.Prefix, single(a), own)
}

// Has reports whether the rule allows a host name. A rule for a domain does not include [HostName].
func (m Matcher) Has(name string, port uint16) bool {
	if !slices.Contains(m.ports, port) {
		return false
	}
	if strings.HasPrefix(m.Name, ".") && name != HostName {
		return strings.HasSuffix(name, m.Name) && len(name) > len(m.Name)
	}
	return m.Name != "" && name == m.Name
}

// Covers reports whether most allows everything that r allows. Both must compile. own lists the
// addresses of this host.
func Covers(most, r Rule, own []netip.Addr) bool {
	if most.Port != r.Port && (most.Port != 0 || !slices.Contains(defaultPorts, r.Port)) {
		return false
	}
	if most.Host == r.Host {
		return true
	}
	if below, ok := strings.CutPrefix(most.Host, "*"); ok && r.Host != HostName {
		return strings.HasSuffix(r.Host, below)
	}
	big, err1 := parsePrefix(most.Host)
	small, err2 := parsePrefix(r.Host)
	return err1 == nil && err2 == nil && within(small, big) && confined(big, small, own)
}

// errMapped rejects networks such as ::ffff:10.0.0.0/104: IPv4 addresses are compared unmapped, so
// they would never match one.
var errMapped = errors.New("IPv4 network in IPv6 notation")

func parsePrefix(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		if err == nil && p.Addr().Is4In6() {
			err = errMapped
		}
		return p.Masked(), err
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	return single(a.Unmap()), nil
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
