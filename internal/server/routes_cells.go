package server

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/cells"
)

// cell executes a checked cell. The caller frees its buffers.
func (s *Server) cell(ctx context.Context, session string, ex *execution, language cells.Language, c *api.Cell) (a *api.CellAnswer, err error) {
	x, either, release, err := s.used(ctx, session)
	if err != nil {
		return nil, err
	}
	defer release()
	defer func() { s.count(ex, nil, err) }()
	if err := ex.checkImage(x); err != nil {
		return nil, err
	}
	ex.buffer(cells.MaxResults)
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	ctx, cancel := s.Until(ctx)
	defer cancel()
	either, cancel = s.Until(either)
	defer cancel()
	i, free, err := x.Interpreter(c.Language, cells.Spec{Language: language, Limits: ex.limits})
	if err != nil {
		return nil, err
	}
	defer free()
	turn, err := s.join(ctx, ex.caller.Tenant, ex.ceilings.Ceilings())
	if err != nil {
		return nil, err
	}
	defer func() { s.release(turn.Leave, ex.left...) }()
	if err := s.enter(either, turn, ex); err != nil {
		return nil, s.callError(either, err)
	}
	defer ex.admitted.End()
	if err := s.writeFiles(either, x.Place, ex); err != nil {
		return nil, s.callError(either, err)
	}
	began := time.Now()
	// No context of the session: its end closes the interpreter, whereas a canceled context would send SIGINT
	// first.
	answer, err := i.Run(ctx, cells.Cell{
		Code: c.Code, Timeout: ex.timeout, MaxOutput: ex.maxAnswer, Begun: ex.admitted.Running,
	})
	if answer == nil {
		return nil, s.startError(either, x, explain(ex.admitted, err))
	}
	ex.keep(answer.Ended)
	a = s.cellAnswer(either, ex, language, answer)
	a.StartedAt, a.QueueMS = began.UTC().Format(result.TimeFormat), result.Milliseconds(ex.queued)
	if either.Err() == nil {
		a.Files, a.Unmatched = s.collect(either, x.Place, ex)
	}
	ex.buffers.Shrink(cellSize(a))
	s.metrics.cell(ex.caller.Tenant, a)
	s.recentCell(ex, a)
	s.log.Info("cell", "request", ex.caller.RequestID, "tenant", ex.caller.Tenant, "session", x.ID, "id", a.ID, "language", c.Language, "cause", a.Cause,
		"state", a.State, "number", a.Number, "queue_ms", a.QueueMS, "duration_ms", a.Duration)
	if a.Interpreter == nil {
		return a, nil
	}
	if err := proven(&api.Answer{Report: *a.Interpreter, Room: string(x.Place.Kind()), RequestID: a.RequestID}); err != nil {
		s.lost(x)
		return nil, err
	}
	return a, nil
}

// cellSize estimates the memory of an answer.
func cellSize(a *api.CellAnswer) int64 {
	size := answerSize(&api.Answer{Report: result.Report{Stdout: a.Stdout, StdoutBase64: a.StdoutBase64, Stderr: a.Stderr, StderrBase64: a.StderrBase64}})
	for _, shown := range a.Results {
		for _, m := range shown.Media {
			const rest = 256
			if size += rest; m.Text != nil {
				size += int64(len(*m.Text))
			}
		}
	}
	if a.Exception != nil {
		size += int64(len(a.Exception.Name) + len(a.Exception.Message) + len(a.Exception.Traceback))
	}
	return size + filesSize(a.Files)
}

// checkCell validates a cell and resolves its limits.
func (s *Server) checkCell(w Identity, c *api.Cell) (*execution, cells.Language, error) {
	set := s.settings.Load()
	ex := &execution{id: s.newID(), caller: w, ceilings: set.Of(w.Tenant), shown: set.shown(nil, c.Code)}
	c.Language = cmp.Or(c.Language, defaultLanguage)
	language, err := set.language(c.Language)
	if err != nil {
		return nil, language, err
	}
	if len(language.Kept) == 0 {
		return nil, language, api.NewError(api.Usage, fmt.Sprintf("language %q does not support cells", c.Language), `GET /v1/languages lists those with "cells": true`)
	}
	ex.language = language
	return ex, language, ex.settle(set, &api.Call{TimeoutMS: c.TimeoutMS, Limits: api.Limits{MaxOutput: c.Limits.MaxOutput}, Files: c.Files, Collect: c.Collect})
}

