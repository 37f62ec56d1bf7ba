// Package hosts reads the rules of a list of hosts: names, addresses and networks. What it takes to read
// addresses would be initialised at each start of sbxrun, which therefore only passes them on.
package hosts

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/network"
)

// Rule is a rule that was read.
type Rule struct {
	Name   string       // or if it begins with a dot all below it; "" for a network
	Prefix netip.Prefix // a network, or one address
	ports  []uint16
}

// usual are the ports of a rule that names none.
var usual = []uint16{80, 443}

// Read reads a rule. An error is that it looks like an address and is none.
func Read(r network.Rule) (Rule, error) {
	out := Rule{ports: usual}
	if r.Port != 0 {
		out.ports = []uint16{r.Port}
	}
	if !strings.ContainsAny(r.Host, ":/") && strings.Trim(r.Host, "0123456789.") != "" {
		out.Name = strings.TrimPrefix(r.Host, "*")
		return out, nil
	}
	var err error
	if out.Prefix, err = parsePrefix(r.Host); err != nil {
		return out, fmt.Errorf("%q is no address and no network; want one such as 192.0.2.7, 10.1.2.0/24 or [2001:db8::1]", network.Clean(r.Host))
	}
	return out, nil
}

// Contains reports whether the rule allows an address. A network that extends beyond a special range
// allows nothing in it; own are the addresses of this host.
func (r Rule) Contains(a netip.Addr, port uint16, own []netip.Addr) bool {
	return r.Prefix.Contains(a) && slices.Contains(r.ports, port) && confined(r.Prefix, single(a), own)
}

// Has reports whether a name is one of the rule's.
func (r Rule) Has(name string, port uint16) bool {
	if !slices.Contains(r.ports, port) {
		return false
	}
	if strings.HasPrefix(r.Name, ".") {
		return strings.HasSuffix(name, r.Name) && len(name) > len(r.Name)
	}
	return r.Name != "" && name == r.Name
}

// Covers reports whether all that a rule allows is allowed by another one. Both were read without
// an error; own are the addresses of this host.
func Covers(most, r network.Rule, own []netip.Addr) bool {
	if most.Port != r.Port && (most.Port != 0 || !slices.Contains(usual, r.Port)) {
		return false
	}
	if most.Host == r.Host {
		return true
	}
	if below, ok := strings.CutPrefix(most.Host, "*"); ok {
		return strings.HasSuffix(r.Host, below)
	}
	big, err1 := parsePrefix(most.Host)
	small, err2 := parsePrefix(r.Host)
	return err1 == nil && err2 == nil && within(small, big) && confined(big, small, own)
}

// errMapped: addresses of IPv4 are compared as such, and none would be in a network of IPv6.
var errMapped = errors.New("it is a network of IPv4, in the form of IPv6")

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
