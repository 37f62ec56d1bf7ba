package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/tests/check"
)

// listing returns the rules of a list, and resolves these names.
func listing(t *testing.T, list string, names map[string]string) *rules {
	t.Helper()
	parsed, err := network.ParseAllow(list)
	check.Must(t, err)
	r, err := compile(parsed)
	check.Must(t, err)
	r.resolve = func(_ context.Context, name string) (list []netip.Addr, err error) {
		for a := range strings.FieldsSeq(names[name]) {
			list = append(list, netip.MustParseAddr(a))
		}
		return list, nil
	}
	r.own = func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("8.7.6.5")}, nil }
	return r
}

// If the addresses of this host are unknown because no descriptor is free, a name that resolves to one is
// not permitted.
func TestOwnUnknown(t *testing.T) {
	r := listing(t, "own.example.org", map[string]string{"own.example.org": "8.7.6.5"})
	r.own = network.OwnAddresses
	restore := noFiles(t)
	got, err := r.permits(t.Context(), target{host: "own.example.org", port: 443})
	restore()
	check.That(t, len(got) == 0 && errors.Is(err, unix.EMFILE), "%v, %v", got, err)
}

// The proxy connects to the address that it checked, even if the name changes in the meantime.
func TestResolvedOnce(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.2:0")
	check.Must(t, err)
	defer l.Close()
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	r := listing(t, fmt.Sprintf("moves.example.org:%d,127.0.0.2:%d", port, port), nil)
	asked := 0
	r.resolve = func(context.Context, string) ([]netip.Addr, error) {
		asked++
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, byte(3 - min(asked, 2))})}, nil
	}
	s := newServer(r)
	defer s.end()
	c, _, err := s.connect(t.Context(), target{host: "moves.example.org", port: port})
	check.Must(t, err)
	defer c.Close()
	to := c.RemoteAddr().String()
	check.That(t, asked == 1 && to == l.Addr().String(), "asked %d times, connected to %s", asked, to)
	c, _, err = s.connect(t.Context(), target{host: "moves.example.org", port: port})
	_, refused := errors.AsType[refusal](err)
	check.That(t, refused, "the second answer: %v, %v", c, err)
}

func TestPermits(t *testing.T) {
	names := map[string]string{
		"github.com": "151.101.0.223 2a04:4e42::223", "a.example.org": "93.184.215.14", "example.org": "93.184.215.14", "inside.corp": "10.1.2.3",
		"rebind.example.org": "127.0.0.1", "half.example.org": "127.0.0.1 93.184.215.14", "localhost": "127.0.0.1 ::1", "host.sbxrun.internal": "93.184.215.14", "own.example.org": "8.7.6.5",
		"metadata.example.org": "169.254.169.254", "azure.example.org": "168.63.129.16", "mapped.example.org": "::ffff:127.0.0.1", "nat64.example.org": "64:ff9b::7f00:1",
		"siit.example.org": "::ffff:0:7f00:1", "six.example.org": "fd00:ec2::254", "zero.example.org": "0.0.0.0", "shared.example.org": "100.100.100.200", "teredo.example.org": "2001:0:1::1", "sixtofour.example.org": "2002:7f00:1::", "compat.example.org": "::7f00:1",
		"site.example.org": "fec0::1", "all.example.org": "255.255.255.255", "group.example.org": "224.0.0.1",
	}
	const list = "github.com,*.example.org,inside.corp:5432,10.1.2.3:5432,192.0.2.0/24:8443,[2001:db8::1]:443,host.sbxrun.internal:8000,*.internal:9000"
	for _, tt := range []struct{ ask, want string }{
		{"github.com:443", "151.101.0.223,2a04:4e42::223"},
		{"GitHub.com.:80", "151.101.0.223,2a04:4e42::223"},
		{"github.com:22", "not listed"},
		{"github.com.evil:443", "not listed"},
		{"xgithub.com:443", "not listed"},
		{"a.example.org:443", "93.184.215.14"},
		{"example.org:443", "not listed"},
		{"xexample.org:443", "not listed"},
		{".example.org:443", "not listed"},
		{"inside.corp:5432", "10.1.2.3"},
		{"inside.corp:443", "not listed"},
		{"10.1.2.3:5432", "10.1.2.3"},
		{"10.1.2.4:5432", "not listed"},
		{"[::ffff:10.1.2.3]:5432", "10.1.2.3"},
		{"192.0.2.77:8443", "192.0.2.77"},
		{"192.0.2.77:443", "not listed"},
		{"[2001:db8::1]:443", "2001:db8::1"},
		{"151.101.0.223:443", "not listed"}, // only its name is listed
		{"127.0.0.1:8000", "not listed"},
		{"localhost:8000", "the host is host.sbxrun.internal"},
		{"host.sbxrun.internal:8000", "127.0.0.1,::1"}, // without asking a resolver
		{"host.sbxrun.internal:80", "not listed"},
		{"host.sbxrun.internal:9000", "not listed"}, // by a rule for a domain
		{"2130706433:443", "not listed"},
		{"half.example.org:443", "93.184.215.14"},
		{"rebind.example.org:443", "127.0.0.1, a loopback address"},
		{"own.example.org:443", "an address of this host"},
		{"metadata.example.org:80", "link-local"},
		{"azure.example.org:80", "metadata"},
		{"mapped.example.org:80", "loopback"},
		{"nat64.example.org:80", "translated"},
		{"siit.example.org:80", "translated"},
		{"six.example.org:80", "private"},
		{"zero.example.org:80", "this"},
		{"shared.example.org:80", "shared"},
		{"teredo.example.org:80", "reserved"},
		{"sixtofour.example.org:80", "translated"},
		{"compat.example.org:80", "reserved"},
		{"site.example.org:80", "private"},
		{"all.example.org:80", "reserved"},
		{"group.example.org:80", "multicast"},
		{"gone.example.org:80", "no address"},
	} {
		r := listing(t, list, names)
		target, ok := parseTarget(tt.ask, 0)
		if !ok {
			t.Errorf("%s is no target", tt.ask)
			continue
		}
		addrs, err := r.permits(t.Context(), target)
		var got []string
		for _, a := range addrs {
			got = append(got, a.String())
		}
		check.That(t, (err == nil || strings.Contains(err.Error(), tt.want)) && (err != nil || strings.Join(got, ",") == tt.want), "%s: %v, %v, want %s", tt.ask, got, err, tt.want)
	}
}

