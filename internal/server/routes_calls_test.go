package server

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/config"
)

// Output that is followed does not end as if it were complete when the server ends.
func TestFollowedUntilStop(t *testing.T) {
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	s, err := New(c, nil, nowhere{}, slog.New(slog.DiscardHandler), "test")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Drain(t.Context())
	_, call, err := s.book.Add(t.Context(), "one", "uid-1", 100, calls.Share{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	stdout, _ := call.Writers()
	_, _ = stdout.Write([]byte("part")) // it never fails
	h := s.Handler(http.NotFoundHandler())
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey, "uid-1")))
	}))
	defer web.Close()
	r, err := http.Get(web.URL + "/v1/calls/one/output?follow=1")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if _, err := io.ReadFull(r.Body, make([]byte, len("part"))); err != nil {
		t.Fatal(err)
	}
	s.end(errDraining)
	if rest, err := io.ReadAll(r.Body); len(rest) > 0 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", rest, err)
	}
	call.End(nil, 0, draining())
}
