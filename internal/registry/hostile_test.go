package registry

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sbxrun/sbxrun/internal/images"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// cut sends only the first n bytes of each response with a blob, and then breaks the connection. It ignores ranges
// unless ranges is set.
func cut(next http.Handler, n int, ranges bool, requests *atomic.Int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			next.ServeHTTP(w, r)
			return
		}
		requests.Add(1)
		all := httptest.NewRecorder()
		if !ranges {
			r.Header.Del("Range")
		}
		next.ServeHTTP(all, r)
		for name, values := range all.Header() {
			w.Header()[name] = values
		}
		w.WriteHeader(all.Code)
		if all.Body.Len() <= n {
			_, _ = w.Write(all.Body.Bytes())
			return
		}
		_, _ = w.Write(all.Body.Bytes()[:n])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
}

// A layer is resumed where its connection failed, but not forever.
func TestResume(t *testing.T) {
	s := newStock(t)
	var requests atomic.Int64
	check.Must(t, read(t, host(serve(t, cut(s.handler, 40_000, true, &requests))), Options{}))
	check.Equal(t, requests.Load(), 1+3*3) // for the configuration and the layers
	wants(t, read(t, host(serve(t, cut(s.handler, 40_000, false, &requests))), Options{}), "read the blob sha256:")
	wants(t, read(t, host(serve(t, cut(s.handler, 0, true, &requests))), Options{}), "read the blob sha256:")
}

// Temporary errors of a registry are retried; others name the host and the status.
func TestErrors(t *testing.T) {
	s := newStock(t)
	for _, test := range []struct {
		status, times int
		want          string
	}{
		{http.StatusBadGateway, 1, ""}, {http.StatusServiceUnavailable, 100, "answers with status 503: UNAVAILABLE"},
		{http.StatusNotFound, 100, "has no such image in app"}, {http.StatusTooManyRequests, 100, "limits the rate of pulls"}, {http.StatusTeapot, 100, "answers with status 418"},
	} {
		var n atomic.Int64
		server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/manifests/") && n.Add(1) <= int64(test.times) {
				w.WriteHeader(test.status)
				fmt.Fprintf(w, `{"errors":[{"code":"UNAVAILABLE","message":%q},{"code":%q}]}`, secret, secret)
				return
			}
			s.handler.ServeHTTP(w, r)
		}))
		wants(t, read(t, host(server), Options{}), test.want)
	}
	wants(t, read(t, harness.RefusingAddress(t), Options{}), "connection refused")
}

// Wrong and endless responses are errors, and cannot use up memory or time.
func TestLies(t *testing.T) {
	s := newStock(t)
	config := must(s.image.ConfigName()).String()
	endless := func(w http.ResponseWriter) {
		for {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}
	changed := func(w http.ResponseWriter, r *http.Request, change func([]byte) []byte) {
		all := httptest.NewRecorder()
		s.handler.ServeHTTP(all, r)
		_, _ = w.Write(change(all.Body.Bytes()))
	}
	for _, test := range []struct {
		name, part string
		handle     func(w http.ResponseWriter, r *http.Request)
		want       string
	}{
		{"endless ping", "/v2/", func(w http.ResponseWriter, _ *http.Request) { endless(w) }, ""},
		{"endless manifest", "/manifests/", func(w http.ResponseWriter, _ *http.Request) { endless(w) }, "the response is too long"},
		{"endless error", "/manifests/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot); endless(w) }, "unexpected response"},
		{"endless layer", "/blobs/", func(w http.ResponseWriter, _ *http.Request) { endless(w) }, "is larger than its manifest says"},
		{"endless token", "/v2/", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token"`, r.Host))
			w.WriteHeader(http.StatusUnauthorized)
		}, "unexpected response"},
		{"changed layer", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			changed(w, r, func(b []byte) []byte { b[9] ^= 1; return b })
		}, "has the digest sha256:"},
		{"long layer", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			changed(w, r, func(b []byte) []byte { return append(b, 0) })
		}, "is larger than its manifest says"},
		{"short layer", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") == "" {
				changed(w, r, func(b []byte) []byte { return b[:len(b)-1] })
				return
			}
			w.WriteHeader(http.StatusPartialContent)
		}, "different range"},
		{"other range", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Range", "bytes 7-8/9")
			w.WriteHeader(http.StatusPartialContent)
		}, "different range"},
		{"realm of a private network", "/v2/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://169.254.169.254/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}, "unexpected response"},
		{"realm in plain text", "/v2/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://h.example/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}, "plain HTTP is only used on this machine"},
		{"no realm", "/v2/", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", "Bearer x="+secret)
			w.WriteHeader(http.StatusUnauthorized)
		}, "unexpected response"},
		{"no token", "/token", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"refresh_token":%q}`, secret) }, "unexpected response"},
		{"redirects in a circle", "/manifests/", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) }, "too many redirects"},
		{"redirect in plain text", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://h.example/?signature="+secret, http.StatusFound)
		}, "plain HTTP is only used on this machine"},
		{"redirect to a file", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		}, "plain HTTP"},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/token" && test.name == "endless token":
					endless(w)
				case test.part == "/token" && r.URL.Path == "/v2/":
					w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token"`, r.Host))
					w.WriteHeader(http.StatusUnauthorized)
				case strings.Contains(r.URL.Path, test.part) && !strings.HasSuffix(r.URL.Path, config) && (test.part != "/v2/" || r.URL.Path == "/v2/"):
					test.handle(w, r)
				default:
					s.handler.ServeHTTP(w, r)
				}
			}))
			wants(t, read(t, host(server), Options{}), test.want)
		})
	}
}