func (s *Server) cellAnswer(ctx context.Context, ex *execution, language cells.Language, in *cells.Answer) *api.CellAnswer {
	a := &api.CellAnswer{
		ID: ex.id, Cause: in.Cause, State: string(in.State), Number: in.Number, TimedOut: in.Cause == result.Timeout, Duration: result.Milliseconds(in.Duration),
		Results: []api.CellResult{}, ResultsTruncated: in.Truncated, Exception: (*api.Exception)(in.Error), DroppedBytes: in.Dropped,
		TimeoutMS: result.Milliseconds(ex.timeout), Clamped: ex.clamped, RequestID: ex.caller.RequestID,
	}
	var r result.Report
	setOutput(&r, in.Stdout, in.Stderr)
	a.Stdout, a.StdoutBase64, a.StdoutBytes, a.StdoutTruncated = r.Stdout, r.StdoutBase64, r.StdoutBytes, r.StdoutTruncated
	a.Stderr, a.StderrBase64, a.StderrBytes, a.StderrTruncated = r.Stderr, r.StderrBase64, r.StderrBytes, r.StderrTruncated
	for _, one := range in.Results {
		shown := api.CellResult{Kind: one.Kind, Truncated: one.Truncated, Media: []api.Medium{}}
		for _, m := range one.Media {
			shown.Media = append(shown.Media, s.medium(ctx, ex, m))
		}
		a.Results = append(a.Results, shown)
	}
	for _, end := range []struct {
		of *result.Result
		to **result.Report
	}{{in.Ended, &a.Interpreter}, {in.Earlier, &a.Earlier}} {
		if end.of != nil {
			report := end.of.Report(ex.id, language.Kept)
			*end.to = &report
		}
	}
	return a
}

// medium returns one form of a result. Binary data and unreadable text go into the content store.
func (s *Server) medium(ctx context.Context, ex *execution, in cells.Medium) api.Medium {
	if in.Base64 == nil && readable(in.Text) {
		return api.Medium{MediaType: in.Type, Text: &in.Text, Size: int64(len(in.Text))}
	}
	held := in.Base64
	if held == nil {
		held = []byte(in.Text)
	}
	m := api.Medium{MediaType: in.Type, Size: int64(len(held))}
	if ctx.Err() != nil { // a cell can send thousands of results, and each is synced to the disk
		m.Error = errEnded.Message
		return m
	}
	quota := int64(ex.ceilings.Files)
	id, _, err := s.files.Put(ex.caller.Tenant, bytes.NewReader(held), quota, quota)
	if err != nil {
		m.Error = api.AsError(err).Error()
	}
	m.ID = id
	return m
}

func (s *Server) defineCells(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "code", Method: http.MethodPost, Path: "/v1/sessions/{id}/code", Summary: "Run a cell in a session's interpreter",
		Description: "Only one cell runs at a time for each language. Whatever the outcome of a cell, the next one works.",
		Responses: map[string]*huma.Response{"200": content(a, "The answer of the cell, whatever its outcome.", map[string]reflect.Type{
			"application/json": reflect.TypeFor[api.CellAnswer](),
		})},
	}, append(startCodes, api.Idempotency, api.NoSuchSession, api.Ended, api.BusySession)...), func(ctx context.Context, q *struct {
		Request
		SessionPath
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"As for run"`
		RawBody []byte
		Body    api.Cell
	}) (*streamed, error) {
		ex, language, err := s.checkCell(IdentityOf(ctx), &q.Body)
		if err != nil {
			return nil, err
		}
		return q.writes(func() error {
			defer func() { ex.buffers.Free() }()
			return s.respond(q.Request, q.Key, q.RawBody, ex, func(ctx context.Context) (func(http.ResponseWriter), bool, error) {
				var a *api.CellAnswer
				err := s.Recover(ctx, func() (err error) {
					a, err = s.cell(ctx, q.ID, ex, language, &q.Body)
					return err
				})
				return func(w http.ResponseWriter) { writeCell(w, a) }, a != nil, err
			})
		})
	})
}
