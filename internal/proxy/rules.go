package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/hosts"
	"github.com/sbxrun/sbxrun/internal/network"
)

// rules say which hosts may be reached.
type rules struct {
	list    []hosts.Rule
	resolve func(ctx context.Context, name string) ([]netip.Addr, error)
	own     func() ([]netip.Addr, error) // of the host
}

// compile makes rules of what the user has listed.
func compile(list []network.Rule) (*rules, error) {
	r := &rules{resolve: lookup, own: addresses}
	for _, l := range list {
		rule, err := hosts.Read(l)
		if err != nil {
			return nil, err
		}
		r.list = append(r.list, rule)
	}
	return r, nil
}

// A refusal is why a host may not be reached.
type refusal string

func (r refusal) Error() string { return string(r) }

const notListed = refusal("not listed")

// permits checks a host, as it was asked for, and returns the addresses that may be connected to.
// It resolves the name, once: what is returned is what was checked. A [refusal], or the resolver's
// error.
func (r *rules) permits(ctx context.Context, t target) ([]netip.Addr, error) {
	if !r.lists(t) {
		return nil, notListed
	}
	if t.addr.IsValid() {
		return []netip.Addr{t.addr}, nil
	}
	found, err := r.resolve(ctx, t.host)
	if err != nil {
		return nil, fmt.Errorf("cannot be resolved: %w", err)
	}
	local := t.host == "localhost" // and that is what was listed
	own, err := r.own()
	if err != nil {
		return nil, fmt.Errorf("cannot be compared with the addresses of this host: %w", err)
	}
	var good []netip.Addr
	why := ""
	for _, a := range found {
		a = a.Unmap().WithZone("")
		kind := special(a)
		if kind == "" && slices.Contains(own, a) {
			kind = "an address of this host"
		}
		if kind == "" || r.lists(target{addr: a, port: t.port}) || local && a.IsLoopback() {
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

// lists reports whether a host is listed as it was asked for.
func (r *rules) lists(t target) bool {
	return slices.ContainsFunc(r.list, func(l hosts.Rule) bool {
		if t.addr.IsValid() {
			return l.Contains(t.addr, t.port)
		}
		return l.Has(t.host, t.port)
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
func addresses() (list []netip.Addr, err error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			return nil, err
		}
		list = append(list, p.Addr().Unmap())
	}
	return list, nil
}

// reserved are networks that are not for hosts of the internet at large, or that have an address of
// IPv4 within one of IPv6, which could be any (RFC 6890, RFC 4291, RFC 6052, RFC 7915, RFC 3056, RFC 4380).
var reserved = []struct {
	prefix netip.Prefix
	kind   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this network"},
	{netip.MustParsePrefix("100.64.0.0/10"), "a shared address of a provider"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a metadata address"},
	{netip.MustParsePrefix("192.0.0.0/24"), "a reserved address"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a reserved address"},
	{netip.MustParsePrefix("198.18.0.0/15"), "an address for benchmarks"},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address"},
	{netip.MustParsePrefix("::/96"), "a reserved address"},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "a translated address"},
	{netip.MustParsePrefix("64:ff9b::/96"), "a translated address"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "a translated address"},
	{netip.MustParsePrefix("100::/64"), "a reserved address"},
	{netip.MustParsePrefix("2001::/23"), "a reserved address"},
	{netip.MustParsePrefix("2002::/16"), "a translated address"},
	{netip.MustParsePrefix("fec0::/10"), "a private address"},
}

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
	for _, r := range reserved {
		if r.prefix.Contains(a) {
			return r.kind
		}
	}
	return ""
}
