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

// rules decide which hosts the sandbox may reach.
type rules struct {
	list    []network.Matcher
	resolve func(ctx context.Context, name string) ([]netip.Addr, error)
	own     func() ([]netip.Addr, error) // addresses of this host
}

// compile compiles the rules of a list.
func compile(list []network.Rule) (*rules, error) {
	r := &rules{resolve: lookup, own: network.OwnAddresses}
	for _, l := range list {
		rule, err := network.Compile(l)
		if err != nil {
			return nil, err
		}
		r.list = append(r.list, rule)
	}
	return r, nil
}

// A refusal is the reason why the sandbox may not reach a host.
type refusal string

func (r refusal) Error() string { return string(r) }

const notListed = refusal("not listed")

// permits checks a requested host and returns the addresses to connect to. It resolves a name only
// once, so that the returned addresses are the checked ones. The error is a [refusal], or the
// resolver's.
func (r *rules) permits(ctx context.Context, t target) ([]netip.Addr, error) {
	if err := r.check(t); err != nil {
		return nil, err
	}
	if t.addr.IsValid() {
		return []netip.Addr{t.addr}, nil
	}
	if t.host == network.HostName {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	found, err := r.resolve(ctx, t.host)
	if err != nil {
		return nil, fmt.Errorf("cannot resolve the name: %w", err)
	}
	own, err := r.ownAddresses()
	if err != nil {
		return nil, err
	}
	var good []netip.Addr
	why := ""
	for _, a := range found {
		a = a.Unmap().WithZone("")
		kind := network.Special(a, own)
		if kind == "" || r.contains(a, t.port, own) {
			good = append(good, a)
		} else if why == "" {
			why = fmt.Sprintf("it resolves to %s, %s, which is not listed itself", a, kind)
		}
	}
	if len(good) == 0 && why != "" {
		return nil, refusal(why)
	}
	if len(good) == 0 {
		return nil, errors.New("the name has no address")
	}
	return good, nil
}

// check returns a [refusal] if the requested name or address is not listed.
func (r *rules) check(t target) error {
	if !t.addr.IsValid() {
		if t.host == "localhost" || strings.HasSuffix(t.host, ".localhost") {
			return refusal("it is the sandbox itself, which needs no proxy; the host is " + network.HostName)
		}
		if !slices.ContainsFunc(r.list, func(l network.Matcher) bool { return l.Has(t.host, t.port) }) {
			return notListed
		}
		return nil
	}
	own, err := r.ownAddresses()
	if err == nil && !r.contains(t.addr, t.port, own) {
		err = notListed
	}
	return err
}

// contains reports whether a rule allows an address.
func (r *rules) contains(a netip.Addr, port uint16, own []netip.Addr) bool {
	return slices.ContainsFunc(r.list, func(l network.Matcher) bool { return l.Contains(a, port, own) })
}

func (r *rules) ownAddresses() ([]netip.Addr, error) {
	own, err := r.own()
	if err != nil {
		return nil, fmt.Errorf("cannot list the addresses of this host: %w", err)
	}
	return own, nil
}

// lookup resolves a name as the host does. The trailing dot prevents a search in the host's own domain
// (resolv.conf(5)), where the name could mean another host.
func lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	return lookupBy(ctx, name, new(net.Dialer).DialContext)
}

// lookupBy is lookup with a function that connects to a name server. All sockets are closed when ctx is done.
// net.Resolver would keep them until its own timeout, and continue a lookup that two callers share, so that a
// sandbox could open any number of sockets by canceling requests.
func lookupBy(ctx context.Context, name string, dial func(ctx context.Context, network, address string) (net.Conn, error)) ([]netip.Addr, error) {
	if strings.Contains(name, ".") {
		name += "."
	}
	own := net.Resolver{PreferGo: true, Dial: func(inner context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(inner, network, address)
		if err == nil {
			context.AfterFunc(ctx, func() { conn.Close() })
		}
		return conn, err
	}}
	return own.LookupNetIP(ctx, "ip", name)
}
