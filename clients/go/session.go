package sbxrun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Session is a sandbox that keeps its files. It ends with End or after its idle timeout.
type Session struct {
	ID string

	client *Client
	path   string
}

// Run runs a command or program. Its processes end with it; its files stay.
func (s *Session) Run(ctx context.Context, call Call) (*Report, error) {
	return s.client.run(ctx, s.path+"/exec", call)
}

// Stream is like [Client.Stream].
func (s *Session) Stream(ctx context.Context, call Call) iter.Seq2[Event, error] {
	return s.client.stream(ctx, s.path+"/exec", call)
}

// Cell runs code in the session's interpreter, which keeps definitions for the next cell.
func (s *Session) Cell(ctx context.Context, cell Cell) (*CellAnswer, error) {
	call := Call{Code: cell.Code, Language: cell.Language, Timeout: cell.Timeout, Files: cell.Files}
	if err := prepare(&call, standard); err != nil {
		return nil, err
	}
	cell.Language, cell.Timeout = call.Language, call.Timeout
	return answer[CellAnswer](ctx, s.client, http.MethodPost, s.path+"/code", cell.Timeout, cell)
}

// Start starts a command in the background. Without a timeout it runs until it exits or the
// session ends.
func (s *Session) Start(ctx context.Context, call Call) (*Process, error) {
	return s.client.start(ctx, s.path+"/processes", call, 0)
}

// Process returns the handle of a started command by its ID.
func (s *Session) Process(id string) *Process { return process(s.client, s.path+"/processes", id) }

// Write writes a file of the workspace, with permissions in octal (644 if "").
func (s *Session) Write(ctx context.Context, path string, data []byte, mode string) error {
	return s.write(ctx, path, request{body: data}, mode)
}

// WriteStream is like Write, but reads the file piece by piece, so that it need not fit into memory. The file can be
// sent only once, so a temporary refusal is returned at once. After an error, another goroutine may still be in a
// Read of r.
func (s *Session) WriteStream(ctx context.Context, path string, r io.Reader, mode string) error {
	return s.write(ctx, path, request{stream: r}, mode)
}

func (s *Session) write(ctx context.Context, path string, r request, mode string) error {
	if mode == "" {
		mode = "644"
	}
	r.method, r.path, r.kind = http.MethodPut, s.file(path)+"?mode="+url.QueryEscape(mode), octets
	_, err := s.client.ask(ctx, r)
	return err
}

// Read reads a file of the workspace.
func (s *Session) Read(ctx context.Context, path string) ([]byte, error) {
	return s.client.ask(ctx, request{method: http.MethodGet, path: s.file(path)})
}

// ReadStream is like Read, but the caller reads the file as it arrives, and closes it.
func (s *Session) ReadStream(ctx context.Context, path string) (io.ReadCloser, error) {
	return s.client.send(ctx, request{method: http.MethodGet, path: s.file(path)})
}

// Remove removes a file or empty directory from the workspace.
func (s *Session) Remove(ctx context.Context, path string) error {
	return s.client.json(ctx, http.MethodDelete, s.file(path), 0, nil, nil)
}

// List lists the workspace recursively.
func (s *Session) List(ctx context.Context) ([]Entry, error) {
	var list struct{ Files []Entry }
	err := s.client.json(ctx, http.MethodGet, s.path+"/files", 0, nil, &list)
	return list.Files, err
}

// Pack reads all files, as a tar archive.
func (s *Session) Pack(ctx context.Context) ([]byte, error) {
	return s.client.ask(ctx, request{method: http.MethodGet, path: s.path + "/archive"})
}

// PackStream is like Pack, but the caller reads the archive as it arrives, and closes it.
func (s *Session) PackStream(ctx context.Context) (io.ReadCloser, error) {
	return s.client.send(ctx, request{method: http.MethodGet, path: s.path + "/archive"})
}

// Unpack writes the files of a tar archive.
func (s *Session) Unpack(ctx context.Context, archive []byte) error {
	return s.unpack(ctx, request{body: archive})
}

// UnpackStream is like Unpack, but reads the archive piece by piece: see [Session.WriteStream].
func (s *Session) UnpackStream(ctx context.Context, archive io.Reader) error {
	return s.unpack(ctx, request{stream: archive})
}

func (s *Session) unpack(ctx context.Context, r request) error {
	r.method, r.path, r.kind = http.MethodPut, s.path+"/archive", "application/x-tar"
	_, err := s.client.ask(ctx, r)
	return err
}

// Diff returns the changes in the session's overlay.
func (s *Session) Diff(ctx context.Context) (*Diff, error) {
	return answer[Diff](ctx, s.client, http.MethodGet, s.path+"/diff", 0, nil)
}

