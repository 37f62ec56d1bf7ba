package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// hostOf returns a report's entry of a host, nil if absent.
func hostOf(r *harness.Result, host string) *harness.ReportHost {
	if r.Report == nil || r.Report.Network == nil {
		return nil
	}
	for i, h := range r.Report.Network.Hosts {
		if h.Host == host {
			return &r.Report.Network.Hosts[i]
		}
	}
	return nil
}

// inLab runs a Python program in a sandbox with a list.
func inLab(t *testing.T, list, program string) *harness.Result {
	t.Helper()
	ca := shared("ca.pem")
	return harness.Run(t, harness.Options{}, "--cwd", "none", "--timeout", harness.Deadline(time.Minute).String(), "--ro-bind", ca, "--env", "CA="+ca, "--net", "allow="+list, "/usr/bin/python3", "-c", prelude+program)
}

// prelude is common to the programs. ask prints the results of a tunnel and a request through it.
const prelude = `
import os, select, socket, ssl, struct, sys, urllib.request
def proxy():
    s = socket.create_connection(("127.0.0.1", 3128)); s.settimeout(float(os.environ["FIXTURE_SECONDS"]) / 3); return s
def line(s):
    b = b""
    while not b.endswith(b"\n"):
        c = s.recv(1)
        if not c: break
        b += c
    return b
def tunnel(to):
    s = proxy(); s.sendall(("CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (to, to)).encode())
    status = line(s).split()[1].decode()
    while line(s) not in (b"\r\n", b""): pass
    return s, status
def socks(to, port, kind=3, command=1):
    s = proxy(); s.sendall(b"\x05\x01\x00"); s.recv(2)
    where = bytes([len(to)]) + to.encode() if kind == 3 else socket.inet_pton(socket.AF_INET if kind == 1 else socket.AF_INET6, to)
    s.sendall(bytes([5, command, 0, kind]) + where + struct.pack(">H", port))
    return s, s.recv(10)[1]
def rest(s):
    b = b""
    try:
        while True:
            c = s.recv(65536)
            if not c: break
            b += c
    except OSError as e: b += type(e).__name__.encode()
    return b
def tls(s, name):
    c = ssl.create_default_context(cafile=os.environ["CA"]); c.check_hostname = False
    return c.wrap_socket(s, server_hostname=name)
def secure(to, name, host):
    s, status = tunnel(to)
    if status != "200": return status
    try: s = tls(s, name)
    except (OSError, ssl.SSLError): return "closed"
    s.sendall(("GET /x HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host).encode())
    return rest(s).split(b"\n")[-2].decode() if s else ""
def again(f): # while connections that have ended still count
    for _ in range(200):
        try: return f()
        except (OSError, IndexError) as e: last = e; select.select([], [], [], 0.05)
    raise last
def attempt(what, f):
    try: r = f()
    except Exception as e: r = type(e).__name__ + (" %d" % e.code if hasattr(e, "code") else "")
    print(what + ":", r, flush=True)
`

// expectLines compares a program's output with lines of NAME: WANT; an empty WANT is anything.
func expectLines(t *testing.T, r *harness.Result, want string) {
	t.Helper()
	r.Expect(t, 0, "exited")
	got := strings.TrimSpace(string(r.Stdout))
	check.That(t, got == strings.TrimSpace(want), "got:\n%s\nwant:\n%s\nstderr: %s", got, strings.TrimSpace(want), r.Stderr)
}

