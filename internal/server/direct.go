package server

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// Entry points without HTTP, used by the handlers and package mcp. The context carries the caller (see [As])
// and ends the request.

// As returns the context of a request from a local tenant.
func As(ctx context.Context, tenant, requestID string) context.Context {
	return context.WithValue(ctx, whoKey, Identity{Tenant: tenant, RequestID: requestID, Local: true})
}

// Run executes a call in a session, or in a new sandbox if session is empty. When it returns, all processes
// of the call have exited, unless the error says otherwise.
func (s *Server) Run(ctx context.Context, session string, c *api.Call) (*api.Answer, error) {
	var x *sessions.Session
	var err error
	if session != "" {
		if x, err = s.sessions.Get(IdentityOf(ctx).Tenant, session); err != nil {
			return nil, err
		}
	}
	ex, err := s.check(IdentityOf(ctx), c)
	if err != nil {
		return nil, err
	}
	ex.session = x
	defer func() { ex.buffers.Free() }()
	return s.execute(ctx, ex, newBuffered(ex))
}

// Cell runs a cell in a session's interpreter. When it returns, the cell has ended; processes that it left in
// the background belong to the interpreter.
func (s *Server) Cell(ctx context.Context, session string, c *api.Cell) (*api.CellAnswer, error) {
	ex, language, err := s.checkCell(IdentityOf(ctx), c)
	if err != nil {
		return nil, err
	}
	defer func() { ex.buffers.Free() }()
	return s.cell(ctx, session, ex, language, c)
}

// EndSession ends a session and everything in it.
func (s *Server) EndSession(ctx context.Context, id string) (*api.SessionEnd, error) {
	x, err := s.sessions.Get(IdentityOf(ctx).Tenant, id)
	if err != nil {
		return nil, err
	}
	out := &api.SessionEnd{ID: x.ID, Verdict: result.Unproven, Survivors: []result.Survivor{}}
	if res := s.sessions.End(x, result.Killed); res != nil {
		out.Verdict = res.Verdict
		out.Survivors = append(out.Survivors, res.Survivors...)
	}
	if out.Verdict != result.Proven {
		e := api.NewError(api.Unproven, "processes of the session may still be running", "sbxrun stats lists them, sbxrun cleanup ends them")
		e.Started = true
		return nil, e
	}
	return out, nil
}

// PutFile writes a file of a session's workspace.
func (s *Server) PutFile(ctx context.Context, session, name string, r io.Reader, mode fs.FileMode) (*api.Written, error) {
	dir, both, release, err := s.dirOf(ctx, session)
	if err != nil {
		return nil, err
	}
	defer release()
	left, err := s.entriesLeft(dir)
	if err == nil {
		err = dir.Reserve(name, left)
	}
	if err != nil {
		return nil, err
	}
	if slow, ok := r.(body); ok {
		defer slow.until(both)()
	}
	size, err := dir.Put(name, reading{both, r}, int64(s.settings.Load().Sandbox.TmpSize), mode)
	if err != nil {
		return nil, err
	}
	return &api.Written{Path: name, Size: size}, nil
}

// rawPath returns the bytes of a path that JSON cannot represent, or nil.
func rawPath(name string) []byte {
	if utf8.ValidString(name) {
		return nil
	}
	return []byte(name)
}

// OpenFile opens a file of a session's workspace. Read at most size bytes, because the file may grow. The
// caller closes it and then calls release; the session's end closes it, too.
func (s *Server) OpenFile(ctx context.Context, session, name string) (f *os.File, size int64, until context.Context, release func(), err error) {
	dir, both, free, err := s.dirOf(ctx, session)
	if err != nil {
		return nil, 0, nil, nil, err
	}
	f, st, err := dir.Get(name)
	// Reading a sparse file of 8 EiB, which costs a command nothing, would never end.
	if most := int64(s.settings.Load().Sandbox.TmpSize); err == nil && st.Size() > most {
		f.Close()
		err = tree.TooLarge("%q is a sparse file of %d bytes, more than the workspace's limit of %d", name, st.Size(), most)
	}
	if err != nil {
		free()
		return nil, 0, nil, nil, err
	}
	stop := context.AfterFunc(both, func() { f.Close() })
	return f, st.Size(), both, func() {
		stop()
		free()
	}, nil
}

// OpenStored opens a file of the content store, of any node of a cluster.
func (s *Server) OpenStored(ctx context.Context, id string) (*os.File, int64, error) {
	return s.stored(ctx, IdentityOf(ctx).Tenant, id)
}

// ListFiles lists a session's workspace recursively.
func (s *Server) ListFiles(ctx context.Context, session string) (*workspace.Listing, error) {
	dir, _, release, err := s.treeOf(ctx, session, s.walking)
	if err != nil {
		return nil, err
	}
	defer release()
	const (
		entry, copies = 512, 16 // bytes, and per byte of its path: huma builds the whole text, with six-byte escapes
		piece         = 1 << 20
	)
	size := int64(0)
	out := &workspace.Listing{Files: []workspace.Entry{}}
	err = dir.List(".", s.settings.Load().Sessions.MaxEntries, func(e workspace.Entry) (err error) {
		e.PathBase64 = rawPath(e.Path)
		out.Files = append(out.Files, e)
		if size += entry + copies*int64(len(e.Path)); size > piece {
			err, size = s.Hold(ctx, size), 0
		}
		return err
	})
	if err == nil {
		err = s.Hold(ctx, size)
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Body reads the body of a request as all handlers do: with a memory reservation, limits on bytes and values,
// and a strict parser.
func (s *Middleware) Body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	s.holdBody(w, r)
	text, err := io.ReadAll(http.MaxBytesReader(w, io.NopCloser(body{Request{w, r}}), int64(s.settings.Load().MaxBody)))
	if big := (*http.MaxBytesError)(nil); errors.As(err, &big) {
		return nil, api.NewError(api.TooLarge, "the request is too large", "")
	}
	if err != nil {
		return nil, err
	}
	if err := checkValueCount(text); err != nil {
		return nil, api.NewError(api.TooLarge, err.Error(), "")
	}
	if len(text) > 0 { // empty for a GET
		if err := Strict(text); err != nil {
			return nil, usage("%v", err)
		}
	}
	return text, nil
}