// A network that extends beyond a special range allows no address in that range, and no name that resolves to one.
func TestSpecialRanges(t *testing.T) {
	special := []string{
		"127.0.0.1", "127.255.0.9", "0.0.0.0", "0.1.2.3", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "168.63.129.16",
		"192.0.0.192", "224.0.0.1", "255.255.255.255", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "8.7.6.5", // the last one is this host's
		"::1", "::", "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b:1::1", "2002:7f00:1::1", "2001::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
	}
	for _, a := range special {
		addr := netip.MustParseAddr(a).Unmap()
		name := map[string]string{"a.example.org": a}
		alone := strings.TrimSuffix(netip.AddrPortFrom(addr, 443).String(), ":443")
		ask := target{host: addr.String(), addr: addr, port: 443}
		for _, tt := range []struct {
			list string
			ask  target
			want bool
		}{
			{"0.0.0.0/0,[::/0]", ask, false},
			{"0.0.0.0/1,128.0.0.0/1,[::/1],[8000::/1]", ask, false},
			{"*.example.org,0.0.0.0/0,[::/0]", target{host: "a.example.org", port: 443}, false},
			{alone, ask, true},
			{"*.example.org," + alone, target{host: "a.example.org", port: 443}, true},
		} {
			r := listing(t, tt.list, name)
			got, err := r.permits(t.Context(), tt.ask)
			check.That(t, (err == nil) == tt.want, "allow=%s, %s: %v, %v", tt.list, tt.ask, got, err)
		}
	}
	r := listing(t, "0.0.0.0/0,[::/0],127.0.0.0/8:8000", nil)
	for ask, want := range map[string]bool{"93.184.215.14:443": true, "[2606:4700::1]:80": true, "127.0.0.1:80": false, "127.9.9.9:8000": true} {
		target, _ := parseTarget(ask, 0)
		got, err := r.permits(t.Context(), target)
		check.That(t, (err == nil) == want, "%s: %v, %v", ask, got, err)
	}
}

func TestTargets(t *testing.T) {
	for _, bad := range []string{"", "host", ":443", "host:0", "host:65536", "a b:80", "h\x00:80", "host\n:80", "[fe80::1%eth0]:80", "hö.example:80", "\u212a.example:80", "a/b:80", "a@b:80", strings.Repeat("a", 254) + ":80"} {
		got, ok := parseTarget(bad, 0)
		check.That(t, !ok, "%q is %v", bad, got)
	}
}

