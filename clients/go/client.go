// Package sbxrun is a client of `sbxrun serve`, which runs untrusted commands and programs.
//
// A non-zero exit code and a timeout are reports. Errors mean that nothing has run ([*Refused]),
// that processes may still be running ([*Unproven]), or that the response did not arrive ([*Lost]).
// Cancelling the context disconnects, and the server ends the call unless the call has a key.
package sbxrun

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
)

// Client calls one server. It is safe for concurrent use.
type Client struct {
	// Token is sent with each request, to a server that listens on TCP.
	Token string
	// Margin is the time to wait for a response in addition to the call's own timeout.
	Margin time.Duration
	// Patience is the time for which a temporarily refused request is retried.
	Patience time.Duration
	// Node is the node that a gateway forwards all requests to. Requests about volumes and snapshots need one.
	Node string
	// TLS is used for https. It may be changed before the first request, for example to trust
	// other authorities.
	TLS *tls.Config

	base string
	http *http.Client
}

// New returns a client of the server at unix:PATH, http://HOST:PORT or https://HOST:PORT.
func New(address string) (*Client, error) {
	c := &Client{Margin: time.Minute, Patience: 10 * time.Second, TLS: &tls.Config{}, base: strings.TrimSuffix(address, "/")}
	path, unix := strings.CutPrefix(address, "unix:")
	u, err := url.Parse(c.base)
	if unix && path != "" {
		c.base = "http://sbxrun"
	} else if err != nil || u.Hostname() == "" || *u != (url.URL{Scheme: u.Scheme, Host: u.Host}) || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("want unix:PATH, http://HOST:PORT or https://HOST:PORT")
	}
	c.http = &http.Client{CheckRedirect: stay, Transport: &http.Transport{
		// On a connection that the server is just closing, the response could seem lost.
		DisableKeepAlives: true,
		TLSClientConfig:   c.TLS,
		// Connecting continues after its request has been canceled.
		TLSHandshakeTimeout: 10 * time.Second,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if unix {
				network, address = "unix", path
			}
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			if err == nil {
				return tolerantConn{conn}, nil
			}
			if ctx.Err() == nil {
				err = unreachable(err)
			}
			return nil, err
		},
	}}
	return c, nil
}

// stay prevents redirects, because a request may delete something.
func stay(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

func unreachable(err error) *Refused {
	return &Refused{Failure: Failure{Code: "unreachable", Message: fmt.Sprintf("the server cannot be reached: %v", err)}, Again: -1}
}

// tolerantConn hides write errors after the server has closed the connection. The server may have answered
// before it has read the whole request, and net/http would discard that answer because of the error.
type tolerantConn struct{ net.Conn }

func (p tolerantConn) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return len(b), nil
	}
	return n, err
}

// Run runs a command or program in a new sandbox. When it returns, all its processes have exited.
func (c *Client) Run(ctx context.Context, call Call) (*Report, error) {
	return c.run(ctx, "/v1/run", call)
}

// Stream is like Run, but yields output as it arrives. The last event is the report, unless there is
// an error. Leaving the loop earlier ends the call.
func (c *Client) Stream(ctx context.Context, call Call) iter.Seq2[Event, error] {
	return c.stream(ctx, "/v1/run", call)
}

// Start starts a command or program that runs in the background.
func (c *Client) Start(ctx context.Context, call Call) (*Process, error) {
	return c.start(ctx, "/v1/calls", call, standard)
}

// Process returns the handle of a started command by its ID.
func (c *Client) Process(id string) *Process { return process(c, "/v1/calls", id) }

// NewSession creates a sandbox that keeps its files between calls. The caller must End it.
func (c *Client) NewSession(ctx context.Context, o SessionOptions) (*Session, error) {
	var s SessionStatus
	if err := c.json(ctx, http.MethodPost, "/v1/sessions", 0, o, &s); err != nil {
		return nil, err
	}
	return c.Session(s.ID), nil
}

// Session returns an existing session by its id.
func (c *Client) Session(id string) *Session {
	return &Session{ID: id, client: c, path: "/v1/sessions/" + url.PathEscape(id)}
}

