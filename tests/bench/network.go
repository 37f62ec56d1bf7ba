package main

import (
	bits "encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/network"
)

// netClient is the first argument of the measuring process in a sandbox. The others say whether
// there is a proxy, the server's address, and what to do.
const netClient = "net-client"

// networks compares connections through the proxy of --net allow= with direct ones, as with --net
// host, and with those through a relay that only lets the kernel move the bytes. With two CPUs the
// second copy takes time from the first. The client measures from its own start; the server is
// this process.
func networks(builds []*build) {
	l := got(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	go serveBytes(l)
	between := got(net.Listen("tcp", "127.0.0.1:0"))
	defer between.Close()
	go relayBytes(between, l.Addr().String())
	size := int64(*megabytes) << 20
	const short = 1000
	in := func(b *build, proxied bool, server net.Listener, what string, n int64) func() time.Duration {
		flag := "host"
		if proxied {
			flag = "allow=" + server.Addr().String()
		}
		return func() time.Duration {
			cmd := b.command("--cwd", "none", "--ro-bind", self+":/bench", "--net", flag, "--", "/bench", netClient, strconv.FormatBool(proxied), server.Addr().String(), what, strconv.FormatInt(n, 10))
			return told(cmd)
		}
	}
	for _, m := range []struct {
		title, what string
		n           int64
	}{{fmt.Sprintf("%d MiB from a server; ratios of rates are the inverse", *megabytes), "read", size}, {fmt.Sprintf("%d short connections, one after the other: the median of one", short), "short", short}} {
		var variants []variant
		for _, b := range builds {
			variants = append(variants, variant{b.letter, b.name + ", through the proxy", in(b, true, l, m.what, m.n)})
		}
		variants = append(variants, variant{"C", "direct", in(builds[0], false, l, m.what, m.n)},
			variant{"D", "through a relay by splice(2)", in(builds[0], false, between, m.what, m.n)})
		compare("network", m.title, rounds(5), 1, variants)
	}
}

// eachConn calls serve for each connection and then closes it.
func eachConn(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			serve(c)
		}()
	}
}

// serveBytes answers each connection, whose first 9 bytes are a zero and a number, with that many
// bytes.
func serveBytes(l net.Listener) {
	piece := make([]byte, 1<<20)
	eachConn(l, func(c net.Conn) {
		var want [9]byte
		if _, err := io.ReadFull(c, want[:]); err != nil {
			return
		}
		for n := int64(bits.BigEndian.Uint64(want[1:])); n > 0; n -= int64(len(piece)) {
			if _, err := c.Write(piece[:min(n, int64(len(piece)))]); err != nil {
				return
			}
		}
	})
}

// relayBytes relays each connection to a server, in the kernel (splice(2)).
func relayBytes(l net.Listener, server string) {
	eachConn(l, func(c net.Conn) {
		up, err := net.Dial("tcp", server)
		if err != nil {
			return
		}
		defer up.Close()
		go func() { _, _ = io.Copy(up, c) }()
		_, _ = io.Copy(c, up) // the client reports errors
	})
}

// beNetClient is the process in a sandbox. It prints the time.
func beNetClient(args []string) {
	if len(args) != 4 {
		fail("want PROXIED SERVER WHAT N")
	}
	n := got(strconv.ParseInt(args[3], 10, 64))
	proxied := args[0] == "true"
	if args[2] == "read" {
		fmt.Println(fetch(proxied, args[1], n))
		return
	}
	var each []time.Duration
	for range n {
		each = append(each, fetch(proxied, args[1], 1))
	}
	slices.Sort(each)
	fmt.Println(each[len(each)/2])
}

// fetch connects and reads n bytes.
func fetch(proxied bool, server string, n int64) time.Duration {
	begin := time.Now()
	address := server
	if proxied {
		address = "127.0.0.1:" + strconv.Itoa(network.ProxyPort)
	}
	c := got(net.Dial("tcp", address))
	defer c.Close()
	if proxied {
		got(fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", server, server))
		answer := make([]byte, 0, 256)
		for !strings.HasSuffix(string(answer), "\r\n\r\n") {
			got(c.Read(answer[len(answer) : len(answer)+1]))
			answer = answer[:len(answer)+1]
		}
		if !strings.HasPrefix(string(answer), "HTTP/1.1 200 ") {
			fail("the proxy said %q", answer)
		}
	}
	got(c.Write(bits.BigEndian.AppendUint64([]byte{0}, uint64(n))))
	if read := got(io.Copy(io.Discard, struct{ io.Reader }{c})); read != n {
		fail("%d bytes of %d", read, n)
	}
	return time.Since(begin)
}