// Listed hosts are reachable in every way that programs use.
func TestReached(t *testing.T) {
	t.Parallel()
	r := inLab(t, "www.example.org,www.example.org:7,www.example.org:2525,93.184.0.2:443,private.example.org:443,10.99.0.2:443", `
attempt("tls", lambda: secure("www.example.org:443", "www.example.org", "www.example.org"))
attempt("address", lambda: secure("93.184.0.2:443", None, "93.184.0.2"))
attempt("private", lambda: secure("private.example.org:443", "private.example.org", "private.example.org"))
attempt("http", lambda: urllib.request.urlopen("http://www.example.org/y", data=b"abc").read().decode().strip())
def keep():
    s = proxy(); out = []
    for path in "12":
        s.sendall(("GET http://www.example.org/%s HTTP/1.1\r\nHost: www.example.org\r\n\r\n" % path).encode())
        while True:
            l = line(s)
            if l.startswith(b"host") or not l: break
        out.append(l.decode().strip())
    return out
attempt("kept", keep)
def within():
    s, _ = tunnel("www.example.org:80"); s.sendall(b"POST /t HTTP/1.1\r\nHost: www.example.org\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
    return rest(s).split(b"\n")[-2].decode()
attempt("http in a tunnel", within)
def by_socks():
    s, code = socks("www.example.org", 443)
    s = tls(s, "www.example.org"); s.sendall(b"GET / HTTP/1.1\r\nHost: www.example.org\r\nConnection: close\r\n\r\n")
    return code, rest(s).split(b"\n")[-2].decode()
attempt("socks", by_socks)
def first():
    s, _ = tunnel("www.example.org:2525"); a = line(s); s.sendall(b"EHLO x HTTP/1.1\n"); return a + line(s)
attempt("it speaks first", first)
def echo():
    s, _ = tunnel("www.example.org:7"); s.sendall(b"\x00\x01ping\n"); s.shutdown(socket.SHUT_WR); return rest(s)
attempt("half-closed", echo)
`)
	expectLines(t, r, `
tls: host www.example.org sni www.example.org path /x body 0
address: host 93.184.0.2 sni  path /x body 0
private: host private.example.org sni private.example.org path /x body 0
http: host www.example.org sni  path /y body 3
kept: ['host www.example.org sni  path /1 body 0', 'host www.example.org sni  path /2 body 0']
http in a tunnel: host www.example.org sni  path /t body 3
socks: (0, 'host www.example.org sni www.example.org path / body 0')
it speaks first: b'220 it speaks first\nEHLO x HTTP/1.1\n'
half-closed: b'\x00\x01ping\n'
`)
	h := hostOf(r, "www.example.org:443")
	check.That(t, h != nil && h.Connections == 2 && h.Sent != 0 && h.Received != 0 && h.Refused == 0, "report: %+v", r.Report.Network)
}

// A network of all addresses does not include the host itself: neither its loopback interface, in
// any form of the address, nor another address of it.
func TestEverywhereIsNotTheHost(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "[::]:0") // IPv4 as well
	check.Must(t, err)
	server := httptest.NewUnstartedServer(http.HandlerFunc(serveWWW))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	defer server.Close()
	port := fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	code := `
port = ` + port + `
def get(a):
    s = proxy(); s.sendall(("GET http://%s:%d/ HTTP/1.1\r\nHost: x\r\n\r\n" % (a, port)).encode())
    return line(s).split()[1].decode()
for a in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]", "0.0.0.0", "[::]", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1%lo]", "93.184.0.1"):
    attempt("tunnel " + a, lambda: tunnel("%s:%d" % (a, port))[1])
    attempt("http " + a, lambda: get(a))
for kind, a in ((1, "127.0.0.1"), (1, "0.0.0.0"), (1, "93.184.0.1"), (4, "::ffff:127.0.0.1"), (4, "::1"), (4, "::"), (3, "127.0.0.1"), (3, "2130706433"), (3, "::1")):
    attempt("socks %d %s" % (kind, a), lambda: socks(a, port, kind)[1])
`
	r := inLab(t, "0.0.0.0/0:"+port+",[::/0]:"+port+",www.example.org", code+`
attempt("other", lambda: tunnel("www.example.org:80")[1])
`)
	r.Expect(t, 0, "exited")
	lines := strings.Split(strings.TrimSpace(string(r.Stdout)), "\n")
	for i, line := range lines {
		switch {
		case i == len(lines)-1:
			check.That(t, line == "other: 200", "what is listed: %s", line)
		case !strings.HasSuffix(line, " 403") && !strings.HasSuffix(line, " 400") && !strings.HasSuffix(line, ": 2"):
			t.Errorf("reached: %s", line)
		}
	}
	check.That(t, len(lines) == 32, "%d lines: %s\n%s", len(lines), r.Stdout, r.Stderr)
	// Each of them can be listed.
	r = inLab(t, "127.0.0.0/8:"+port+",[::1]:"+port+",93.184.0.1:"+port, code)
	for _, want := range []string{"tunnel 127.0.0.1: 200", "tunnel [::ffff:127.0.0.1]: 200", "tunnel [::1]: 200", "tunnel 93.184.0.1: 200", "socks 1 127.0.0.1: 0"} {
		check.That(t, strings.Contains(string(r.Stdout), want), "no %q in:\n%s", want, r.Stdout)
	}
}

