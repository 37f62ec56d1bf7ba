package server

import (
	"context"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
)

// StartProcess starts a command in the background of a session.
func (s *Server) StartProcess(ctx context.Context, session string, c *api.Call) (*api.CallStatus, error) {
	x, err := s.sessions.Get(IdentityOf(ctx).Tenant, session)
	if err != nil {
		return nil, err
	}
	ex, err := s.checkIn(IdentityOf(ctx), x, c)
	if err == nil {
		err = ex.withoutParts()
	}
	if err != nil {
		return nil, err
	}
	base, release, err := x.Use()
	if err != nil {
		return nil, err
	}
	started, err := s.launch(base, x.Processes, ex, release)
	if err != nil {
		return nil, err
	}
	status := brief(started)
	return &status, nil
}

// Processes lists the background processes of a session.
func (s *Server) Processes(ctx context.Context, session string) (*api.Calls, error) {
	x, err := s.sessions.Get(IdentityOf(ctx).Tenant, session)
	if err != nil {
		return nil, err
	}
	all, err := s.listOf(ctx, x.Processes.List(x.Tenant))
	if err != nil {
		return nil, err
	}
	return &all.Body, nil
}

// Process returns a background process of a session.
func (s *Server) Process(ctx context.Context, session, id string) (*calls.Call, error) {
	_, c, err := s.process(ctx, ProcessPath{SessionPath: SessionPath{ID: session}, PID: id})
	return c, err
}
