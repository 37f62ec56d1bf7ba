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

// A panic in a handler ends its request and nothing else. Deferred calls release its resources, as after an
// error.
//
// Code that processes data from a command (output, cell answers, files, archives) runs in the goroutine of a request
// or writes to a sinkWriter, so it is covered. The engine's own goroutines, such as those that build sandboxes and
// wait for exits, are not: after a panic there, nothing can be proven. It ends the server. That is safe, because the
// shims end everything that runs and the next server starts from nothing.

// Recover calls do and converts a panic to an error. Whether anything has started is unknown then.
// [http.ErrAbortHandler] is returned as it is.
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

// panicked logs a panic and returns the error for its request.
func (s *Middleware) panicked(id string, mistake any) *api.Error {
	s.log.Error("panic", "request", id, "panic", fmt.Sprint(mistake), "stack", string(debug.Stack()))
	e := api.NewError(api.Internal, "internal error in request "+id, "see the server's log")
	e.Started = true
	return e
}

// spawn runs do in the background and recovers from panics.
func (s *Server) spawn(do func()) {
	go func() {
		_ = s.Recover(s.base, func() error { // Recover has logged it
			do()
			return nil
		})
	}()
}

// recovered is [Middleware.Recover] for handlers. A response that has already begun is aborted.
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

// sinkWriter is a writer of a sink that the engine's goroutines use.
type sinkWriter struct {
	io.Writer
	s      *Server
	ex     *execution
	cancel context.CancelFunc
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

// writersOf returns the writers of a sink. A panic in one cancels the call and is stored in failed.
func (s *Server) writersOf(out sink, ex *execution, cancel context.CancelFunc) (stdout, stderr io.Writer, failed *atomic.Pointer[api.Error]) {
	failed = &atomic.Pointer[api.Error]{}
	stdout, stderr = out.Writers()
	for _, w := range []*io.Writer{&stdout, &stderr} {
		if _, memory := (*w).(*stream.Buffer); !memory { // the engine recognizes this type
			*w = sinkWriter{*w, s, ex, cancel, failed}
		}
	}
	return stdout, stderr, failed
}
