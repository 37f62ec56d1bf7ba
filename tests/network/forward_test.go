package network

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// get returns a published port's answer, or the error.
func get(address, request string) (string, error) {
	c, err := net.DialTimeout("tcp", address, harness.Scaled(5*time.Second))
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(harness.Scaled(10 * time.Second)))
	if _, err := io.WriteString(c, request); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// echoServer echoes lines, on both addresses of the loopback interface or one of them.
const echoServer = `
import socket, sys, threading
def serve(family, addr):
    s = socket.socket(family, socket.SOCK_STREAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(addr); s.listen(64)
    print("listening", flush=True)
    while True:
        c, _ = s.accept(); threading.Thread(target=one, args=(c,)).start()
def one(c):
    with c:
        for l in c.makefile("rb"): c.sendall(b"got " + l); break
`

const overV4 = echoServer + `serve(socket.AF_INET, ("127.0.0.1", 8000))`
const overV6 = echoServer + `serve(socket.AF_INET6, ("::1", 8000))`

// published waits until a run prints its published address.
func published(t *testing.T, p *harness.Process) string {
	t.Helper()
	p.WaitStderr("is published at ")
	p.WaitOutput("listening")
	_, address, _ := strings.Cut(p.ErrorOutput(), "is published at ")
	address, _, _ = strings.Cut(address, "\n")
	return address
}

// publishedOf returns the published address of a sandbox's port.
func publishedOf(t *testing.T, b *harness.Sandbox) (address string, port int) {
	t.Helper()
	var records []struct {
		Net       string `json:"net"`
		Published []struct {
			Address string `json:"address"`
			Port    int    `json:"port"`
		} `json:"published"`
	}
	check.Must(t, json.Unmarshal(b.State.Run("inspect", b.ID).Stdout, &records))
	check.Require(t, len(records) == 1 && records[0].Net == "allow=www.example.org" && len(records[0].Published) == 1, "%+v", records)
	return records[0].Published[0].Address, records[0].Published[0].Port
}

// --publish forwards a host port into the sandbox as long as it exists.
func TestPublish(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ at, server string }{{"127.0.0.1", overV4}, {"[::1]", overV6}} {
		t.Run(tt.at, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{}, "--cwd", "none", "--publish", strings.TrimPrefix(tt.at+":0:8000", "127.0.0.1:"), "/usr/bin/python3", "-c", tt.server)
			address := published(t, p)
			check.That(t, strings.HasPrefix(address, tt.at+":"), "it is published at %s", address)
			for range 70 { // more than the prepared ones
				got, err := get(address, "hello\n")
				check.Require(t, got == "got hello\n", "%q, %v", got, err)
			}
			p.Signal(syscall.SIGTERM)
			r := p.Wait()
			n := r.Report.Network
			check.That(t, n != nil && len(n.Published) == 1 && n.Published[0].Address == address && n.Published[0].Port == 8000, "report: %+v", n)
			h := hostOf(r, "published port 8000")
			check.That(t, h != nil && h.Connections == 70 && h.Sent == 70*10 && h.Received == 70*6, "report: %+v", h)
			got, err := get(address, "hello\n")
			check.That(t, err != nil, "afterwards: %q", got)
		})
	}
}

// --publish fails when the port is in use, and closes connections when nothing listens in the
// sandbox.
func TestPublishRefuses(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "--cwd", "none", "--publish", "0:8001", "/usr/bin/python3", "-c", overV4)
	address := published(t, p)
	got, err := get(address, "hello\n")
	check.That(t, got == "" && err != nil, "%q, %v", got, err)
	harness.Run(t, harness.Options{}, "--cwd", "none", "--publish", address+":80", "true").Exits(t, 125).ErrHas(t, "address already in use; another program uses the port; 0 picks a free one")
	p.Signal(syscall.SIGTERM)
	h := hostOf(p.Wait(), "published port 8001")
	check.That(t, h != nil && h.Refused == 1 && h.Reason == "connection refused", "report: %+v", h)
}