// A rule for a top-level domain is accepted with a warning.
func TestTopLevelDomain(t *testing.T) {
	t.Parallel()
	const want = `the network rule "*.com" allows every host below the top-level domain com`
	for list, warns := range map[string]bool{"*.com": true, "*.example.com": false, "com": false} {
		r := harness.Run(t, harness.Options{}, "--cwd", "none", "--net", "allow="+list, "true")
		r.Expect(t, 0, "exited")
		check.That(t, strings.Contains(string(r.Stderr), want) == warns, "%s: %s", list, r.Stderr)
	}
}

// Programs reach a listed server on the host's loopback interface at host.sbxrun.internal, while localhost
// stays the sandbox's own.
func TestLocalhost(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(serveWWW))
	defer server.Close()
	port := strings.TrimPrefix(server.URL, "http://127.0.0.1:")
	code := `
import http.server, threading
class Own(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"the sandbox's own")
    def log_message(self, *args): pass
own = http.server.HTTPServer(("127.0.0.1", ` + port + `), Own)
threading.Thread(target=own.serve_forever, daemon=True).start()
for name in "localhost", "host.sbxrun.internal":
    attempt(name, lambda: urllib.request.urlopen("http://" + name + ":` + port + `/x").read().decode().strip())
`
	expectLines(t, inLab(t, "host.sbxrun.internal:"+port, code), "localhost: the sandbox's own\nhost.sbxrun.internal: host host.sbxrun.internal:"+port+" sni  path /x body 0")
}

