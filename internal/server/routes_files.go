package server

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"math"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// body reads the body of a request.
type body struct{ q Request }

func (b body) Read(p []byte) (int, error) {
	n, err := b.q.r.Body.Read(p)
	if _, ours := errors.AsType[*api.Error](err); err != nil && err != io.EOF && !ours {
		err = api.NewError(api.Usage, "the request body is incomplete", "")
	}
	return n, err
}

// until interrupts the body when ctx is done.
func (b body) until(ctx context.Context) func() bool { return b.q.w.(*timeoutWriter).in.until(ctx) }

// takes describes a binary request body.
func takes(kind string) *huma.RequestBody {
	return &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{kind: {Schema: &huma.Schema{Type: "string", Format: "binary"}}}}
}

// dirOf opens the workspace of a session and holds the session. The session's end cancels the context and
// waits for release, so whatever depends on a client must end with that context.
func (s *Server) dirOf(ctx context.Context, id string) (*workspace.Dir, context.Context, func(), error) {
	x, both, release, err := s.used(ctx, id)
	if err != nil {
		return nil, nil, nil, err
	}
	dir, err := x.Place.Files()
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	return dir, both, release, nil
}

// eachTenant limits concurrent requests of a tenant on whole trees; more are queued. A tenant determines the
// size of its trees, so without a limit its requests could use all processors.
var eachTenant = tenants.Ceilings{Concurrency: 8, Queue: math.MaxInt} // the middleware limits the number of requests

// wait waits for a ticket.
func wait(ctx context.Context, g *tenants.Scheduler, c tenants.Ceilings) (leave func(), err error) {
	turn, err := g.Join(IdentityOf(ctx).Tenant, c)
	if err != nil {
		return nil, err
	}
	if turn.Wait(ctx) != nil {
		turn.Leave()
		return nil, errEnded
	}
	return turn.Leave, nil
}

// treeOf is dirOf for requests on the whole workspace, after waiting for a ticket of g.
func (s *Server) treeOf(ctx context.Context, id string, g *tenants.Scheduler) (*workspace.Dir, context.Context, func(), error) {
	dir, both, release, err := s.dirOf(ctx, id)
	if err != nil {
		return nil, nil, nil, err
	}
	leave, err := wait(both, g, eachTenant)
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	return dir, both, func() {
		leave()
		release()
	}, nil
}

// reading reads until the context ends. Otherwise a client that sends a byte now and then would delay the end
// of a session. Idle and slow clients are interrupted by [side.until].
type reading struct {
	ctx context.Context
	r   io.Reader
}

func (r reading) Read(b []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, errEnded
	}
	n, err := r.r.Read(b)
	if err != nil && err != io.EOF && r.ctx.Err() != nil {
		err = errEnded
	}
	return n, err
}

var errEnded = &result.Error{Code: string(api.Ended), Message: "the session has ended"}

// entriesLeft returns how many entries may still be added to a workspace.
func (s *Server) entriesLeft(dir *workspace.Dir) (int, error) {
	n, err := dir.Entries()
	return max(0, s.settings.Load().Sessions.MaxEntries-n), err // commands may have created more
}

func (s *Server) defineWorkspace(a huma.API) {
	const base = "/v1/sessions/{id}/files"
	none := []api.Code{api.NoSuchSession, api.Ended, api.NoSuchFile}
	type FilePath struct {
		Request
		SessionPath
		Path string `path:"path" maxLength:"1024" doc:"Path in the workspace; may contain slashes"`
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "putFile", Method: http.MethodPut, Path: base + "/{path...}", Summary: "Write a file to the workspace", RequestBody: takes("application/octet-stream"),
		Description: "Creates missing directories and does not follow links. An existing file is replaced after the whole body has arrived, and keeps its permissions and hard links.", DefaultStatus: http.StatusCreated,
	}, append(none, api.TooLarge, api.QuotaDisk)...), func(ctx context.Context, q *struct {
		FilePath
		Mode string `query:"mode" pattern:"^0?[0-7]{3}$" doc:"Octal permissions; default: 644"`
	}) (*answer[*api.Written], error) {
		mode := uint64(0o644)
		if q.Mode != "" {
			mode, _ = strconv.ParseUint(q.Mode, 8, 32) // checked against the pattern
		}
		return with(s.PutFile(ctx, q.ID, q.Path, body{q.Request}, fs.FileMode(mode)))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "getFile", Method: http.MethodGet, Path: base + "/{path...}", Summary: "Read a file from the workspace", Responses: octets("The file"),
	}, append(none, api.TooLarge)...), func(ctx context.Context, q *FilePath) (*streamed, error) {
		return q.writes(func() error {
			f, size, both, release, err := s.OpenFile(ctx, q.ID, q.Path)
			if err != nil {
				return err
			}
			defer release()
			defer f.Close()
			defer q.w.(*timeoutWriter).out.until(both)()
			send(q.w, f, size)
			return nil
		})
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteFile", Method: http.MethodDelete, Path: base + "/{path...}", Summary: "Remove a file or empty directory from the workspace", DefaultStatus: http.StatusNoContent,
	}, none...), func(ctx context.Context, q *FilePath) (*struct{}, error) {
		dir, _, release, err := s.dirOf(ctx, q.ID)
		if err != nil {
			return nil, err
		}
		defer release()
		return nil, dir.Remove(q.Path)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listFiles", Method: http.MethodGet, Path: base, Summary: "List the workspace recursively",
	}, append(none, api.TooLarge, api.Policy, api.Quota, api.Busy)...), func(ctx context.Context, q *struct{ SessionPath }) (*answer[*workspace.Listing], error) {
		return with(s.ListFiles(ctx, q.ID))
	})

	const archive = "/v1/sessions/{id}/archive"
	type whole struct {
		Request
		SessionPath
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "putArchive", Method: http.MethodPut, Path: archive, Summary: "Unpack a tar archive into the workspace", RequestBody: takes("application/x-tar"), DefaultStatus: http.StatusNoContent,
		Description: "Accepts only files and directories. Links, devices, names outside the workspace, and too many entries or bytes are errors; earlier entries remain.",
	}, append(none, api.TooLarge, api.QuotaDisk)...), func(ctx context.Context, q *whole) (*struct{}, error) {
		dir, both, release, err := s.treeOf(ctx, q.ID, s.archives)
		if err != nil {
			return nil, err
		}
		defer release()
		left, err := s.entriesLeft(dir)
		if err == nil && left == 0 {
			err = workspace.ErrFull
		}
		if err != nil {
			return nil, err
		}
		in := body{q.Request}
		defer in.until(both)()
		return nil, dir.Unpack(reading{both, in}, workspace.Quota{Bytes: int64(s.settings.Load().Sandbox.TmpSize), Entries: left})
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "getArchive", Method: http.MethodGet, Path: archive, Summary: "Get the workspace as a tar archive",
		Description: "Contains only files and directories. An incomplete archive has no end-of-archive marker.",
		Responses:   map[string]*huma.Response{"200": {Description: "The archive", Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: "string", Format: "binary"}}}}},
	}, append(none, api.TooLarge)...), func(ctx context.Context, q *whole) (*streamed, error) {
		return q.writes(func() error {
			dir, both, release, err := s.treeOf(ctx, q.ID, s.archives)
			if err != nil {
				return err
			}
			defer release()
			set, size := s.settings.Load(), int64(0)
			const names = 2 // hard links per file
			most := workspace.Quota{Bytes: names * int64(set.Sandbox.TmpSize), Entries: set.Sessions.MaxEntries}
			err = dir.List(".", most.Entries, func(e workspace.Entry) error { // check first, while an error can still be sent
				if e.Size > most.Bytes-size {
					return tree.TooLarge("the files have more than %d bytes in total, counting holes and every hard link", most.Bytes)
				}
				size += e.Size
				return nil
			})
			if err != nil {
				return err
			}
			q.w.Header().Set("Content-Type", "application/x-tar")
			defer q.w.(*timeoutWriter).out.until(both)()
			if err := dir.Pack(q.w, ".", most); err != nil {
				panic(http.ErrAbortHandler) // a truncated archive must not look complete
			}
			return nil
		})
	})
}

