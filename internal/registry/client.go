package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/version"
)

// Options control access to a registry.
type Options struct {
	AuthFile  string            // config.json of docker login; "" for the usual places
	Transport http.RoundTripper // nil for the default
}

// client reads from one repository.
type client struct {
	repo   name.Repository
	scheme string
	http   http.Client
}

// connect authenticates for reading.
func connect(ctx context.Context, repo name.Repository, o Options) (*client, error) {
	auth, err := credentials(o.AuthFile, repo)
	if err != nil {
		return nil, err
	}
	next := o.Transport
	if next == nil {
		next = base()
	}
	c := &client{repo: repo, scheme: repo.Scheme()}
	next = transport.NewRetry(guard{transport.NewUserAgent(next, "sbxrun/"+version.Number), isInternal((&url.URL{Host: repo.RegistryStr()}).Hostname())}, transport.WithRetryBackoff(retries), transport.WithRetryStatusCodes(http.StatusRequestTimeout,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout))
	ctx, cancel := context.WithTimeoutCause(ctx, handshake, errStalled)
	defer cancel()
	authenticated, err := transport.NewWithContext(ctx, repo.Registry, auth, next, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, c.explain(err)
	}
	c.http = http.Client{Transport: authenticated, CheckRedirect: checkRedirect}
	return c, nil
}

// get requests a part of the repository, such as blobs/sha256:DIGEST.
func (c *client) get(ctx context.Context, part string, header http.Header, accept ...int) (*http.Response, error) {
	u := url.URL{Scheme: c.scheme, Host: c.repo.RegistryStr(), Path: "/v2/" + c.repo.RepositoryStr() + "/" + part}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	r.Header = header
	response, err := c.http.Do(r)
	if err == nil {
		if err = transport.CheckError(response, accept...); err != nil {
			response.Body.Close()
		}
	}
	if err != nil {
		return nil, c.explain(err)
	}
	return response, nil
}

// explain converts an error of a request. It keeps codes and errors of the network, but no text of the registry and no
// URL, because both can contain secrets.
func (c *client) explain(err error) error {
	host := c.repo.RegistryStr()
	var (
		status      *transport.Error
		certificate *tls.CertificateVerificationError
		network     *net.OpError
		lookup      *net.DNSError
		number      syscall.Errno
		own         failure
	)
	switch {
	case errors.As(err, new(*result.Error)): // explained already
		return err
	case errors.As(err, &certificate): // on this machine, plain HTTP has failed as well
		return fmt.Errorf("%s: %w", host, certificate)
	case errors.As(err, &own):
		return fmt.Errorf("%s: %w", host, own)
	case errors.As(err, &status):
		return c.status(status)
	case errors.As(err, &lookup):
		return fmt.Errorf("%s: %w", host, lookup)
	case errors.As(err, &network):
		return fmt.Errorf("%s: %w", host, network)
	case errors.As(err, &number):
		return fmt.Errorf("%s: %w", host, number)
	}
	for _, known := range []error{context.Canceled, context.DeadlineExceeded, http.ErrSchemeMismatch, io.ErrUnexpectedEOF, io.EOF} {
		if errors.Is(err, known) {
			return fmt.Errorf("%s: %w", host, known)
		}
	}
	if u := (*url.Error)(nil); errors.As(err, &u) && u.Timeout() {
		return fmt.Errorf("%s: timeout", host)
	}
	return fmt.Errorf("%s, or a proxy, sends an unexpected response", host)
}

// status converts an error response.
func (c *client) status(e *transport.Error) error {
	host := c.repo.RegistryStr()
	switch e.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return &result.Error{Code: "auth", Message: fmt.Sprintf("%s denies access to %s", host, c.repo.RepositoryStr()), Hint: "check the name, and the credentials of docker login or --authfile", Err: errPermanent}
	case http.StatusNotFound:
		return &result.Error{Code: "no-such-image", Message: fmt.Sprintf("%s has no such image in %s", host, c.repo.RepositoryStr()), Err: errPermanent}
	case http.StatusTooManyRequests:
		return &result.Error{Code: "busy", Message: host + " limits the rate of pulls", Hint: "log in, or try again later"}
	}
	return fmt.Errorf("%s answers with status %d%s", host, e.StatusCode, codes(e))
}

// failure is an error whose text comes from this package.
type failure string

func (f failure) Error() string { return string(f) }

var errPermanent = errors.New("permanent")

// codes lists the registry's error codes, as far as they are words.
func codes(e *transport.Error) string {
	var list []string
	for _, d := range e.Errors[:min(len(e.Errors), 3)] {
		if code := string(d.Code); code != "" && len(code) < 40 && strings.Trim(code, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == "" {
			list = append(list, code)
		}
	}
	if len(list) == 0 {
		return ""
	}
	return ": " + strings.Join(list, ", ")
}