// Redirects neither carry credentials to other hosts, nor lead from HTTPS to HTTP or into private networks.
func TestRedirects(t *testing.T) {
	s := newStock(t)
	store := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		check.That(t, r.Header.Get("Authorization") == "", "the credentials reach another host")
		s.handler.ServeHTTP(w, r)
	}))
	server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch _, password, _ := r.BasicAuth(); {
		case password != secret:
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(w, r, store.URL+r.URL.Path, http.StatusTemporaryRedirect)
		default:
			s.handler.ServeHTTP(w, r)
		}
	}))
	check.Must(t, read(t, host(server), Options{AuthFile: authFile(t, host(server), "me", secret)}))
	reached := trip(func(*http.Request) (*http.Response, error) { return &http.Response{Body: http.NoBody}, nil })
	for _, test := range []struct {
		from, to string
		allowed  bool
	}{
		{"https://h.example/", "https://cdn.example/", true}, {"https://h.example/", "http://h.example/", false}, {"https://h.example/", "https://10.0.0.1/", false},
		{"https://h.example/", "https://169.254.169.254/", false}, {"https://h.example/", "https://[::ffff:127.0.0.1]/", false}, {"https://h.example/", "https://localhost/", false},
		{"https://h.example/", "https://LocalHost./", false}, {"https://h.example/", "https://a.LOCALHOST/", false}, {"https://h.example/", "https://100.100.100.200/", false},
		{"https://h.example/", "https://[64:ff9b::a9fe:a9fe]/", false}, {"https://h.example/", "https://[fe80::1%25eth0]/", false}, {"https://h.example/", "https://[::]/", false},
		{"https://h.example/", "https://[64:ff9b::808:808]/", true}, {"https://h.example/", "https://localhost.example/", true},
		{"https://10.0.0.1/", "https://10.0.0.2/", true}, {"http://127.0.0.1/", "http://127.0.0.1:81/", true},
	} {
		from, _ := http.NewRequest(http.MethodGet, test.from, nil)
		to, _ := http.NewRequest(http.MethodGet, test.to, nil)
		err := checkRedirect(to, []*http.Request{from})
		if err == nil {
			_, err = guard{reached, isInternal(from.URL.Hostname())}.RoundTrip(to)
		}
		check.That(t, (err == nil) == test.allowed, "%s to %s: %v", test.from, test.to, err)
	}
	wants(t, read(t, "registry.example", Options{Transport: trip(func(r *http.Request) (*http.Response, error) { // of the first request
		check.That(t, r.URL.Host == "registry.example", "a redirect leads to %s", r.URL)
		return &http.Response{StatusCode: http.StatusTemporaryRedirect, Header: http.Header{"Location": {"http://127.0.0.1:1/"}}, Body: http.NoBody, Request: r}, nil
	})}), "leads into a private network")
}

type trip func(*http.Request) (*http.Response, error)

func (t trip) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// Requests go through the proxy.
func TestProxy(t *testing.T) {
	s := newStock(t)
	secure := httptest.NewTLSServer(s.handler)
	defer secure.Close()
	var through sync.Map
	proxy := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		through.Store(r.Host, true)
		up, err := net.Dial("tcp", host(secure))
		if err != nil {
			t.Error(err)
			return
		}
		down, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		fmt.Fprint(down, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			_, _ = io.Copy(up, down)
			up.Close()
		}()
		_, _ = io.Copy(down, up)
		down.Close()
	}))
	next := base().(*http.Transport)
	next.TLSClientConfig = &tls.Config{RootCAs: secure.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, ServerName: "example.com"}
	next.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse(proxy.URL) } // [http.ProxyFromEnvironment] reads its variables once
	check.Must(t, read(t, "registry.example:4443", Options{Transport: next}))
	_, ok := through.Load("registry.example:4443")
	check.That(t, ok, "the proxy was not used")
}

// A pull selects the platform from an index, by tag or digest, and accepts only what the reference's digest says.
func TestPlatforms(t *testing.T) {
	s := newStock(t)
	at := host(serve(t, s.handler))
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: imageFor(t, "s390x"), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: s.image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	check.Must(t, remote.WriteIndex(must(name.NewTag(at+"/app:2")), index))
	amd64, digest := must(s.image.Digest()).String(), must(index.Digest()).String()
	for _, test := range []struct {
		ref, platform, digest, want string
	}{
		{"/app:2", "linux/amd64", amd64, ""}, {"/app:2", "linux/s390x", "", ""}, {"/app@" + digest, "linux/amd64", amd64, ""}, {"/app:2@" + amd64, "linux/amd64", amd64, ""},
		{"/app:2", "linux/riscv64", "", "not available for linux/riscv64, but for linux/s390x, linux/amd64"}, {"/app:3", "linux/amd64", "", "has no such image in app"},
		{"/app@sha256:" + strings.Repeat("0", 64), "linux/amd64", "", "has no such image in app"},
	} {
		p := must(images.ParsePlatform(test.platform))
		m, err := pull(t, newStore(t), at+test.ref, Options{}, images.Options{Platform: &p, Packed: true})
		wants(t, err, test.want)
		check.That(t, err != nil || m.Platform == test.platform && (test.digest == "" || m.Digest == test.digest), "%s for %s: %+v", test.ref, test.platform, m)
	}
	liar := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = strings.ReplaceAll(r.URL.Path, "sha256:"+strings.Repeat("0", 64), "1")
		s.handler.ServeHTTP(w, r)
	}))
	_, err := pull(t, newStore(t), host(liar)+"/app@sha256:"+strings.Repeat("0", 64), Options{}, images.Options{Packed: true})
	wants(t, err, "its digest is "+amd64)
}
