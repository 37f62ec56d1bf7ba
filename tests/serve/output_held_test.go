package serve

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// hold is how two tenants use up what all share. The server must keep serving a third one.
type hold struct {
	name   string
	config string
	// begin returns when one tenant holds as much as it can get; it continues until the test ends.
	// Each tenant has its own loopback address, from.
	begin func(t *testing.T, url, token string, from net.IP)
}

// The server of TestHeld allows this many connections. One attacker opens more than half of them, two more than all.
const heldConnections = 64

// heldTLS, instead of a configuration, makes the server use TLS.
const heldTLS = "TLS"

var holds = []hold{
	{"connections that send nothing", "", flood("")},
	{"connections that are idle after an answer", "", flood("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")},
	{"connections that were refused", "", flood("GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")},
	{"half a head", "", flood("GET /healthz HTTP/1.1\r\nHost:")},
	{"half a body without a token", "", flood("POST /v1/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")},
	{"half a body with a token", "requests = 4\n", flood("POST /v1/run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")},
	{"idle connections of a tenant", "", flood("GET /v1/languages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\n\r\n")},
	{"half a TLS handshake", heldTLS, flood("\x16\x03\x01\x02\x00\x01")},
	{"background processes", "concurrency = 8\nprocesses = 8\n", processes},
	{"long calls", "concurrency = 8\nqueue = 8\n", longCalls},
}

// A tenant is served while others hold as many connections and slots as they can get.
func TestHeld(t *testing.T) {
	for _, a := range holds {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			config, scheme := fmt.Sprintf("places = 16\ndrain_timeout = \"1s\"\nconnections = %d\n", heldConnections), "http://"
			if a.config == heldTLS {
				dir := harness.Certificates(t)
				config += fmt.Sprintf("tls_cert = %q\ntls_key = %q\n", filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key"))
				a.config, scheme = "", "https://"
			}
			s, address := overTCP(t, config+"[call]\nmax_timeout = \"10m\"\n[tenant]\n"+a.config, "one", "two", "victim")
			url := scheme + address
			var both sync.WaitGroup
			for i, tenant := range []string{"one", "two"} {
				both.Go(func() { a.begin(t, url, tenant+"-token", net.IPv4(127, 0, 0, byte(2+i))) })
			}
			both.Wait()
			if t.Failed() {
				return
			}
			for range 5 {
				status, answer := askOnce(t, http.MethodPost, url+"/v1/run", "victim-token", sh("echo served"))
				check.Require(t, status == http.StatusOK && strings.Contains(answer, "served"), "%d %s\n%s", status, answer, s.log)
			}
		})
	}
}

// askOnce sends a request on a new connection.
func askOnce(t *testing.T, method, url, token string, body any) (int, string) {
	t.Helper()
	client := &http.Client{Timeout: 2 * time.Minute, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	status, answer, _, err := exchange(t.Context(), client, method, url, body, "Authorization", "Bearer "+token)
	if err != nil {
		return 0, err.Error()
	}
	return status, string(answer)
}

// flood opens more connections than the server allows per address, and reopens each that is closed.
func flood(text string) func(t *testing.T, url, token string, from net.IP) {
	return func(t *testing.T, url, token string, from net.IP) {
		const each, pause = heldConnections * 3 / 4, 50 * time.Millisecond
		text := strings.ReplaceAll(text, "TOKEN", token)
		_, address, _ := strings.Cut(url, "://")
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}, Timeout: harness.Bound}
		var opened, all sync.WaitGroup
		opened.Add(each)
		for range each {
			all.Go(func() {
				first := sync.OnceFunc(opened.Done)
				defer first()
				for t.Context().Err() == nil {
					c, err := dial.DialContext(t.Context(), "tcp", address)
					if err == nil {
						_, _ = io.WriteString(c, text) // it may have been closed
						time.AfterFunc(pause, first)   // the server has accepted it already
						_ = c.SetReadDeadline(time.Now().Add(harness.Bound))
						stop := context.AfterFunc(t.Context(), func() { c.Close() })
						_, _ = io.Copy(io.Discard, c) // until the server closes it
						stop()
						c.Close()
					}
					time.Sleep(pause)
				}
			})
		}
		t.Cleanup(all.Wait)
		opened.Wait()
	}
}

// processes starts as many background processes as the server accepts.
func processes(t *testing.T, url, token string, _ net.IP) {
	status, answer := askOnce(t, http.MethodPost, url+"/v1/sessions", token, struct{}{})
	var x api.Session
	if err := json.Unmarshal([]byte(answer), &x); status != http.StatusCreated || err != nil {
		t.Errorf("%d %s", status, answer)
		return
	}
	for range 10 {
		status, answer := askOnce(t, http.MethodPost, url+"/v1/sessions/"+x.ID+"/processes", token, sh("sleep 1000"))
		check.That(t, status == http.StatusAccepted || status == http.StatusTooManyRequests, "%d %s", status, answer)
	}
}

// longCalls starts more long calls than the tenant may run at once.
func longCalls(t *testing.T, url, token string, _ net.IP) {
	for range 16 {
		status, answer := askOnce(t, http.MethodPost, url+"/v1/calls", token, api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 600_000})
		check.That(t, status == http.StatusAccepted || status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable, "%d %s", status, answer)
	}
	running := func() bool {
		_, answer := askOnce(t, http.MethodGet, url+"/v1/calls", token, struct{}{})
		return strings.Count(answer, `"running"`) >= 7 // one of the 16 slots is reserved
	}
	harness.Until(t, harness.Bound, "long calls", running)
}
