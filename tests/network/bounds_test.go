package network

import (
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Connections over the limit are refused, and others are served afterwards.
func TestFlood(t *testing.T) {
	t.Parallel()
	r := inLab(t, "www.example.org,www.example.org:7", `
many = [proxy() for _ in range(600)]
p = select.poll()
for s in many: p.register(s, select.POLLIN)
closed = set()
while len(closed) < 88:
    for fd, _ in p.poll(20000): closed.add(fd); p.unregister(fd)
print("closed", len(closed) >= 88)
for s in many: s.close()
attempt("afterwards", lambda: again(lambda: urllib.request.urlopen("http://www.example.org/").read().decode().strip()))
def header():
    s = proxy()
    try:
        s.sendall(b"GET http://www.example.org/ HTTP/1.1\r\nHost: www.example.org\r\n")
        for _ in range(200): s.sendall(b"X: " + b"y" * 1000 + b"\r\n")
        return line(s).decode().strip()
    except OSError: return "closed"
print("header", header() in ("closed", "HTTP/1.1 431 Request Header Fields Too Large"))
def endless():
    s, _ = tunnel("www.example.org:443"); s.sendall(b"GET /" + b"x" * 70000); return rest(s) in (b"", b"ConnectionResetError")
attempt("endless line", lambda: again(endless))
def hello():
    s, _ = tunnel("www.example.org:443"); s.sendall(b"\x16\x03\x01\xff\xff" + b"x" * 66000); return rest(s) in (b"", b"ConnectionResetError")
attempt("endless hello", hello)
def odd():
    s = proxy(); s.sendall(b"CONNECT \x1b[31mx\n:443 HTTP/1.1\r\n\r\n"); return line(s).split()[1].decode()
attempt("odd", odd)
for i in range(150): tunnel("h%d.example.net:443" % i)
attempt("at last", lambda: tunnel("www.example.org:7")[1])
`)
	expectLines(t, r, `
closed True
afterwards: host www.example.org sni  path / body 0
header True
endless line: True
endless hello: True
odd: 400
at last: 200
`)
	n := len(r.Report.Network.Hosts)
	check.That(t, n <= 101, "%d hosts in the report", n)
	h := hostOf(r, "www.example.org:7")
	check.That(t, h != nil && h.Connections == 1, "after all that was refused: %+v", h)
	h = hostOf(r, "(others)")
	check.That(t, h != nil && h.Refused >= 99, "others: %+v", h)
}

// The same at a published port, and at a port forwarded to a Unix socket, with no more memory than
// docs/concepts/network.md says.
func TestFloodPorts(t *testing.T) {
	t.Parallel()
	socket, _ := listenUnix(t)
	p := harness.Start(t, harness.Options{}, "--cwd", "none", "--net", "allow=www.example.org", "--publish", "0:8000", "--connect", "unix:"+socket+"=543", "/usr/bin/python3", "-c", prelude+`
import asyncio, itertools
# As many fields as a header has room for.
names = itertools.product(b"abcdefghijklmnopqrstuvwxyz", repeat=3)
fields = b"".join(bytes(x) + b":\n" for x in itertools.islice(names, 6500))
# Each sends at once: the proxy waits ten seconds.
def sent(s, b): s.sendall(b); return s
many = [sent(proxy(), b"GET http://www.example.org/ HTTP/1.1\r\nHost: www.example.org\r\n" + fields + b"\n") for _ in range(500)]
# On a busy machine the proxy may need longer than that, and answers 400 or nothing.
print("fields", {r[9:12].decode() for r in map(rest, many) if r.startswith(b"HTTP")} - {"400"})
for s in many: s.close()
# As much as is read before it is known where to: headers and ClientHellos.
held = [again(lambda: sent(tunnel("www.example.org:443")[0], b"\x16\x03\x01\xff\xff" + b"x" * 60000)) for _ in range(250)]
held += [again(lambda: sent(proxy(), b"GET http://www.example.org/ HTTP/1.1\r\nX: " + b"y" * 30000)) for _ in range(250)]
again(lambda: urllib.request.urlopen("http://www.example.org/").read())
for s in held: s.close()
many = [socket.create_connection(("127.0.0.1", 543)) for _ in range(600)]
p = select.poll()
for s in many: p.register(s, select.POLLIN)
closed = set()
while len(closed) < 88:
    for fd, _ in p.poll(20000): closed.add(fd); p.unregister(fd)
for s in many: s.close()
def ask():
    s = socket.create_connection(("127.0.0.1", 543)); s.sendall(b"x\n"); return s.makefile().readline().split("\n")[-2] # IndexError at the end
attempt("afterwards", lambda: again(ask))
async def one(r, w):
    l = await r.readline()
    w.write(b"got " + l if l else b""); w.close()
async def main():
    s = await asyncio.start_server(one, "127.0.0.1", 8000)
    print("listening", flush=True)
    await s.serve_forever()
asyncio.run(main())
`)
	address := published(t, p)
	check.Equal(t, p.Output(), "fields {'431'}\nafterwards: the socket got x\nlistening\n")
	closed := make(chan struct{}, 600)
	var many []net.Conn
	for range cap(closed) {
		c, err := net.DialTimeout("tcp", address, harness.Scaled(5*time.Second))
		check.Must(t, err)
		many = append(many, c)
		go func() {
			_, _ = c.Read(make([]byte, 1))
			closed <- struct{}{}
		}()
	}
	for n := range 88 {
		select {
		case <-closed:
		case <-time.After(harness.Scaled(20 * time.Second)):
			t.Fatalf("%d of 600 connections were ended", n)
		}
	}
	for _, c := range many {
		c.Close()
	}
	harness.Until(t, harness.Scaled(10*time.Second), "it is served", func() bool {
		got, _ := get(address, "hello\n")
		return got == "got hello\n"
	})
	proxy, err := harness.Open(proxyOf(t, p.PID))
	check.Must(t, err)
	defer proxy.Close()
	const most = 256 << 20
	if peak := proxy.PeakRSS(); peak == 0 || peak > most {
		t.Errorf("the proxy has had %d bytes", peak)
	} else {
		t.Logf("the proxy has had %d MiB", peak>>20)
	}
	p.Signal(syscall.SIGTERM)
	p.Wait()
}

// A peer that does not complete its request is disconnected.
func TestSlow(t *testing.T) {
	t.Parallel()
	if harness.Soak(t) < 50 {
		t.Log("it takes the proxy's ten seconds: in setup.sh check")
		return
	}
	r := inLab(t, "www.example.org", `
import time
def half(b, to=None):
    s = tunnel(to)[0] if to else proxy(); s.sendall(b); return s
slow = []
begin = time.monotonic()
for b, to in ((b"C", None), (b"CONNECT www", None), (b"\x05", None), (b"\x05\x01\x00\x05\x01\x00\x03\xff", None), (b"GET / HT", "www.example.org:80"), (b"\x16\x03\x01\x02\x00", "www.example.org:443")):
    slow.append(half(b, to))
for s in slow: s.settimeout(float(os.environ["FIXTURE_SECONDS"])); rest(s)
print("ended", 9 < time.monotonic() - begin < 40)
`)
	expectLines(t, r, "ended True")
}

// A sandbox has its list and ports until its end, and so does an exec.
func TestStarted(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--cwd", "none", "--net", "allow=www.example.org", "--publish", "0:8000", "--ready-tcp", "8000", "--wait-ready", "/usr/bin/python3", "-c", overV4)
	r := b.Exec(harness.Options{}, nil, "curl", "-sS", "http://www.example.org/e")
	r.Expect(t, 0, "exited")
	want := "host www.example.org sni  path /e body 0\n"
	check.That(t, string(r.Stdout) == want, "%q", r.Stdout)
	address, port := publishedOf(t, b)
	check.That(t, port == 8000, "port %d", port)
	got, err := get(address, "hello\n")
	check.That(t, got == "got hello\n", "%q, %v", got, err)
	s.Run("kill", b.ID)
	got, err = get(address, "hello\n")
	check.That(t, err != nil, "afterwards: %q", got)
	out := string(s.Run("inspect", b.ID).Stdout)
	check.That(t, strings.Contains(out, `"host": "published port 8000"`) && strings.Contains(out, `"host": "www.example.org:80"`), "record: %s", out)
}