// Sessions lists the sessions.
func (c *Client) Sessions(ctx context.Context) ([]SessionStatus, error) {
	var list struct{ Sessions []SessionStatus }
	err := c.json(ctx, http.MethodGet, "/v1/sessions", 0, nil, &list)
	return list.Sessions, err
}

// Snapshots lists the snapshots.
func (c *Client) Snapshots(ctx context.Context) ([]Snapshot, error) {
	var list struct{ Snapshots []Snapshot }
	err := c.json(ctx, http.MethodGet, "/v1/snapshots", 0, nil, &list)
	return list.Snapshots, err
}

// RemoveSnapshot removes a snapshot by its id or name.
func (c *Client) RemoveSnapshot(ctx context.Context, id string) error {
	return c.json(ctx, http.MethodDelete, "/v1/snapshots/"+url.PathEscape(id), 0, nil, nil)
}

// Languages lists the languages for code.
func (c *Client) Languages(ctx context.Context) ([]Language, error) {
	var list struct{ Languages []Language }
	err := c.json(ctx, http.MethodGet, "/v1/languages", 0, nil, &list)
	return list.Languages, err
}

// Images lists the images that calls and sessions can use.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	var list struct{ Images []Image }
	err := c.json(ctx, http.MethodGet, "/v1/images", 0, nil, &list)
	return list.Images, err
}

// Store stores a file in the content store and returns its ID.
func (c *Client) Store(ctx context.Context, data []byte) (id string, err error) {
	return c.store(ctx, request{body: data})
}

// StoreStream is like Store, but reads the file piece by piece: see [Session.WriteStream].
func (c *Client) StoreStream(ctx context.Context, r io.Reader) (id string, err error) {
	return c.store(ctx, request{stream: r})
}

func (c *Client) store(ctx context.Context, r request) (id string, err error) {
	var stored struct{ ID string }
	r.method, r.path, r.kind = http.MethodPost, "/v1/files", octets
	b, err := c.ask(ctx, r)
	if err == nil {
		err = decode(b, &stored)
	}
	if err == nil && stored.ID == "" {
		err = errIncomplete
	}
	return stored.ID, err
}

// Files lists the content store, least recently used first.
func (c *Client) Files(ctx context.Context) ([]Stored, error) {
	var list struct{ Files []Stored }
	err := c.json(ctx, http.MethodGet, "/v1/files", 0, nil, &list)
	return list.Files, err
}

// RemoveFile removes a file from the content store.
func (c *Client) RemoveFile(ctx context.Context, id string) error {
	return c.json(ctx, http.MethodDelete, "/v1/files/"+url.PathEscape(id), 0, nil, nil)
}

// Fetch reads a file from the content store.
func (c *Client) Fetch(ctx context.Context, id string) ([]byte, error) { return c.ask(ctx, fetch(id)) }

// FetchStream is like Fetch, but the caller reads the file as it arrives, and closes it.
func (c *Client) FetchStream(ctx context.Context, id string) (io.ReadCloser, error) {
	return c.send(ctx, fetch(id))
}

func fetch(id string) request {
	return request{method: http.MethodGet, path: "/v1/files/" + url.PathEscape(id)}
}

const octets = "application/octet-stream"

func (c *Client) run(ctx context.Context, path string, call Call) (*Report, error) {
	if err := prepare(&call, standard); err != nil {
		return nil, err
	}
	return answer[Report](ctx, c, http.MethodPost, path, call.Timeout+call.Grace, call)
}

const standard = 30 * time.Second

// keepalive is the maximum time without an event on a stream.
const keepalive = 5 * time.Second

// prepare checks a call and sets its defaults. A timeout of 0 means the server's default.
func prepare(call *Call, timeout time.Duration) error {
	if (call.Argv == nil) == (call.Code == "") {
		return errors.New("want either Argv or Code")
	}
	if call.Timeout < 0 {
		return errors.New("a timeout must be more than 0")
	}
	texts := append([]string{call.Code, call.Stdin, call.Workdir}, call.Argv...)
	for name, value := range call.Env {
		texts = append(texts, name, value)
	}
	for _, text := range texts {
		if !utf8.ValidString(text) { // package json would modify it
			return fmt.Errorf("%.40q is not UTF-8; only the content of a file may be other bytes", text)
		}
	}
	if call.Timeout == 0 {
		call.Timeout = timeout
	}
	if call.Code != "" && call.Language == "" {
		call.Language = "python"
	}
	return nil
}

