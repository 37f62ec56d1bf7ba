package server

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/sbxrun/sbxrun/internal/api"
)

// ErrHere reports that a call with this ID has already begun.
var ErrHere = errors.New("the call has already begun")

// Admit admits a call that was queued elsewhere, if it can begin at once. The context identifies the caller
// (see [As]). Calls must not be concurrent.
func (s *Server) Admit(ctx context.Context, id string, body []byte) (*Detached, error) {
	var c api.Call
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, usage("parse call: %v", err)
	}
	ex, err := s.check(IdentityOf(ctx), &c)
	if err != nil {
		return nil, err
	}
	ex.id = id
	if c := s.jobs.Get(ex.caller.Tenant, id); c != nil {
		switch status := c.Status(); {
		case status.State == api.Queued:
			return nil, api.NewError(api.Busy, "the call is about to begin or to be canceled", "")
		case status.Started || status.State != api.Over:
			return nil, ErrHere
		}
		s.jobs.Drop(c) // it was rejected earlier and has been sent again
	}
	ceilings := ex.ceilings.Ceilings()
	ceilings.Queue = 0
	d, err := s.detach(context.Background(), s.jobs, ex, ceilings, func() {})
	if err != nil {
		return nil, err
	}
	if err := s.enter(d.ctx, d.ticket, ex); err != nil {
		err = s.callError(d.ctx, err)
		d.GiveUp()
		return nil, err
	}
	return d, nil
}
