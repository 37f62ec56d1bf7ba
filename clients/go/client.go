// Package sbxrun is a client of `sbxrun serve`: it runs commands and programs that nobody trusts.
//
// A non-zero exit code and a timeout are reports. Errors are for what has not run ([*Refused]), of
// which something may be left ([*Unproven]), or of which the answer did not come ([*Lost]). Whoever
// cancels a context leaves, and the server ends the call.
package sbxrun

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// Client is of a server. Several goroutines may use one.
type Client struct {
	// Token is sent with each request, to a server that listens on TCP.
	Token string
	// Margin is how much longer than a call's own timeout its answer is waited for.
	Margin time.Duration
	// Patience is for how long what was refused for a moment is tried again.
	Patience time.Duration

	base string
	http *http.Client
}

// New is a client of the server at unix:PATH, http://HOST:PORT or https://HOST:PORT.
func New(address string) (*Client, error) {
	c := &Client{Margin: time.Minute, Patience: 10 * time.Second, base: strings.TrimSuffix(address, "/")}
	path, unix := strings.CutPrefix(address, "unix:")
	if unix {
		c.base = "http://sbxrun"
	} else if !strings.HasPrefix(address, "http://") && !strings.HasPrefix(address, "https://") {
		return nil, errors.New("want unix:PATH, http://HOST:PORT or https://HOST:PORT")
	}
	c.http = &http.Client{Transport: &http.Transport{
		// One that the server has just closed would be taken for an answer that is lost.
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if unix {
				network, address = "unix", path
			}
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			if err == nil {
				return patient{conn}, nil
			}
			if ctx.Err() == nil {
				err = &Refused{Failure: Failure{Code: "unreachable", Message: fmt.Sprintf("the server cannot be reached: %v", err)}, Again: -1}
			}
			return nil, err
		},
	}}
	return c, nil
}

// patient is a connection whose other end may answer before it has read all, and close. Then the
// answer says why, or it does not come; net/http would drop it for the error of a write.
type patient struct{ net.Conn }

func (p patient) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return len(b), nil
	}
	return n, err
}

// Run runs a command, or a program, in a fresh sandbox. When it returns nothing of it is left.
func (c *Client) Run(ctx context.Context, call Call) (*Report, error) {
	return c.run(ctx, "/v1/run", call)
}

// Stream is as Run, with the output while it comes. The last event is the report, or there is an
// error; whoever leaves the loop before ends the call.
func (c *Client) Stream(ctx context.Context, call Call) iter.Seq2[Event, error] {
	return c.stream(ctx, "/v1/run", call)
}

// Start begins to run a command, or a program, which goes on whether or not anybody waits.
func (c *Client) Start(ctx context.Context, call Call) (*Process, error) {
	return c.start(ctx, "/v1/calls", call)
}

// Process is what Start has begun, by its id.
func (c *Client) Process(id string) *Process { return process(c, "/v1/calls", id) }

// NewSession makes a sandbox whose files stay from call to call. End it.
func (c *Client) NewSession(ctx context.Context, o SessionOptions) (*Session, error) {
	var s SessionStatus
	if err := c.json(ctx, http.MethodPost, "/v1/sessions", 0, o, &s); err != nil {
		return nil, err
	}
	return c.Session(s.ID), nil
}

// Session is one that was made before, by its id.
func (c *Client) Session(id string) *Session {
	return &Session{ID: id, client: c, path: "/v1/sessions/" + url.PathEscape(id)}
}

// Sessions lists the sessions.
func (c *Client) Sessions(ctx context.Context) ([]SessionStatus, error) {
	var list struct{ Sessions []SessionStatus }
	err := c.json(ctx, http.MethodGet, "/v1/sessions", 0, nil, &list)
	return list.Sessions, err
}

// Languages lists the languages for code.
func (c *Client) Languages(ctx context.Context) ([]Language, error) {
	var list struct{ Languages []Language }
	err := c.json(ctx, http.MethodGet, "/v1/languages", 0, nil, &list)
	return list.Languages, err
}

// Store puts a file into the content store, and returns its id.
func (c *Client) Store(ctx context.Context, data []byte) (id string, err error) {
	var stored struct{ ID string }
	b, err := c.ask(ctx, request{method: http.MethodPost, path: "/v1/files", body: data, kind: octets})
	if err == nil {
		err = decode(b, &stored)
	}
	return stored.ID, err
}

// Fetch reads a file of the content store.
func (c *Client) Fetch(ctx context.Context, id string) ([]byte, error) {
	return c.ask(ctx, request{method: http.MethodGet, path: "/v1/files/" + url.PathEscape(id)})
}