// send sends a file. It sends at most size bytes, because the file may grow.
func send(w http.ResponseWriter, r io.Reader, size int64) {
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	w.WriteHeader(http.StatusOK)
	_, _ = io.CopyN(w, r, size) // the client notices a short body
}

func (s *Server) defineFiles(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "storeFile", Method: http.MethodPost, Path: "/v1/files", Summary: "Store a file in the content store", RequestBody: takes("application/octet-stream"), DefaultStatus: http.StatusCreated,
	}, api.TooLarge, api.QuotaDisk), func(ctx context.Context, q *struct{ Request }) (*answer[api.Stored], error) {
		tenant := IdentityOf(ctx).Tenant
		quota := int64(s.settings.Load().Of(tenant).Files)
		id, size, err := s.files.Put(tenant, body{q.Request}, quota, quota)
		return with(api.Stored{ID: id, Size: size}, err)
	})
	register(a, s.operation(a, huma.Operation{
		OperationID: "getStoredFile", Method: http.MethodGet, Path: "/v1/files/{id}", Summary: "Read a file from the content store", Responses: octets("The file"),
	}, api.NoSuchFile), func(ctx context.Context, q *struct {
		Request
		ID string `path:"id" maxLength:"128" doc:"sha256:…"`
	}) (*streamed, error) {
		return q.writes(func() error {
			f, size, err := s.files.Get(IdentityOf(ctx).Tenant, q.ID) // only here: gateways ask every node
			if err != nil {
				return err
			}
			defer f.Close()
			send(q.w, f, size)
			return nil
		})
	})
	register(a, s.operation(a, huma.Operation{
		OperationID: "listStoredFiles", Method: http.MethodGet, Path: "/v1/files", Summary: "List the content store, least recently used first",
	}, api.TooLarge, api.Policy, api.Quota, api.Busy), func(ctx context.Context, _ *struct{}) (*answer[api.StoredFiles], error) {
		leave, err := wait(ctx, s.walking, eachTenant)
		if err != nil {
			return nil, err
		}
		defer leave()
		const each = 512
		held := int64(api.MaxListed) // a short list needs no reservation, as in holdLong
		size := int64(0)
		list, err := s.files.List(IdentityOf(ctx).Tenant, func(n int) error {
			if size += each * int64(n); size <= held {
				return nil
			}
			more := size - held
			held = size
			return s.Hold(ctx, escaped*more)
		})
		if err != nil {
			return nil, err
		}
		out := api.StoredFiles{Files: []api.Stored{}}
		for _, f := range list {
			expires := f.Used.Add(s.files.TTL()).UTC()
			out.Files = append(out.Files, api.Stored{ID: f.ID, Size: f.Size, Expires: &expires})
		}
		return with(out, nil)
	})
	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteStoredFile", Method: http.MethodDelete, Path: "/v1/files/{id}", Summary: "Remove a file from the content store", DefaultStatus: http.StatusNoContent,
	}, api.NoSuchFile), func(ctx context.Context, q *struct {
		ID string `path:"id" maxLength:"128" doc:"sha256:…"`
	}) (*struct{}, error) {
		return nil, s.files.Remove(IdentityOf(ctx).Tenant, q.ID)
	})
}
