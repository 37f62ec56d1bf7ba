package server

import (
	"context"
	"log/slog"
	"net/http"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Hold fails after the end of a request, as for an MCP tool whose client has disconnected, because nobody
// would free the memory.
func TestHoldAfterEnd(t *testing.T) {
	door, err := NewMiddleware(config.Default(), nil, slog.New(slog.DiscardHandler))
	check.Must(t, err)
	var ctx context.Context
	h := door.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		ctx = r.Context()
		check.OK(t, door.Hold(ctx, 1000))
	}))
	ask(as("uid-1", h), http.MethodGet, "/x", "")
	check.Require(t, ctx != nil, "the request was refused")
	err = door.Hold(ctx, 1000)
	check.That(t, err != nil && api.AsError(err).Failure.Code == api.Ended, "%v", err)
	check.Equal(t, door.memory.Used("uid-1"), 0)
}
