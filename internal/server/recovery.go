package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"sync/atomic"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/stream"
)

// A mistake of ours ends the request that has met it, and nothing else: what runs for others goes
// on. What was taken for the request is given back by defer, as after any error.
//
// All that reads what a command has made up (its output, the answers of a cell, files, archives) runs
// in the goroutine of a request, or writes to a sinkWriter. What the engine does in goroutines of its
// own, such as to build rooms and to wait for ends, is not guarded: after a mistake there nobody
// could say any more what is proven. It ends the server, and that is safe: keepers end all that runs,
// and the next server begins with nothing.

// Guard carries out what a request asks for. A panic is an error: whether anything has begun is
// not known then. [http.ErrAbortHandler] is returned: it is no mistake.
func (s *Middleware) Recover(ctx context.Context, do func() error) (err error) {
	defer func() {
		switch mistake := recover(); mistake {
		case nil:
		case http.ErrAbortHandler:
			err = http.ErrAbortHandler
		default:
			err = s.panicked(IdentityOf(ctx).RequestID, mistake)
		}
	}()
	return do()
}

// mistake logs a panic, and is the error of its request.
func (s *Middleware) panicked(id string, mistake any) *api.Error {
	s.log.Error("panic", "request", id, "panic", fmt.Sprint(mistake), "stack", string(debug.Stack()))
	e := api.NewError(api.Internal, "a mistake of the server has ended request "+id, "its log says more")
	e.Started = true
	return e
}

// spawn does something in the background that no request waits for.
func (s *Server) spawn(do func()) {
	go func() {
		_ = s.Recover(s.base, func() error { // logged
			do()
			return nil
		})
	}()
}

// guarded is [Server.Guard] for handlers. What has begun to be sent is broken off, which tells a
// client as much.
func (s *Middleware) recovered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := s.Recover(r.Context(), func() error {
			next.ServeHTTP(w, r)
			return nil
		})
		switch {
		case err == nil:
		case errors.Is(err, http.ErrAbortHandler) || w.(*timeoutWriter).begun.Load():
			panic(http.ErrAbortHandler)
		default:
			api.AsError(err).Write(w)
		}
	})
}

// sinkWriter is one of a sink's, which goroutines of the engine write to.
type sinkWriter struct {
	io.Writer
	s      *Server
	ex     *execution
	cancel context.CancelFunc // of the call
	failed *atomic.Pointer[api.Error]
}

func (w sinkWriter) Write(b []byte) (n int, err error) {
	defer func() {
		if mistake := recover(); mistake != nil {
			e := w.s.panicked(w.ex.caller.RequestID, mistake)
			w.failed.Store(e)
			w.cancel()
			n, err = 0, e
		}
	}()
	return w.Writer.Write(b)
}

// writersOf are those of a sink; a mistake in one ends the call, and is in failed then.
func (s *Server) writersOf(out sink, ex *execution, cancel context.CancelFunc) (stdout, stderr io.Writer, failed *atomic.Pointer[api.Error]) {
	failed = &atomic.Pointer[api.Error]{}
	stdout, stderr = out.Writers()
	for _, w := range []*io.Writer{&stdout, &stderr} {
		if _, memory := (*w).(*stream.Buffer); !memory { // which the engine knows
			*w = sinkWriter{*w, s, ex, cancel, failed}
		}
	}
	return stdout, stderr, failed
}
