package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/network"
)

// rules say which hosts may be reached.
type rules struct {
	names    []named
	networks []listed
	resolve  func(ctx context.Context, name string) ([]netip.Addr, error)
	own      func() []netip.Addr // of the host
}

// named is a rule for a name, or if it begins with a dot for all below it.
type named struct {
	name  string
	ports []uint16
}

// listed is a rule for a network, or one address.
type listed struct {
	prefix netip.Prefix
	ports  []uint16
}

// usual are the ports of a rule that names none.
var usual = []uint16{80, 443}

// compile makes rules of what the user has listed.
func compile(list []network.Rule) (*rules, error) {
	r := &rules{resolve: lookup, own: addresses}
	for _, l := range list {
		ports := usual
		if l.Port != 0 {
			ports = []uint16{l.Port}
		}
		address := strings.ContainsAny(l.Host, ":/") || strings.Trim(l.Host, "0123456789.") == ""
		switch {
		case address:
			prefix, err := parsePrefix(l.Host)
			if err != nil {
				return nil, fmt.Errorf("%q is no address and no network; want one such as 192.0.2.7, 10.1.2.0/24 or [2001:db8::1]", network.Clean(l.Host))
			}
			r.networks = append(r.networks, listed{prefix, ports})
		default:
			r.names = append(r.names, named{strings.TrimPrefix(l.Host, "*"), ports})
		}
	}
	return r, nil
}

// CheckRule finds what looks like an address and is none.
func CheckRule(r network.Rule) error {
	_, err := compile([]network.Rule{r})
	return err
}

// Covers reports whether all that a rule allows is allowed by another one, which are checked.
func Covers(most, r network.Rule) bool {
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
	return err1 == nil && err2 == nil && big.Bits() <= small.Bits() && big.Contains(small.Addr())
}

func parsePrefix(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		return p.Masked(), err
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	a = a.Unmap()
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// A refusal is why a host may not be reached.
type refusal string

func (r refusal) Error() string { return string(r) }

const notListed = refusal("not listed")

// permits checks a host, as it was asked for, and returns the addresses that may be connected to.
// It resolves the name, once: what is returned is what was checked. A [refusal], or the resolver's
// error.
func (r *rules) permits(ctx context.Context, t target) ([]netip.Addr, error) {
	if t.addr.IsValid() {
		if r.lists(t.addr, t.port) {
			return []netip.Addr{t.addr}, nil
		}
		return nil, notListed
	}
	if !r.listsName(t) {
		return nil, notListed
	}
	found, err := r.resolve(ctx, t.host)
	if err != nil {
		return nil, fmt.Errorf("cannot be resolved: %w", err)
	}
	local := t.host == "localhost" // and that is what was listed
	own := r.own()
	var good []netip.Addr
	why := ""
	for _, a := range found {
		a = a.Unmap().WithZone("")
		kind := special(a)
		if kind == "" && slices.Contains(own, a) {
			kind = "an address of this host"
		}
		if kind == "" || r.lists(a, t.port) || local && a.IsLoopback() {
			good = append(good, a)
		} else if why == "" {
			why = fmt.Sprintf("it resolves to %s, %s, which is not listed itself", a, kind)
		}
	}
	if len(good) == 0 && why != "" {
		return nil, refusal(why)
	}
	if len(good) == 0 {
		return nil, errors.New("it has no address")
	}
	return good, nil
}

// lists reports whether an address is listed as one.
func (r *rules) lists(a netip.Addr, port uint16) bool {
	return slices.ContainsFunc(r.networks, func(l listed) bool { return l.prefix.Contains(a) && slices.Contains(l.ports, port) })
}

func (r *rules) listsName(t target) bool {
	return slices.ContainsFunc(r.names, func(n named) bool {
		if !slices.Contains(n.ports, t.port) {
			return false
		}
		if strings.HasPrefix(n.name, ".") {
			return strings.HasSuffix(t.host, n.name) && len(t.host) > len(n.name)
		}
		return t.host == n.name
	})
}

// lookup resolves a name as the host does. With a dot at the end it is not looked for in the host's
// own domain as well (resolv.conf(5), search), where it could mean something else.
func lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if strings.Contains(name, ".") {
		name += "."
	}
	return resolver.LookupNetIP(ctx, "ip", name)
}

var resolver = net.Resolver{PreferGo: true}

// addresses are the host's own.
func addresses() (list []netip.Addr) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			list = append(list, p.Addr().Unmap())
		}
	}
	return list
}

// reserved are networks that are not for hosts of the internet at large, or that have an address of
// IPv4 within one of IPv6, which could be any (RFC 6890, RFC 4291, RFC 6052, RFC 3056, RFC 4380).
var reserved = []struct{ prefix, kind string }{
	{"0.0.0.0/8", "an address of this network"},
	{"100.64.0.0/10", "a shared address of a provider"},
	{"168.63.129.16/32", "a metadata address"},
	{"192.0.0.0/24", "a reserved address"},
	{"192.88.99.0/24", "a reserved address"},
	{"198.18.0.0/15", "an address for benchmarks"},
	{"240.0.0.0/4", "a reserved address"},
	{"::/96", "a reserved address"},
	{"64:ff9b::/96", "a translated address"},
	{"64:ff9b:1::/48", "a translated address"},
	{"100::/64", "a reserved address"},
	{"2001::/23", "a reserved address"},
	{"2002::/16", "a translated address"},
	{"fec0::/10", "a private address"},
}

var prefixes = func() (list []netip.Prefix) {
	for _, r := range reserved {
		list = append(list, netip.MustParsePrefix(r.prefix))
	}
	return list
}()

// special says what an address is that is no ordinary one of the internet; "" for one that is.
func special(a netip.Addr) string {
	switch {
	case a.IsLoopback():
		return "a loopback address"
	case a.IsUnspecified():
		return "an address of this host"
	case a.IsPrivate():
		return "a private address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	}
	for i, p := range prefixes {
		if p.Contains(a) {
			return reserved[i].kind
		}
	}
	return ""
}

// listsTarget reports whether a host is listed as it was asked for.
func (r *rules) listsTarget(t target) bool {
	if t.addr.IsValid() {
		return r.lists(t.addr, t.port)
	}
	return r.listsName(t)
}