func (c *Client) start(ctx context.Context, path string, call Call, timeout time.Duration) (*Process, error) {
	if err := prepare(&call, timeout); err != nil {
		return nil, err
	}
	var s Status
	if err := c.json(ctx, http.MethodPost, path, 0, call, &s); err != nil {
		return nil, err
	}
	return process(c, path, s.ID), nil
}

func (c *Client) stream(ctx context.Context, path string, call Call) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := c.events(ctx, path, call, func(e Event) bool { return yield(e, nil) }); err != nil {
			yield(Event{}, err)
		}
	}
}

// events yields the events of a call until the last one, or until yield returns false.
func (c *Client) events(ctx context.Context, path string, call Call, yield func(Event) bool) error {
	if err := prepare(&call, standard); err != nil {
		return err
	}
	b, err := json.Marshal(call)
	if err != nil {
		return err
	}
	body, err := c.send(ctx, request{method: http.MethodPost, path: path + "?stream=1", body: b, kind: "application/json", wait: keepalive})
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, longestEvent)
	for lines.Scan() {
		var e struct {
			Event, Text string
			Base64      []byte
			Report      *Report
			Error       *failure
		}
		if err := decode(lines.Bytes(), &e); err != nil {
			return err
		}
		switch {
		case e.Report != nil && !e.Report.whole():
			return errIncomplete
		case e.Error != nil:
			return e.Error.err(0)
		case e.Report != nil:
			yield(Event{Name: e.Event, Report: e.Report})
			return nil
		case e.Event == "stdout" || e.Event == "stderr":
			if e.Base64 == nil {
				e.Base64 = []byte(e.Text)
			}
			if !yield(Event{Name: e.Event, Data: e.Base64}) {
				return nil
			}
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return &Lost{fmt.Errorf("an event has more than %d bytes", longestEvent)}
	} else if err != nil {
		return err
	}
	return &Lost{errors.New("the stream ended without a report")}
}

// longestEvent is the maximum length of one event of a stream.
const longestEvent = 128 << 20

// answer sends a document, or nil, and returns the answer.
func answer[T any](ctx context.Context, c *Client, method, path string, wait time.Duration, in any) (*T, error) {
	out := new(T)
	if err := c.json(ctx, method, path, wait, in, out); err != nil {
		return nil, err
	}
	return out, nil
}

// json sends a document, or nil, and decodes the answer.
func (c *Client) json(ctx context.Context, method, path string, wait time.Duration, in, out any) error {
	r := request{method: method, path: path, wait: wait}
	if in != nil {
		var err error
		if r.body, err = json.Marshal(in); err != nil {
			return err
		}
		r.kind = "application/json"
		switch in := in.(type) {
		case Call:
			r.key = in.Key
		case Cell:
			r.key = in.Key
		}
	}
	b, err := c.ask(ctx, r)
	if err != nil || out == nil {
		return err
	}
	return decode(b, out)
}

func decode(b []byte, out any) error {
	if err := json.Unmarshal(b, out); err != nil {
		return &Lost{err}
	}
	if out, ok := out.(interface{ whole() bool }); ok && !out.whole() {
		return errIncomplete
	}
	return nil
}

// errIncomplete is the error of a document without required members.
var errIncomplete = &Lost{errors.New("no valid answer")}

func (o *Outcome) whole() bool { return o.ID != "" && o.Cause != "" }
func (s *Status) whole() bool {
	return s.ID != "" && s.State != "" && (s.Report == nil || s.Report.whole())
}
func (s *SessionStatus) whole() bool { return s.ID != "" }

// request is an HTTP request. wait is the time allowed for its answer in addition to the margin.
type request struct {
	method, path, kind, key string
	body                    []byte
	stream                  io.Reader // instead of body; can be sent only once
	wait                    time.Duration
}