// listenUnix returns a Unix socket that echoes lines. The channel has room for one client that has disconnected.
func listenUnix(t *testing.T) (name string, gone <-chan struct{}) {
	t.Helper()
	name = filepath.Join(harness.Dir(t), "s.sock")
	l, err := net.Listen("unix", name)
	check.Must(t, err)
	t.Cleanup(func() { l.Close() })
	over := make(chan struct{}, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintf(c, "the socket got %s\n", lines.Text())
				}
				select {
				case over <- struct{}{}:
				default:
				}
			}()
		}
	}()
	return name, over
}

// --connect forwards a port of the sandbox to the Unix socket that existed at its start.
func TestConnect(t *testing.T) {
	t.Parallel()
	socket, _ := listenUnix(t)
	p := harness.Start(t, harness.Options{}, "--cwd", "none", "--connect", "unix:"+socket+"=543", "/usr/bin/python3", "-c", `
import socket, sys
print("begun", flush=True)
for i in range(3):
    c = socket.create_connection(("127.0.0.1", 543)); c.sendall(b"x\n"); print(c.makefile().readline(), end="", flush=True); c.close()
`)
	// A socket that replaces it is not used.
	p.WaitOutput("begun")
	other := socket + ".other"
	check.Must(t, os.WriteFile(other, nil, 0o600))
	check.Must(t, os.Rename(other, socket))
	r := p.Wait()
	r.Expect(t, 0, "exited")
	want := "begun\n" + strings.Repeat("the socket got x\n", 3)
	check.That(t, string(r.Stdout) == want, "%q", r.Stdout)
	h := hostOf(r, "unix socket 1")
	check.That(t, h != nil && h.Connections == 3 && h.Sent == 6, "report: %+v", r.Report.Network)
	refused := map[string]string{socket + ".none": "no such file", socket: "non-socket"}
	if os.Geteuid() == 0 { // as root, a payload of another user may have left a link to root's files
		planted := filepath.Join(harness.Dir(t), "planted")
		check.Must(t, os.Symlink(socket, planted))
		check.Must(t, os.Lchown(planted, 61000, 61000))
		refused[planted] = "could have put there"
	}
	for path, want := range refused {
		harness.Run(t, harness.Options{}, "--cwd", "none", "--connect", "unix:"+path+"=543", "true").Exits(t, 125).ErrHas(t, want)
	}
}

// When sbxrun is killed, forwarding ends, also that of a sandbox, and nothing is left.
func TestKilled(t *testing.T) {
	t.Parallel()
	const held = `import socket; c = socket.create_connection(("127.0.0.1", 543)); c.sendall(b"x\n"); c.recv(99)` + overV4
	for _, verb := range []string{"run", "start"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			socket, gone := listenUnix(t)
			args := []string{"--cwd", "none", "--net", "allow=www.example.org", "--publish", "0:8000", "--connect", "unix:" + socket + "=543"}
			command := []string{"/usr/bin/python3", "-c", held}
			var address string
			var proxy int
			var kill func()
			if verb == "run" {
				p := harness.Start(t, harness.Options{}, append(args, command...)...)
				address, proxy = published(t, p), proxyOf(t, p.PID)
				kill = func() {
					p.Kill()
					p.Wait()
				}
			} else {
				b := harness.NewState(t).Sandbox(harness.Options{}, append(append(args, "--ready-tcp", "8000", "--wait-ready"), command...)...)
				address, _ = publishedOf(t, b)
				proxy, kill = proxyOf(t, b.Supervisor.PID), b.KillSupervisor
			}
			before, ok := harness.ReadProc(proxy)
			check.Require(t, ok, "there is no proxy")
			kill()
			harness.Until(t, harness.Scaled(10*time.Second), "the end of the proxy", func() bool {
				now, there := harness.ReadProc(proxy)
				return !there || now.Start != before.Start
			})
			got, err := get(address, "hello\n")
			check.That(t, err != nil, "afterwards: %q", got)
			select {
			case <-gone:
			case <-time.After(harness.Scaled(10 * time.Second)):
				t.Error("the connection to the unix socket is there")
			}
		})
	}
}

