package network

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// environmentProxy reads the variables as curl does.
func TestEnvironmentProxy(t *testing.T) {
	for _, tt := range []struct {
		env  map[string]string
		want *Upstream
	}{
		{nil, nil},
		{map[string]string{"NO_PROXY": "a"}, nil},
		{map[string]string{"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a"}, &Upstream{HTTPS: "http://p:1", No: "a"}},
		{map[string]string{"https_proxy": "http://p:1", "HTTPS_PROXY": "http://q:1"}, &Upstream{HTTPS: "http://p:1"}},
		{map[string]string{"all_proxy": "http://p:1", "http_proxy": "http://q:1"}, &Upstream{HTTP: "http://q:1", HTTPS: "http://p:1"}},
		{map[string]string{"ALL_PROXY": "socks5h://p:1"}, nil},
		{map[string]string{"HTTP_PROXY": "http://p:1"}, &Upstream{HTTP: "http://p:1"}},
		{map[string]string{"HTTP_PROXY": "http://p:1", "REQUEST_METHOD": "GET"}, nil},
	} {
		check.NoDiff(t, cmp.Diff(tt.want, environmentProxy(func(name string) string { return tt.env[name] })), "%v (-want +got)", tt.env)
	}
}

// localhost never goes through the proxy, and the CA variables name a file that the sandbox sees.
func TestVariables(t *testing.T) {
	root := t.TempDir()
	check.Must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(bundles[1])), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(root, bundles[1]), nil, 0o644))
	s := &Spec{Proxied: true, Allow: []Rule{{Host: HostName}}}
	for rootfs, want := range map[string]bool{root: true, t.TempDir(): false} {
		got := s.Variables(rootfs)
		check.That(t, slices.Contains(got, "no_proxy=localhost,127.0.0.1,::1") && slices.Contains(got, "NODE_EXTRA_CA_CERTS="+bundles[1]) == want && slices.Contains(got, "SSL_CERT_FILE="+bundles[1]) == want,
			"%q", got)
	}
	got := new(Spec).Variables(root)
	check.That(t, got == nil, "%q without a proxy", got)
}

func TestLoopback(t *testing.T) {
	for list, want := range map[string]string{
		"127.0.0.1:8000":             "127.0.0.1 is the sandbox itself; for a server on this host, list " + HostName + ":8000",
		"192.0.2.1,[::1]":            "::1 is the sandbox itself; for a server on this host, list " + HostName,
		"db.example.org,127.0.0.1:1": "",
		"127.0.0.0/8,192.0.2.1":      "",
	} {
		rules, err := ParseAllow(list)
		got := Loopback(rules)
		check.That(t, err == nil && got == want, "%s: %q, %v; want %q", list, got, err, want)
	}
}