// Unlisted hosts are not reachable in any way.
func TestRefused(t *testing.T) {
	t.Parallel()
	r := inLab(t, "www.example.org,local.example.org,private.example.org,own.example.org,93.184.0.2:443", `
attempt("other host", lambda: secure("other.example.org:443", "www.example.org", "www.example.org"))
attempt("other address", lambda: secure("93.184.0.3:443", "www.example.org", "www.example.org"))
attempt("its address, other port", lambda: secure("93.184.0.2:80", "www.example.org", "www.example.org"))
attempt("other port", lambda: secure("www.example.org:7", "www.example.org", "www.example.org"))
attempt("sni", lambda: secure("www.example.org:443", "other.example.org", "www.example.org"))
attempt("no sni", lambda: secure("www.example.org:443", None, "www.example.org"))
def old():
    s, _ = tunnel("www.example.org:443"); s.sendall(b"\x80\x2e\x01\x03\x03" + bytes(43)); return rest(s)
attempt("as ssl 2.0 had it", old)
attempt("loopback by a name", lambda: secure("local.example.org:443", "local.example.org", "local.example.org"))
attempt("private by a name", lambda: secure("private.example.org:443", "private.example.org", "private.example.org"))
attempt("the host by a name", lambda: secure("own.example.org:443", "own.example.org", "own.example.org"))
attempt("loopback", lambda: tunnel("127.0.0.1:443")[1])
attempt("mapped", lambda: tunnel("[::ffff:127.0.0.1]:443")[1])
attempt("decimal", lambda: tunnel("1572339714:443")[1])
attempt("http", lambda: urllib.request.urlopen("http://other.example.org/").read())
attempt("redirect", lambda: urllib.request.urlopen("http://www.example.org/redirect").read())
def fronted(to, request):
    s, status = tunnel(to); s.sendall(request); b = rest(s); return b.split(b"\r\n")[0].decode()
attempt("host in a tunnel", lambda: fronted("www.example.org:80", b"GET / HTTP/1.1\r\nHost: other.example.org\r\nConnection: close\r\n\r\n"))
attempt("after empty lines", lambda: fronted("www.example.org:80", b"\r\n\r\nGET / HTTP/1.1\r\nHost: other.example.org\r\nConnection: close\r\n\r\n"))
def rest_of_two():
    s, _ = tunnel("www.example.org:80")
    s.sendall(b"GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\nGET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n")
    b = rest(s).decode(); return b.count("HTTP/1.1 200"), b.count("HTTP/1.1 403"), "host other" in b
attempt("second request", rest_of_two)
def header():
    s = proxy(); s.sendall(b"GET http://www.example.org/ HTTP/1.1\r\nHost: other.example.org\r\nConnection: close\r\n\r\n"); return rest(s).split(b"\n")[-2].decode()
attempt("host header", header)
attempt("socks name", lambda: socks("other.example.org", 443)[1])
attempt("socks address", lambda: socks("93.184.0.3", 443, 1)[1])
attempt("socks loopback", lambda: socks("::1", 443, 4)[1])
attempt("socks bind", lambda: socks("www.example.org", 443, 3, 2)[1])
attempt("socks udp", lambda: socks("www.example.org", 443, 3, 3)[1])
def http_in_socks():
    s, _ = socks("www.example.org", 80); s.sendall(b"GET / HTTP/1.1\r\nHost: other.example.org\r\nConnection: close\r\n\r\n"); return rest(s).split(b"\r\n")[0].decode()
attempt("host by socks", http_in_socks)
def split():
    s, _ = tunnel("www.example.org:80")
    for c in b"GET / HTTP/1.1\r\nHost: other.example.org\r\nConnection: close\r\n\r\n": s.sendall(bytes([c]))
    return rest(s).split(b"\r\n")[0].decode()
attempt("byte by byte", split)
def direct():
    s = proxy(); s.sendall(b"GET / HTTP/1.1\r\nHost: www.example.org\r\nConnection: close\r\n\r\n"); return rest(s).split(b"\r\n")[0].decode()
attempt("no proxy request", direct)
`)
	expectLines(t, r, `
other host: 403
other address: 403
its address, other port: 403
other port: 403
sni: closed
no sni: closed
as ssl 2.0 had it: b''
loopback by a name: 403
private by a name: 403
the host by a name: 403
loopback: 403
mapped: 403
decimal: 403
http: HTTPError 403
redirect: HTTPError 403
host in a tunnel: HTTP/1.1 403 Forbidden
after empty lines: HTTP/1.1 400 Bad Request
second request: (1, 1, False)
host header: host www.example.org sni  path / body 0
socks name: 2
socks address: 2
socks loopback: 2
socks bind: 7
socks udp: 7
host by socks: HTTP/1.1 403 Forbidden
byte by byte: HTTP/1.1 403 Forbidden
no proxy request: HTTP/1.1 400 Bad Request
`)
	for host, reason := range map[string]string{
		"other.example.org:443": "not listed", "local.example.org:443": "it resolves to 127.0.0.1, a loopback address, which is not listed itself",
		"private.example.org:443": "it resolves to 10.99.0.2, a private address, which is not listed itself",
		"own.example.org:443":     "it resolves to 93.184.0.1, an address of this host, which is not listed itself",
	} {
		h := hostOf(r, host)
		check.That(t, h != nil && h.Refused != 0 && h.Reason == reason && h.Connections == 0, "%s in the report: %+v", host, h)
	}
}

// The proxy is the only way out, as with --net none.
func TestNothingElse(t *testing.T) {
	t.Parallel()
	r := inLab(t, "www.example.org", `
attempt("direct", lambda: socket.create_connection(("93.184.0.2", 443), 5))
attempt("six", lambda: socket.create_connection(("2001:db8::1", 443), 5))
attempt("names", lambda: socket.getaddrinfo("www.example.org", 443))
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b"x", ("93.184.0.2", 53))
attempt("udp", udp)
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
def vsock():
    s = socket.socket(40, socket.SOCK_STREAM); s.settimeout(5); s.connect((2, 22)); return "connected"
try: vsock(); print("vsock: connected")
except OSError: print("vsock: refused")
attempt("interfaces", lambda: [n for _, n in socket.if_nameindex()])
attempt("the host's loopback", lambda: socket.create_connection(("127.0.0.1", 22), 5))
`)
	expectLines(t, r, `
direct: OSError
six: OSError
names: gaierror
udp: OSError
raw: PermissionError
packet: OSError
vsock: refused
interfaces: ['lo']
the host's loopback: ConnectionRefusedError
`)
}