func (c *Client) ask(ctx context.Context, r request) ([]byte, error) {
	body, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// send sends a request, retrying while it is refused temporarily, and returns the body of the
// response, which the caller closes.
func (c *Client) send(ctx context.Context, r request) (io.ReadCloser, error) {
	const most = 5 * time.Second
	until := time.Now().Add(c.Patience)
	// Doubles with each attempt, even if the server says 0.
	for least := leastPause; ; least = min(2*least, most) {
		body, err := c.once(ctx, r)
		var refused *Refused
		if !errors.As(err, &refused) || refused.Again < 0 || r.stream != nil {
			return body, err
		}
		pause := max(refused.Again, least)
		if pause > time.Until(until) {
			return body, err
		}
		if err := rest(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// leastPause is the minimum time between two requests about a command.
const leastPause = 100 * time.Millisecond

// rest sleeps until ctx is done, and returns its error.
func rest(ctx context.Context, pause time.Duration) error {
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Client) once(ctx context.Context, r request) (io.ReadCloser, error) {
	inner, cancel := context.WithCancelCause(ctx)
	b := &body{outer: ctx, inner: inner, cancel: cancel, bound: r.wait + c.Margin}
	if b.bound < 0 { // overflow
		b.bound = math.MaxInt64
	}
	b.timer = time.AfterFunc(b.bound, func() { cancel(errLate) })
	connected := false
	inner = httptrace.WithClientTrace(inner, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected = true }})
	var in io.Reader = bytes.NewReader(r.body)
	if r.stream != nil {
		in = sending{b, r.stream}
	}
	q, err := http.NewRequestWithContext(inner, r.method, c.base+r.path, in)
	if err != nil {
		b.Close()
		return nil, err
	}
	q.Header.Set("Accept", "application/json")
	if r.kind != "" {
		q.Header.Set("Content-Type", r.kind)
	}
	if r.key != "" {
		q.Header.Set("Idempotency-Key", r.key)
	}
	if token := strings.TrimSpace(c.Token); token != "" { // may come from a file that ends with a newline
		q.Header.Set("Authorization", "Bearer "+token)
	}
	if c.Node != "" {
		q.Header.Set("Sbxrun-Node", c.Node)
	}
	a, err := c.http.Do(q)
	if err != nil {
		b.Close()
		if refused, ok := errors.AsType[*Refused](err); ok {
			return nil, refused
		}
		if !connected && ctx.Err() == nil {
			return nil, unreachable(b.late(err)) // nothing was sent
		}
		return nil, b.lost(err)
	}
	b.body = a.Body
	b.timer.Stop()
	if a.StatusCode < 300 {
		return b, nil
	}
	defer b.Close()
	text, err := io.ReadAll(b)
	if err != nil {
		return nil, err
	}
	return nil, answered(a, text)
}

// sending is the body of a request. Each read restarts the response timeout.
type sending struct {
	answer *body
	r      io.Reader
}

func (s sending) Read(p []byte) (int, error) {
	s.answer.timer.Reset(s.answer.bound)
	return s.r.Read(p)
}

// body is the body of an answer. Every read must make progress within the bound; the time
// between two reads does not count.
type body struct {
	outer  context.Context
	inner  context.Context // with the bound
	cancel context.CancelCauseFunc
	timer  *time.Timer
	bound  time.Duration
	body   io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	b.timer.Reset(b.bound)
	n, err := b.body.Read(p)
	b.timer.Stop()
	if err != nil && err != io.EOF {
		err = b.lost(err)
	}
	return n, err
}

func (b *body) Close() error {
	b.timer.Stop()
	b.cancel(nil)
	if b.body == nil {
		return nil
	}
	return b.body.Close()
}

// lost returns the caller's own cancellation if that is the reason, or else a Lost.
func (b *body) lost(err error) error {
	if b.outer.Err() != nil {
		return context.Cause(b.outer)
	}
	return &Lost{b.late(err)}
}

var errLate = errors.New("no answer in time")

// late returns errLate if the bound was exceeded, because the error itself would look like a cancellation.
func (b *body) late(err error) error {
	if context.Cause(b.inner) == errLate {
		return errLate
	}
	return err
}
