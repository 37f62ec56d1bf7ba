package network

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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
