package server

import (
	"context"
	"net/http"
	"testing"

	"github.com/sbxrun/sbxrun/internal/place"
)

// seen has no place, and tells what it was asked for.
type seen struct {
	nowhere
	policies chan place.Policy
}

func (s seen) Take(ctx context.Context, tenant string, p place.Policy) (place.Place, error) {
	s.policies <- p
	return s.nowhere.Take(ctx, tenant, p)
}

// A source knows a command's limits before it has a place for it: with files in one it is too late for another.
func TestLimitsOfPlace(t *testing.T) {
	source := seen{policies: make(chan place.Policy, 1)}
	h := handler(t, func(s *Server) { s.source = source })
	ask(h, http.MethodPost, "/v1/run", `{"argv":["true"],"limits":{"memory":1000000000}}`)
	if p := <-source.policies; p.Commands.Memory != 1_000_000_000 {
		t.Errorf("%+v", p)
	}
}
