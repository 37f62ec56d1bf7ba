package registry

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Bounds of requests.
const (
	maxManifest  = snapshots.MaxImageText
	maxRedirects = 5
	handshake    = time.Minute // for authentication
	connectTime  = 15 * time.Second
	headerTime   = 30 * time.Second
	stallTime    = time.Minute // without a byte of a body
)

// retries of requests that fail temporarily. Bodies are resumed by [blob].
var retries = transport.Backoff{Duration: time.Second, Factor: 3, Jitter: 0.1, Steps: 3}

// base returns a transport that uses the proxies of HTTPS_PROXY, HTTP_PROXY and NO_PROXY.
func base() http.RoundTripper {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: connectTime}).DialContext,
		TLSHandshakeTimeout: connectTime, ResponseHeaderTimeout: headerTime, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true,
		MaxResponseHeaderBytes: 1 << 20, DisableCompression: true, // digests cover the bytes as they are sent
	}
}

// guard rejects plain HTTP except to this machine, and requests of a public registry, such as its redirects, to private
// networks. It ends bodies that are too long or stall. [withLimit] sets the size; it is maxManifest otherwise.
type guard struct {
	next     http.RoundTripper
	internal bool // the registry is in a private network
}

func (g guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !isLocal(r.URL.Hostname()) {
		return nil, errPlain
	}
	if !g.internal && isInternal(r.URL.Hostname()) {
		return nil, errPrivate
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	response, err := g.next.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	most, ok := r.Context().Value(limitKey{}).(int64)
	if !ok {
		most = maxManifest
	}
	response.Body = &body{ReadCloser: response.Body, ctx: ctx, cancel: cancel, left: most, stall: time.AfterFunc(stallTime, func() { cancel(errStalled) })}
	return response, nil
}

const (
	errPlain   = failure("plain HTTP is only used on this machine")
	errPrivate = failure("a public registry leads into a private network")
	errStalled = failure("no data for a minute")
	errTooLong = failure("the response is too long")
)

type limitKey struct{}

// withLimit sets the maximum size of responses.
func withLimit(ctx context.Context, n int64) context.Context {
	return context.WithValue(ctx, limitKey{}, n)
}

type body struct {
	io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	left   int64
	stall  *time.Timer
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.stall.Reset(stallTime)
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooLong
	}
	if err != nil && err != io.EOF && b.ctx.Err() != nil {
		err = context.Cause(b.ctx)
	}
	return n, err
}

func (b *body) Close() error {
	b.stall.Stop()
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}

// isLocal reports whether a host is this machine.
func isLocal(host string) bool {
	if a, ok := address(host); ok {
		return a.IsLoopback()
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	return name == "localhost" || strings.HasSuffix(name, ".localhost")
}

var (
	shared = netip.MustParsePrefix("100.64.0.0/10") // of providers, who also have metadata services there (RFC 6598)
	nat64  = netip.MustParsePrefix("64:ff9b::/96")  // an IPv4 address follows (RFC 6052)
)

// isInternal reports whether a host is an address of this machine or of a private network.
func isInternal(host string) bool {
	a, ok := address(host)
	return isLocal(host) || ok && (a.IsPrivate() || a.IsLinkLocalUnicast() || a.IsUnspecified() || a.IsMulticast() || shared.Contains(a))
}

// address parses an IP address. It returns the IPv4 address that an IPv6 address contains.
func address(host string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(host)
	if a = a.Unmap(); nat64.Contains(a) {
		b := a.As16()
		a = netip.AddrFrom4([4]byte(b[12:]))
	}
	return a, err == nil
}

// checkRedirect allows a few redirects, but not from HTTPS to HTTP.
func checkRedirect(r *http.Request, via []*http.Request) error {
	from := via[0].URL
	switch {
	case len(via) > maxRedirects:
		return failure("too many redirects")
	case from.Scheme == "https" && r.URL.Scheme != "https":
		return failure("a redirect leads from HTTPS to HTTP")
	}
	return nil
}
