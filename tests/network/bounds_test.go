package network

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestFlood: what is too much is refused, and others are served afterwards.
func TestFlood(t *testing.T) {
	t.Parallel()
	r := inLab(t, "www.example.org", `
import select
many = [proxy() for _ in range(600)]
p = select.poll()
for s in many: p.register(s, select.POLLIN)
closed = set()
while len(closed) < 88:
    for fd, _ in p.poll(20000): closed.add(fd); p.unregister(fd)
print("closed", len(closed) >= 88)
for s in many: s.close()
def again():
    for _ in range(200):
        try: return urllib.request.urlopen("http://www.example.org/").read().decode().strip()
        except OSError as e: last = e; select.select([], [], [], 0.05)
    raise last
attempt("afterwards", again)
def header():
    s = proxy(); s.sendall(b"GET http://www.example.org/ HTTP/1.1\r\nHost: www.example.org\r\n")
    try:
        for _ in range(200): s.sendall(b"X: " + b"y" * 1000 + b"\r\n")
    except OSError: return "closed"
    return line(s).decode().strip()
print("header", header() in ("closed", "HTTP/1.1 431 Request Header Fields Too Large"))
def endless():
    s, _ = tunnel("www.example.org:443"); s.sendall(b"GET /" + b"x" * 70000); return rest(s) in (b"", b"ConnectionResetError")
attempt("endless line", endless)
def hello():
    s, _ = tunnel("www.example.org:443"); s.sendall(b"\x16\x03\x01\xff\xff" + b"x" * 66000); return rest(s) in (b"", b"ConnectionResetError")
attempt("endless hello", hello)
def odd():
    s = proxy(); s.sendall(b"CONNECT \x1b[31mx\n:443 HTTP/1.1\r\n\r\n"); return line(s).split()[1].decode()
attempt("odd", odd)
for i in range(150): tunnel("h%d.example.net:443" % i)
`)
	expectLines(t, r, `
closed True
afterwards: host www.example.org sni  path / body 0
header True
endless line: True
endless hello: True
odd: 400
`)
	if n := len(r.Report.Network.Hosts); n != 101 {
		t.Errorf("%d hosts in the report", n)
	}
	if h := hostOf(r, "(others)"); h == nil || h.Refused < 49 {
		t.Errorf("others: %+v", h)
	}
}

// TestSlow: a peer that does not say what it wants is ended.
func TestSlow(t *testing.T) {
	t.Parallel()
	if harness.Soak(t) < 100 {
		t.Log("it takes the proxy's ten seconds: once in setup.sh check")
		return
	}
	r := inLab(t, "www.example.org", `
import select, time
def half(b, to=None):
    s = tunnel(to)[0] if to else proxy(); s.sendall(b); return s
slow = []
for b, to in ((b"C", None), (b"CONNECT www", None), (b"\x05", None), (b"\x05\x01\x00\x05\x01\x00\x03\xff", None), (b"GET / HT", "www.example.org:80"), (b"\x16\x03\x01\x02\x00", "www.example.org:443")):
    slow.append(half(b, to))
begin = time.monotonic()
for s in slow: s.settimeout(60); rest(s)
print("ended", 9 < time.monotonic() - begin < 40)
`)
	expectLines(t, r, "ended True")
}

// TestStarted: a sandbox that lives on has its list and ports until its end, and so has an exec.
func TestStarted(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--cwd", "none", "--net", "allow=www.example.org", "--publish", "0:8000", "--ready-tcp", "8000", "--wait-ready", "/usr/bin/python3", "-c", overV4)
	r := b.Exec(harness.Options{}, nil, "curl", "-sS", "http://www.example.org/e")
	r.Expect(t, 0, "exited")
	if want := "host www.example.org sni  path /e body 0\n"; string(r.Stdout) != want {
		t.Errorf("%q", r.Stdout)
	}
	var records []struct {
		Net       string `json:"net"`
		Published []struct {
			Address string `json:"address"`
			Port    int    `json:"port"`
		} `json:"published"`
	}
	harness.Must(t, json.Unmarshal(s.Run("inspect", b.ID).Stdout, &records))
	if len(records) != 1 || records[0].Net != "allow=www.example.org" || len(records[0].Published) != 1 || records[0].Published[0].Port != 8000 {
		t.Fatalf("%+v", records)
	}
	address := records[0].Published[0].Address
	if got, err := get(address, "hello\n"); got != "got hello\n" {
		t.Errorf("%q, %v", got, err)
	}
	s.Run("kill", b.ID)
	if got, err := get(address, "hello\n"); err == nil {
		t.Errorf("afterwards: %q", got)
	}
	out := string(s.Run("inspect", b.ID).Stdout)
	if !strings.Contains(out, `"host": "published port 8000"`) || !strings.Contains(out, `"host": "www.example.org:80"`) {
		t.Errorf("record: %s", out)
	}
}
