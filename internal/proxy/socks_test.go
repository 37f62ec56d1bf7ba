package proxy

import (
	"fmt"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// socksTarget parses requests of SOCKS5 (RFC 1928), and rejects unsupported ones.
func TestSocksTarget(t *testing.T) {
	const methods = "\x01\x00"
	for _, test := range []struct{ request, want string }{
		{methods + "\x05\x01\x00\x01\xc0\x00\x02\x07\x01\xbb", "192.0.2.7:443"},
		{methods + "\x05\x01\x00\x04\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x01\xbb", "[2001:db8::1]:443"},
		{methods + "\x05\x01\x00\x03\x0bExample.org\x00\x50", "example.org:80"},
		{"\x00\x05\x01\x00\x03\x01a\x00\x50", "a:80"},
		{methods + "\x04\x01\x00\x03\x01a\x00\x50", "code 1"}, // another version
		{methods + "\x05\x02\x00\x03\x01a\x00\x50", "code 7"}, // BIND
		{methods + "\x05\x01\x00\x09\x01a\x00\x50", "code 8"},
		{methods + "\x05\x01\x00\x03\x01a\x00\x00", "code 2"},
		{methods + "\x05\x01\x00\x03\x03a b\x00\x50", "code 2"},
		// The request is incomplete.
		{"", "code 1"},
		{"\x02\x00", "code 1"},
		{methods + "\x05\x01\x00", "code 1"},
		{methods + "\x05\x01\x00\x01\xc0", "code 1"},
		{methods + "\x05\x01\x00\x04\x20", "code 1"},
		{methods + "\x05\x01\x00\x03", "code 1"},
		{methods + "\x05\x01\x00\x03\x02a", "code 1"},
		{methods + "\x05\x01\x00\x03\x01a\x00", "code 1"},
	} {
		client, server := tcpPair(t)
		_, err := client.Write([]byte(test.request))
		check.Must(t, err)
		check.Must(t, client.CloseWrite())
		to, code := socksTarget(server)
		got := to.String()
		if code != socksOK {
			got = fmt.Sprint("code ", code)
		}
		check.That(t, got == test.want, "%q: %s, want %s", test.request, got, test.want)
		client.Close()
		server.Close()
	}
}
