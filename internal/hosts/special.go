package hosts

import (
	"net"
	"net/netip"
)

// special are networks that are not for hosts of the internet at large, or that embed an IPv4
// address, which can be any (RFC 6890, RFC 4291, RFC 6052, RFC 7915, RFC 3056, RFC 4380).
var special = []struct {
	prefix netip.Prefix
	kind   string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address"},
	{netip.MustParsePrefix("::1/128"), "a loopback address"},
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this network"},
	{netip.MustParsePrefix("::/128"), "an address of this host"},
	{netip.MustParsePrefix("10.0.0.0/8"), "a private address"},
	{netip.MustParsePrefix("172.16.0.0/12"), "a private address"},
	{netip.MustParsePrefix("192.168.0.0/16"), "a private address"},
	{netip.MustParsePrefix("fc00::/7"), "a private address"},
	{netip.MustParsePrefix("fec0::/10"), "a private address"},
	{netip.MustParsePrefix("169.254.0.0/16"), "a link-local address"},
	{netip.MustParsePrefix("fe80::/10"), "a link-local address"},
	{netip.MustParsePrefix("224.0.0.0/4"), "a multicast address"},
	{netip.MustParsePrefix("ff00::/8"), "a multicast address"},
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
}

// Special returns what distinguishes an address from an ordinary one of the internet, or "". own are
// the addresses of this host.
func Special(a netip.Addr, own []netip.Addr) (kind string) {
	eachSpecial(single(a), own, func(_ netip.Prefix, k string) {
		if kind == "" {
			kind = k
		}
	})
	return kind
}

// confined reports whether a rule stays within every special range that contains p. One that does
// not, such as 0.0.0.0/0, is about the internet and was not meant for p.
func confined(rule, p netip.Prefix, own []netip.Addr) bool {
	inside := true
	eachSpecial(p, own, func(s netip.Prefix, _ string) { inside = inside && within(rule, s) })
	return inside
}

// eachSpecial calls f for every special range that contains all of p. Each address of this host
// counts as one more range.
func eachSpecial(p netip.Prefix, own []netip.Addr, f func(netip.Prefix, string)) {
	for _, s := range special {
		if within(p, s.prefix) {
			f(s.prefix, s.kind)
		}
	}
	for _, a := range own {
		if s := single(a); within(p, s) {
			f(s, "an address of this host")
		}
	}
}

// within reports whether all of p is in q.
func within(p, q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }

// Own returns the addresses of this host, except for loopback ones.
func Own() (list []netip.Addr, err error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			return nil, err
		}
		if a := p.Addr().Unmap(); !a.IsLoopback() {
			list = append(list, a)
		}
	}
	return list, nil
}