const octets = "application/octet-stream"

func (c *Client) run(ctx context.Context, path string, call Call) (*Report, error) {
	if err := prepare(&call); err != nil {
		return nil, err
	}
	r := &Report{}
	if err := c.json(ctx, http.MethodPost, path, call.Timeout+call.Grace, call, r); err != nil {
		return nil, err
	}
	return r, nil
}

// prepare sets what is not given.
func prepare(call *Call) error {
	if (call.Argv == nil) == (call.Code == "") {
		return errors.New("want either Argv or Code")
	}
	if call.Timeout < 0 {
		return errors.New("a timeout must be more than 0")
	}
	if call.Timeout == 0 {
		call.Timeout = 30 * time.Second
	}
	if call.Code != "" && call.Language == "" {
		call.Language = "python"
	}
	return nil
}

func (c *Client) start(ctx context.Context, path string, call Call) (*Process, error) {
	if err := prepare(&call); err != nil {
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

// events hands on the events of a call until there are no more, or until they are no longer wanted.
func (c *Client) events(ctx context.Context, path string, call Call, yield func(Event) bool) error {
	if err := prepare(&call); err != nil {
		return err
	}
	b, err := json.Marshal(call)
	if err != nil {
		return err
	}
	body, err := c.send(ctx, request{method: http.MethodPost, path: path + "?stream=1", body: b, kind: "application/json"})
	if err != nil {
		return err
	}
	defer body.Close()
	for lines := bufio.NewReader(body); ; {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			err = &Lost{errors.New("the stream has no end")}
		}
		if err != nil {
			return err
		}
		var e struct {
			Event, Text string
			Base64      []byte
			Report      *Report
			Error       *failure
		}
		if err := decode(line, &e); err != nil {
			return err
		}
		switch {
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
}

// json asks with a document, or nil, and reads the one that is the answer.
func (c *Client) json(ctx context.Context, method, path string, wait time.Duration, in, out any) error {
	r := request{method: method, path: path, wait: wait}
	if in != nil {
		var err error
		if r.body, err = json.Marshal(in); err != nil {
			return err
		}
		r.kind = "application/json"
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
	return nil
}

// request is what is sent. wait is for how long its answer may take beside the margin.
type request struct {
	method, path, kind string
	body               []byte
	wait               time.Duration
}

func (c *Client) ask(ctx context.Context, r request) ([]byte, error) {
	body, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// send sends a request until it is not refused for a moment only, and returns the body of the
// answer, to be closed.
func (c *Client) send(ctx context.Context, r request) (io.ReadCloser, error) {
	until := time.Now().Add(c.Patience)
	for {
		body, err := c.once(ctx, r)
		var refused *Refused
		if !errors.As(err, &refused) || refused.Again < 0 || time.Now().Add(refused.Again).After(until) {
			return body, err
		}
		select {
		case <-time.After(refused.Again):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (c *Client) once(ctx context.Context, r request) (io.ReadCloser, error) {
	inner, cancel := context.WithCancel(ctx)
	b := &body{outer: ctx, cancel: cancel, bound: r.wait + c.Margin}
	b.timer = time.AfterFunc(b.bound, cancel)
	q, err := http.NewRequestWithContext(inner, r.method, c.base+r.path, bytes.NewReader(r.body))
	if err != nil {
		b.Close()
		return nil, err
	}
	q.Header.Set("Accept", "application/json")
	if r.kind != "" {
		q.Header.Set("Content-Type", r.kind)
	}
	if c.Token != "" {
		q.Header.Set("Authorization", "Bearer "+c.Token)
	}
	a, err := c.http.Do(q)
	if err != nil {
		b.Close()
		var refused *Refused
		if errors.As(err, &refused) {
			return nil, refused
		}
		return nil, b.lost(err)
	}
	b.body = a.Body
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

// body is that of an answer, of which a piece must come within the bound.
type body struct {
	outer  context.Context
	cancel context.CancelFunc
	timer  *time.Timer
	bound  time.Duration
	body   io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	b.timer.Reset(b.bound)
	n, err := b.body.Read(p)
	if err != nil && err != io.EOF {
		err = b.lost(err)
	}
	return n, err
}

func (b *body) Close() error {
	b.timer.Stop()
	b.cancel()
	if b.body == nil {
		return nil
	}
	return b.body.Close()
}

// lost says whether we have left, or the answer did not come.
func (b *body) lost(err error) error {
	if b.outer.Err() != nil {
		return context.Cause(b.outer)
	}
	return &Lost{err}
}
