package network

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A tenant's list limits the rules that its sessions may request.
func TestCovers(t *testing.T) {
	for _, test := range []struct {
		most, rule string
		want       bool
	}{
		{"example.org", "example.org", true},
		{"example.org", "example.org:443", true},
		{"example.org", "example.org:8080", false},
		{"example.org:443", "example.org", false},
		{"example.org:443", "example.org:80", false},
		{"example.org", "a.example.org", false},
		{"*.example.org", "a.example.org", true},
		{"*.example.org", "*.a.example.org", true},
		{"*.example.org", "example.org", false},
		{"*.example.org", "aexample.org", false},
		{"10.0.0.0/8", "10.1.0.0/16", true},
		{"10.0.0.0/8", "10.1.2.3", true},
		{"10.1.0.0/16", "10.0.0.0/8", false},
		{"10.0.0.0/16", "10.0.0.0/8", false},
		{"10.0.0.0/8", "10.1.2.3/8", true},
		{"10.0.0.0/8", "11.1.2.3", false},
		{"10.0.0.0/8", "[::ffff:10.0.0.1]:80", true},
		// Special ranges, and the addresses of this host, are covered only by rules within them.
		{"0.0.0.0/0", "93.184.215.14", true},
		{"0.0.0.0/0", "126.0.0.0/7", true},
		{"0.0.0.0/0", "127.0.0.1", false},
		{"*.internal", "host.sbxrun.internal:80", false},
		{"*.sbxrun.internal:80", "host.sbxrun.internal:80", false},
		{"host.sbxrun.internal", "host.sbxrun.internal:80", true},
		{"0.0.0.0/0", "[::ffff:127.0.0.1]:80", false},
		{"127.0.0.0/8", "127.0.0.1", true},
		{"126.0.0.0/7", "127.0.0.1", false},
		{"0.0.0.0/0", "0.0.0.0", false},
		{"0.0.0.0/0", "169.254.169.254", false},
		{"0.0.0.0/0", "10.0.0.0/8", false},
		{"0.0.0.0/0", "8.7.6.5", false},
		{"8.7.6.4/31", "8.7.6.5", false},
		{"8.7.6.5", "8.7.6.5", true},
		{"[::/0]", "[2606:4700::1]", true},
		{"[::/0]", "[::1]", false},
		{"[::/96]", "[::1]", false},
		{"[::/0]", "[64:ff9b::7f00:1]", false},
		{"[64:ff9b::/96]", "[64:ff9b::7f00:1]", true},
		{"[::/0]", "[fd00::1]", false},
	} {
		most, err := ParseRule(test.most)
		check.Must(t, err)
		rule, err := ParseRule(test.rule)
		check.Must(t, err)
		check.Equal(t, Covers(most, rule, []netip.Addr{netip.MustParseAddr("8.7.6.5")}), test.want, "%s covers %s", test.most, test.rule)
	}
}

// OwnAddresses returns the same addresses as package net.
func TestOwnAddresses(t *testing.T) {
	own, err := OwnAddresses()
	check.Must(t, err)
	all, err := net.InterfaceAddrs()
	check.Must(t, err)
	for _, a := range all {
		p := netip.MustParsePrefix(a.String())
		a := p.Addr().Unmap()
		check.That(t, a.IsLoopback() || slices.Contains(own, a), "%v is missing in %v", a, own)
	}
	check.That(t, !slices.ContainsFunc(own, netip.Addr.IsLoopback), "%v has a loopback address", own)
}
