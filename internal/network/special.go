package network

import (
	"net/netip"
	"os"
	"sync"
	"syscall"
)

type specialRange struct {
	prefix netip.Prefix
	kind   string
}

// special returns the networks that are not for public hosts, and those that embed an arbitrary IPv4
// address (RFC 6890, RFC 4291, RFC 6052, RFC 7915, RFC 3056, RFC 4380). It parses them on first use
// because sbxrun links this package and rarely needs them.
var special = sync.OnceValue(func() []specialRange {
	return []specialRange{
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
})

// Special describes the special range that contains an address, or returns "". own lists the
// addresses of this host, which count as special, too.
func Special(a netip.Addr, own []netip.Addr) (kind string) {
	eachSpecial(single(a), own, func(r specialRange) {
		if kind == "" {
			kind = r.kind
		}
	})
	return kind
}

// confined reports whether a rule stays within every special range that contains p. A rule that does
// not, such as 0.0.0.0/0, is about the public internet and does not allow p.
func confined(rule, p netip.Prefix, own []netip.Addr) bool {
	inside := true
	eachSpecial(p, own, func(r specialRange) { inside = inside && within(rule, r.prefix) })
	return inside
}

// eachSpecial calls f for every special range that contains all of p. Each address of this host forms its own range.
func eachSpecial(p netip.Prefix, own []netip.Addr, f func(specialRange)) {
	for _, r := range special() {
		if within(p, r.prefix) {
			f(r)
		}
	}
	for _, a := range own {
		if s := single(a); within(p, s) {
			f(specialRange{s, "an address of this host"})
		}
	}
}

// within reports whether all of p is in q.
func within(p, q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }

// OwnAddresses returns the addresses of this host, except for loopback addresses. It does the work of
// net.InterfaceAddrs because package net would slow down every start of sbxrun.
func OwnAddresses() (list []netip.Addr, err error) {
	dump, err := syscall.NetlinkRIB(syscall.RTM_GETADDR, syscall.AF_UNSPEC)
	if err != nil {
		return nil, os.NewSyscallError("netlinkrib", err)
	}
	messages, err := syscall.ParseNetlinkMessage(dump)
	if err != nil {
		return nil, os.NewSyscallError("parsenetlinkmessage", err)
	}
	for i := range messages {
		if messages[i].Header.Type != syscall.RTM_NEWADDR {
			continue
		}
		attributes, err := syscall.ParseNetlinkRouteAttr(&messages[i])
		if err != nil {
			return nil, os.NewSyscallError("parsenetlinkrouteattr", err)
		}
		for _, attr := range attributes {
			// On a point-to-point link, IFA_ADDRESS is the peer and IFA_LOCAL this host. The peer is special as well,
			// which errs on the safe side.
			if attr.Attr.Type != syscall.IFA_ADDRESS && attr.Attr.Type != syscall.IFA_LOCAL {
				continue
			}
			if a, ok := netip.AddrFromSlice(attr.Value); ok && !a.Unmap().IsLoopback() {
				list = append(list, a.Unmap())
			}
		}
	}
	return list, nil
}