func TestClassify(t *testing.T) {
	for _, tt := range []struct {
		text string
		kind int
		sure bool
	}{
		{"", kindHTTP, false},
		{"\x16\x03\x01", kindTLS, true},
		{"\x14\x03\x03\x00\x01\x01\x16", kindTLS, true},
		{"\x80\x2e\x01\x03\x03", kindTLS, true}, // SSL 2.0 format
		{"\x80\x2e\x01", kindTLS, false},
		{"\x80", kindTLS, false},
		{"\x80\x2e\x02", kindOther, true},
		{"\x80\x2e\x01\x00", kindOther, true},
		{"GET / HTTP/1.1\r\n", kindHTTP, true},
		{"\v\fGET / HTTP/1.1\r\n", kindHTTP, true},
		{"\r\n\r\nGET / HTTP/1.1\r\n", kindHTTP, true},
		{"get / http/1.1\n", kindHTTP, true},
		{"GET / HTTP/1.1", kindHTTP, false},
		{"PRI * HTTP/2.0\r\n", kindHTTP, true},
		{"SSH-2.0-OpenSSH\r\n", kindOther, true},
		{"*1\r\n$4\r\nPING\r\n", kindOther, true},
		{"\x00\x00\x00\x08\x04\xd2\x16\x2f", kindOther, true},
		{"NICK somebody\r\n", kindOther, true},
		{"GET http://other.example.org/\r\n", kindHTTP, true},
		{"GET http://other.example.org/ \r\n", kindHTTP, true},
		{"\r\nGET\tx\n", kindHTTP, true},
		{"GET / FTP/1.1\r\n", kindHTTP, true},
		{"POST Http://other.example.org/\r\n", kindHTTP, true},
		{"get /\r\n", kindHTTP, true},
		{"GET\xa0x\r\n", kindHTTP, true},
		{"POST /\x00 HTTP/1.1\r\n", kindHTTP, true},
		{"POST /\x00", kindHTTP, false},
		{"AMQP\x00\x00\x09\x01", kindOther, true},
		{"0033git-upload-pack /x\x00host=www.example.org\x00", kindOther, true},
		{"GET http://other.example.org/", kindHTTP, false},
		{"get key\r\n", kindOther, true}, // memcached
		{"/file\r\n", kindOther, true},   // Gopher
		{"GETATTR\r\n", kindOther, true},
		{"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\nGET /", kindHTTP, true},
		{"PROXY UNKNOWN\r\n", kindHTTP, true},
		{"PROXY TCP4 192.0.2.1", kindHTTP, false},
		{"\r\n\r\n\x00", kindHTTP, true},
		{"\x00GET / HTTP/1.1\r\n", kindHTTP, true}, // skipped by some servers
		{"\x00\x00 \x1f\r\nget\t/\n", kindHTTP, true},
		{"\xef\xbb\xbfPOST /\n", kindHTTP, true},
		{"\xff\xfeGET /\n", kindHTTP, true},
		{"\x85\xa0\x1cGET /\n", kindHTTP, true},
		{"\x00", kindHTTP, false},
		{"\x00GET /", kindHTTP, false},
		{"\x1cGET\x1c/\x1cHTTP/1.1\r\n", kindHTTP, true},
		{"\x00AbC\x01", kindOther, true},              // DNS
		{"\x00AUTH EXTERNAL 30\r\n", kindOther, true}, // D-Bus
		{"\xef\xbb", kindHTTP, false},
		{"\x00GE", kindHTTP, false},
		{"\x00\x00\x00\x50\x00\x03\x00\x00user\x00", kindOther, true}, // PostgreSQL
		{"\x00A \x01", kindOther, true},                               // DNS
		{"\x00\x00\x00\x2d\x00\x00\x00\x01", kindOther, true},
		{"\x05\x01\x00", kindOther, true}, // SOCKS
		{"\xffSMBr\x00", kindOther, true},
		{"\r\n\r\n\x00\r\nQUIT\n!\x11\x00\x0c", kindHTTP, true},
		{"OPTIONS rtsp://www.example.org/ RTSP/1.0\r\n", kindOther, true},
	} {
		kind, sure := classify([]byte(tt.text))
		check.That(t, sure == tt.sure && (!sure || kind == tt.kind), "%q: kind %d, %v", tt.text, kind, sure)
	}
}

// A host that looks like an address must be a valid one.
func TestCompile(t *testing.T) {
	for _, bad := range []string{"1.2.3", "1.2.3.4.5", "a.b:80:81", "a/b", "10.0.0.0/33", "::ffff:10.1.2.0/120", "::ffff:a01:200/120", "1.2.3.4/x", "::1::", "256.1.1.1"} {
		_, err := compile([]network.Rule{{Host: bad}})
		check.That(t, err != nil, "%q is taken", bad)
	}
}