// Snapshot takes a snapshot of the session's overlay, with an optional name and lifetime.
func (s *Session) Snapshot(ctx context.Context, name string, ttl time.Duration) (*Snapshot, error) {
	n := struct {
		Name  string  `json:"name,omitempty"`
		TTLMS float64 `json:"ttl_ms,omitempty"`
	}{name, ms(ttl)}
	return answer[Snapshot](ctx, s.client, http.MethodPost, s.path+"/snapshot", 0, n)
}

// End ends the session and everything in it. A session that has already ended is not an error.
func (s *Session) End(ctx context.Context) error {
	err := s.client.json(ctx, http.MethodDelete, s.path, 0, nil, nil)
	if refused, ok := errors.AsType[*Refused](err); ok && (refused.Code == "ended" || refused.Code == "no-such-session") {
		return nil
	}
	return err
}

func (s *Session) file(path string) string {
	parts := strings.Split(path, "/")
	for i := range parts {
		parts[i] = url.PathEscape(parts[i])
	}
	return s.path + "/files/" + strings.Join(parts, "/")
}

// Process is a background command: an asynchronous call, or a process of a session.
type Process struct {
	ID string

	client *Client
	path   string
}

func process(c *Client, path, id string) *Process {
	return &Process{ID: id, client: c, path: path + "/" + url.PathEscape(id)}
}

// Status returns the current state. With wait, it returns when the command ends or that time (at most a minute) has
// passed.
func (p *Process) Status(ctx context.Context, wait time.Duration) (*Status, error) {
	return answer[Status](ctx, p.client, http.MethodGet, fmt.Sprintf("%s?wait_ms=%d", p.path, wait.Milliseconds()), wait, nil)
}

// Wait waits for the command's end and returns the report, without the output, which Output yields.
func (p *Process) Wait(ctx context.Context) (*Report, error) {
	for {
		s, err := p.Status(ctx, 30*time.Second)
		if err != nil {
			return nil, err
		}
		if s.Error != nil {
			begun := s.Started || s.Error.Code == "unproven" || s.Report != nil
			return nil, (&failure{s.Error, &begun, s.Report}).err(0)
		}
		if s.Report != nil {
			return s.Report, nil
		}
		if s.State == "ended" {
			return nil, errIncomplete
		}
		if err := rest(ctx, leastPause); err != nil { // the server has usually waited 30 s
			return nil, err
		}
	}
}

// Output yields the command's stdout or stderr, from a byte offset on, as it arrives. It reconnects after a broken
// connection. A piece is valid until the next iteration.
func (p *Process) Output(ctx context.Context, stream string, from int64) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for {
			begin := from
			more, err := p.follow(ctx, stream, &from, yield)
			if err == nil && !more {
				return
			}
			// No byte arrived: either there is no output yet, or the server is gone, in which case Status fails.
			if err == nil && from == begin {
				_, err = p.Status(ctx, time.Second)
			}
			if err == nil {
				err = rest(ctx, leastPause)
			}
			if err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// follow yields pieces until the end, or until yield returns false; more reports that the connection
// broke instead.
func (p *Process) follow(ctx context.Context, stream string, from *int64, yield func([]byte, error) bool) (more bool, err error) {
	body, err := p.client.send(ctx, request{method: http.MethodGet, path: fmt.Sprintf("%s/output?follow=1&stream=%s&from=%d", p.path, url.QueryEscape(stream), *from)})
	var lost *Lost
	if err != nil {
		if errors.As(err, &lost) {
			return true, nil
		}
		return false, err
	}
	defer body.Close()
	for buf := make([]byte, 64<<10); ; {
		n, err := body.Read(buf)
		*from += int64(n)
		if n > 0 && !yield(buf[:n:n], nil) {
			return false, nil
		}
		switch {
		case err == nil:
		case errors.As(err, &lost):
			return true, nil
		case ctx.Err() != nil:
			return false, err
		default:
			return false, nil // io.EOF
		}
	}
}

// Send writes to the stdin of a process of a session that was started with [Call.KeepStdin], and closes it if end is
// set. It returns when the process has read everything except what fits into a pipe. If the process reads nothing for
// as long as the margin, the error is a [*Lost], and part of the data may have been written.
func (p *Process) Send(ctx context.Context, data []byte, end bool) error {
	query := ""
	if end {
		query = "?end=1"
	}
	_, err := p.client.ask(ctx, request{method: http.MethodPost, path: p.path + "/stdin" + query, body: data, kind: octets})
	return err
}

// Signal signals all processes of the command, which must be a process of a session.
func (p *Process) Signal(ctx context.Context, name string) error {
	return p.client.json(ctx, http.MethodPost, p.path+"/signal", 0, map[string]string{"signal": name}, nil)
}

// End ends the command and discards its record.
func (p *Process) End(ctx context.Context) (*Status, error) {
	return answer[Status](ctx, p.client, http.MethodDelete, p.path, 0, nil)
}