// At a terminal, one line names a refused host whatever the command's exit code, and says so when
// a command does not use the proxy.
func TestNamed(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "--cwd", "none", "--net", "allow=www.example.org")
	run := func(script string) func(harness.Options) *harness.Process {
		return func(o harness.Options) *harness.Process {
			return harness.Start(t, o, "--env", harness.MarkerName, "--cwd", "none", "--net", "allow=www.example.org", "sh", "-c", script)
		}
	}
	// The command ends when the refusal is on record, a moment after it.
	inside := func(script, host string) func(harness.Options) *harness.Process {
		return func(o harness.Options) *harness.Process {
			r, w := harness.Pipe(t)
			o.Stdin = r
			p := b.StartExec(o, nil, "sh", "-c", script+"; read x; true")
			r.Close()
			harness.Until(t, harness.Scaled(10*time.Second), host+" on record", func() bool {
				return strings.Contains(string(b.State.Run("inspect", b.ID).Stdout), `"`+host+`:80"`)
			})
			w.Close()
			return p
		}
	}
	const without = "hint: it tried to reach a network without the proxy of --net allow=, which HTTPS_PROXY and ALL_PROXY name"
	for _, tt := range []struct {
		name  string
		start func(harness.Options) *harness.Process
		code  int
		want  string
	}{
		{"it goes on", run("for i in 1 2 3; do curl -s http://other.example.org/; done; true"), 0, "hint: the list of --net does not have other.example.org:80; --net allow=other.example.org:80 has"},
		{"nothing is refused", run("curl -s http://www.example.org/"), 0, ""},
		{"no proxy", run("curl -s --noproxy '*' http://www.example.org/"), 6, without},
		{"no proxy, in an exec", func(o harness.Options) *harness.Process {
			return b.StartExec(o, nil, "curl", "-s", "--noproxy", "*", "http://www.example.org/")
		}, 6, without},
		{"in an exec", inside("curl -s http://other.example.org/", "other.example.org"), 0, "hint: the list of --net does not have other.example.org:80; at sbxrun start, --net allow=other.example.org:80 has"},
		{"in another, which asks for one more", inside("curl -s http://other.example.org/ http://third.example.org/", "third.example.org"), 0, "hint: the list of --net does not have third.example.org:80; at sbxrun start, --net allow=third.example.org:80 has"},
		{"in an exec that asks for no other", inside("curl -s http://third.example.org/", "third.example.org"), 0, ""},
	} {
		r, text := harness.Said(t, tt.start)
		got := strings.Join(harness.Ours(text), "\n")
		check.That(t, r.ExitCode == tt.code && got == tt.want, "%s: exit code %d, %q, want %q\n%s", tt.name, r.ExitCode, got, tt.want, text)
	}
	var seen []struct {
		Refused []struct{ Host, Reason string }
	}
	err := json.Unmarshal(b.State.Run("inspect", b.ID).Stdout, &seen)
	check.That(t, err == nil && len(seen) == 1 && fmt.Sprint(seen[0].Refused) == "[{other.example.org:80 not listed} {third.example.org:80 not listed}]", "inspect: %+v, %v", seen, err)
}

// A client that connects to a published port before the server listens is not mentioned when the command fails.
func TestEarlyClient(t *testing.T) {
	t.Parallel()
	// At an address that no other test uses, because a port that is a client's local port cannot be published.
	free, err := net.Listen("tcp", "127.0.0.77:0")
	check.Must(t, err)
	address := free.Addr().String()
	free.Close()
	in, out := io.Pipe()
	r, text := harness.Said(t, func(o harness.Options) *harness.Process {
		o.Stdin = in
		p := harness.Start(t, o, "--env", harness.MarkerName, "-w", "--publish", address+":8001", "sh", "-c", "read x; exit 3")
		harness.Until(t, harness.Scaled(10*time.Second), "a client is refused", func() bool {
			_, err := get(address, "")
			return errors.Is(err, unix.ECONNRESET)
		})
		out.Close()
		return p
	})
	lines := harness.Ours(text)
	check.That(t, r.ExitCode == 3 && len(lines) == 0, "exit code %d, %q", r.ExitCode, lines)
}
