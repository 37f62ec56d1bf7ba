package server

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Hold fails after the end of a request, as for an MCP tool whose client has disconnected, because nobody
// would free the memory.
func TestHoldAfterEnd(t *testing.T) {
	door, err := NewMiddleware(config.Default(), nil, slog.New(slog.DiscardHandler))
	harness.Must(t, err)
	var ctx context.Context
	h := door.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		ctx = r.Context()
		if err := door.Hold(ctx, 1000); err != nil {
			t.Error(err)
		}
	}))
	r := httptest.NewRequest(http.MethodGet, "http://sbxrun/x", nil)
	h.ServeHTTP(httptest.NewRecorder(), r.WithContext(context.WithValue(r.Context(), peerKey, "uid-1")))
	if ctx == nil {
		t.Fatal("the request was refused")
	}
	if err := door.Hold(ctx, 1000); err == nil || api.AsError(err).Failure.Code != api.Ended {
		t.Errorf("%v", err)
	}
	if used := door.memory.Used("uid-1"); used != 0 {
		t.Errorf("%d bytes are taken", used)
	}
}