// A sandbox whose proxy was killed has no network and keeps running. Its report says that the usage is incomplete.
func TestProxyKilled(t *testing.T) {
	t.Parallel()
	in, out := io.Pipe()
	p := harness.Start(t, harness.Options{Stdin: in}, "--cwd", "none", "--net", "allow=www.example.org", "sh", "-c",
		`curl -sS -m 60 http://www.example.org/; echo begun; read x; curl -s -m 60 http://www.example.org/; echo $?`)
	p.WaitOutput("begun")
	proxy, err := harness.Open(proxyOf(t, p.PID))
	check.Must(t, err)
	defer proxy.Close()
	check.Must(t, proxy.Signal(unix.SIGKILL))
	harness.Until(t, harness.Bound, "the end of the proxy", proxy.Ended) // before that, curl may be accepted and dropped
	_, err = io.WriteString(out, "x\n")
	check.Must(t, err)
	out.Close()
	r := p.Wait()
	r.Expect(t, 0, "exited")
	want := "host www.example.org sni  path / body 0\nbegun\n7\n"
	check.That(t, string(r.Stdout) == want, "%q, want %q", r.Stdout, want)
	n := r.Report.Network
	check.That(t, n != nil && n.Incomplete, "report: %+v", n)
	check.That(t, strings.Contains(string(r.Stderr), "sbxrun: warning: the sandbox's network proxy ended before the command"), "it is not said: %s", r.Stderr)
}

// proxyOf returns the PID of a run's proxy.
func proxyOf(t *testing.T, pid int) int {
	t.Helper()
	var found int
	harness.Until(t, harness.Scaled(5*time.Second), "there is a proxy", func() bool {
		for _, child := range harness.Descendants(pid) {
			words, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child))
			if string(words) == "sbxrund\x00net-proxy\x00" {
				found = child
			}
		}
		return found > 1
	})
	return found
}

// Behind a company's proxy, listed hosts are reached through that, by the variables of sbxrun's
// environment, and others are refused. The sandbox learns nothing of the proxy's password.
func TestUpstreamProxy(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		user, password, _ := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth()
		asked = append(asked, r.Method+" "+r.RequestURI+" "+user+":"+password)
		fmt.Fprint(w, "through the proxy")
	}))
	defer proxy.Close()
	url := strings.Replace(proxy.URL, "http://", "http://me:password-of-the-proxy@", 1)
	const code = `
import os, urllib.request
for host in "inside.example.org", "other.example.org":
    try:
        print(urllib.request.urlopen("http://" + host + "/x", timeout=30).read().decode())
    except Exception as e:
        print(getattr(e, "code", e))
print([name for name, value in os.environ.items() if "password" in value])
`
	r := harness.Run(t, harness.Options{Env: []string{"http_proxy=" + url, "https_proxy=" + url}},
		"--cwd", "none", "--timeout", harness.Deadline(time.Minute).String(), "--net", "allow=inside.example.org", "/usr/bin/python3", "-c", code)
	r.Expect(t, 0, "exited")
	got, want := string(r.Stdout), "through the proxy\n403\n[]\n"
	check.That(t, got == want, "%q, want %q; %s", got, want, r.Stderr)
	want = "GET http://inside.example.org/x me:password-of-the-proxy"
	check.That(t, len(asked) == 1 && asked[0] == want, "the proxy was asked for %q, want %q", asked, want)
	n := r.Report.Network
	check.That(t, n != nil && len(n.Hosts) == 2 && n.Hosts[0].Connections == 1 && n.Hosts[1].Refused == 1, "report: %+v", n)

	r = harness.Run(t, harness.Options{Env: []string{"https_proxy=socks5://user:password-of-the-proxy@127.0.0.1:1"}}, "--cwd", "none", "--net", "allow=inside.example.org", "true")
	r.Expect(t, 125, "start-failed")
	text := string(r.Stderr)
	check.That(t, strings.Contains(text, "https_proxy is not the URL of an HTTP proxy") && !strings.Contains(text, "password"), "%s", text)
}
