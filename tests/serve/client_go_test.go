package serve

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	sbxrun "github.com/sbxrun/sbxrun/clients/go"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestGoClient(t *testing.T) {
	t.Parallel()
	ca := harness.Certificates(t)
	d := &goDriver{roots: roots(t, ca)}
	conform(t, ca, func(line []byte) ([]byte, error) {
		var s goStep
		if err := json.Unmarshal(line, &s); err != nil {
			return nil, err
		}
		got, err := d.do(t.Context(), &s)
		if err != nil {
			got = failed(err)
		}
		return json.Marshal(got)
	})
}

// goStep is a step of the table.
type goStep struct {
	Op, Session, Process, How, Address, Token, Path, Text, Mode, File, Signal, Key, Name, Node string

	MarginMS, PatienceMS float64
	Size                 int
	End                  bool
	Call, Options        struct {
		sbxrun.Call
		Timeout, Grace, IdleTimeout, Lifetime float64
		Files                                 map[string]any `json:"files"`
		Stream                                string
		From                                  int64
	}
}

// UnmarshalJSON accepts names with underscores, and times without a unit in their names.
func (s *goStep) UnmarshalJSON(b []byte) error {
	var members map[string]any
	if err := json.Unmarshal(b, &members); err != nil {
		return err
	}
	rename(members)
	b, err := json.Marshal(members)
	if err != nil {
		return err
	}
	type plain goStep
	return json.Unmarshal(b, (*plain)(s))
}

func rename(members map[string]any) {
	for from, to := range map[string]string{"margin_ms": "MarginMS", "patience_ms": "PatienceMS", "timeout_ms": "Timeout", "grace_ms": "Grace", "idle_timeout_ms": "IdleTimeout", "lifetime_ms": "Lifetime"} {
		if v, ok := members[from]; ok {
			members[to] = v
		}
	}
	for _, name := range []string{"call", "options"} {
		if inner, ok := members[name].(map[string]any); ok {
			rename(inner)
		}
	}
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func given(files map[string]any) (all []sbxrun.File) {
	for path, content := range files {
		f := sbxrun.File{Path: path}
		switch content := content.(type) {
		case string:
			f.Data = []byte(content)
		case map[string]any:
			f.ID = fmt.Sprint(content["id"])
		}
		all = append(all, f)
	}
	return all
}

func (s *goStep) call() sbxrun.Call {
	c := s.Call.Call
	c.Timeout, c.Grace, c.Files = milliseconds(s.Call.Timeout), milliseconds(s.Call.Grace), given(s.Call.Files)
	c.Key = s.Key
	return c
}

type goDriver struct {
	client *sbxrun.Client
	roots  *x509.CertPool
}

type object = map[string]any

func failed(err error) object {
	var refused *sbxrun.Refused
	var unproven *sbxrun.Unproven
	var lost *sbxrun.Lost
	switch {
	case errors.As(err, &refused):
		return object{"error": "refused", "code": refused.Code, "status": refused.Status}
	case errors.As(err, &unproven):
		verdict := ""
		if unproven.Report != nil {
			verdict = unproven.Report.Teardown.Verdict
		}
		return object{"error": "unproven", "code": unproven.Code, "verdict": verdict}
	case errors.As(err, &lost):
		return object{"error": "lost"}
	case errors.Is(err, errLeft):
		return object{"error": "left"}
	}
	return object{"error": "wrong", "message": err.Error()}
}

var errLeft = errors.New("left")

// stepError is the panic of must, which [goDriver.do] recovers.
type stepError struct{ error }

func must[V any](v V, err error) V {
	if err != nil {
		panic(stepError{err})
	}
	return v
}

func (d *goDriver) do(ctx context.Context, s *goStep) (answer object, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case stepError:
			err = r.error
		default:
			panic(r)
		}
	}()
	var session *sbxrun.Session
	var process *sbxrun.Process
	var at interface { // a client or a session
		Run(context.Context, sbxrun.Call) (*sbxrun.Report, error)
		Stream(context.Context, sbxrun.Call) iter.Seq2[sbxrun.Event, error]
		Start(context.Context, sbxrun.Call) (*sbxrun.Process, error)
	} = d.client
	if s.Session != "" {
		session = d.client.Session(s.Session)
		process, at = session.Process(s.Process), session
	} else if s.Process != "" {
		process = d.client.Process(s.Process)
	}
	switch s.Op {
	case "new":
		c := must(sbxrun.New(s.Address))
		c.Token, c.Node, c.TLS.RootCAs = s.Token, s.Node, d.roots
		if s.MarginMS > 0 {
			c.Margin = milliseconds(s.MarginMS)
		}
		if s.PatienceMS > 0 {
			c.Patience = milliseconds(s.PatienceMS)
		}
		d.client = c
		return object{}, nil
	case "run":
		r := must(at.Run(ctx, s.call()))
		return object{"id": r.ID, "cause": r.Cause, "exit_code": r.ExitCode, "timed_out": r.TimedOut, "verdict": r.Teardown.Verdict, "stdout": r.Stdout, "stderr": r.Stderr,
			"hex": hex.EncodeToString([]byte(r.Stdout)), "files": r.Files}, nil
	case "stream":
		seen, code := map[string][]byte{}, 0
		var failure object
		for e, err := range at.Stream(ctx, s.call()) {
			if err != nil {
				failure = failed(err)
				continue
			}
			if e.Report != nil {
				code = e.Report.ExitCode
			}
			seen[e.Name] = append(seen[e.Name], e.Data...)
		}
		got := object{"stdout": hex.EncodeToString(seen["stdout"]), "stderr": hex.EncodeToString(seen["stderr"]), "exit_code": code}
		maps.Copy(got, failure)
		return got, nil
	case "cell":
		a := must(session.Cell(ctx, s.cell()))
		got := object{"cause": a.Cause, "state": a.State, "stdout": a.Stdout}
		if len(a.Results) > 0 {
			got["value"] = a.Results[len(a.Results)-1].Media[0].Text
		}
		if a.Exception != nil {
			got["exception"] = a.Exception.Name
		}
		return got, nil
	case "leave":
		return object{}, d.leave(ctx, session, s)
	case "session":
		o := s.Options
		options := sbxrun.SessionOptions{IdleTimeout: milliseconds(o.IdleTimeout), Lifetime: milliseconds(o.Lifetime), Files: given(o.Files), Parts: o.Parts}
		return object{"id": must(d.client.NewSession(ctx, options)).ID}, nil
	case "start":
		return object{"id": must(at.Start(ctx, s.call())).ID}, nil
	case "status":
		return object{"state": must(process.Status(ctx, 0)).State}, nil
	case "wait":
		r := must(process.Wait(ctx))
		return object{"cause": r.Cause, "exit_code": r.ExitCode}, nil
	case "output":
		if s.Options.Stream == "" {
			s.Options.Stream = "stdout"
		}
		text := ""
		for piece, err := range process.Output(ctx, s.Options.Stream, s.Options.From) {
			text += string(must(piece, err))
		}
		return object{"text": text}, nil
	case "send":
		return object{}, process.Send(ctx, []byte(s.Text), s.End)
	case "diff":
		return object{"changes": each(must(session.Diff(ctx)).Changes, func(c sbxrun.Change) string { return c.Change + " " + c.Path })}, nil
	case "snapshot":
		return object{"id": must(session.Snapshot(ctx, s.Name, 0)).ID}, nil
	case "snapshots":
		return object{"ids": each(must(d.client.Snapshots(ctx)), func(x sbxrun.Snapshot) string { return x.ID })}, nil
	case "remove-snapshot":
		return object{}, d.client.RemoveSnapshot(ctx, s.Name)
	case "signal":
		return object{}, process.Signal(ctx, s.Signal)
	case "end":
		if s.Process == "" {
			return object{}, session.End(ctx)
		}
		x := must(process.End(ctx))
		if x.Report == nil {
			return object{}, nil
		}
		return object{"cause": x.Report.Cause}, nil
	case "write":
		return object{}, session.Write(ctx, s.Path, []byte(s.Text), s.Mode)
	case "read":
		return object{"text": string(must(session.Read(ctx, s.Path)))}, nil
	case "remove":
		return object{}, session.Remove(ctx, s.Path)
	case "list":
		lines := each(must(session.List(ctx)), func(e sbxrun.Entry) string { return e.Type + " " + e.Path })
		slices.Sort(lines)
		return object{"entries": lines}, nil
	case "copy":
		b := must(session.Pack(ctx))
		other := must(d.client.NewSession(ctx, sbxrun.SessionOptions{}))
		return object{"id": other.ID}, other.Unpack(ctx, b)
	case "store":
		data := []byte(s.Text)
		if s.Size > 0 {
			data = make([]byte, s.Size)
		}
		return object{"id": must(d.client.Store(ctx, data))}, nil
	case "pour":
		return d.pour(ctx, session, int64(s.Size))
	case "pour-badly":
		err := session.WriteStream(ctx, "bad", io.MultiReader(strings.NewReader("some"), iotest.ErrReader(errBad)), "")
		if errors.Is(err, errBad) {
			err = errBad
		}
		return nil, err
	case "fetch":
		return object{"text": string(must(d.client.Fetch(ctx, s.File)))}, nil
	case "languages":
		all := slices.DeleteFunc(must(d.client.Languages(ctx)), func(l sbxrun.Language) bool { return !l.Cells })
		names := each(all, func(l sbxrun.Language) string { return l.Name })
		slices.Sort(names)
		return object{"cells": names}, nil
	case "images":
		return object{"images": len(must(d.client.Images(ctx)))}, nil
	case "sessions":
		return object{"ids": each(must(d.client.Sessions(ctx)), func(x sbxrun.SessionStatus) string { return x.ID })}, nil
	}
	return nil, fmt.Errorf("no operation %q", s.Op)
}

// each returns a text for each element, and an empty list for none.
func each[T any](all []T, text func(T) string) []string {
	texts := []string{}
	for _, x := range all {
		texts = append(texts, text(x))
	}
	return texts
}

var errBad = errors.New("bad")

// pour streams a file into the workspace, as an archive into another one, and through the content store.
func (d *goDriver) pour(ctx context.Context, session *sbxrun.Session, size int64) (object, error) {
	if err := session.WriteStream(ctx, "big", io.LimitReader(zeros{}, size), ""); err != nil {
		return nil, err
	}
	archive := must(session.PackStream(ctx))
	defer archive.Close()
	other := must(d.client.NewSession(ctx, sbxrun.SessionOptions{}))
	if err := other.UnpackStream(ctx, archive); err != nil {
		return nil, err
	}
	file := must(other.ReadStream(ctx, "big"))
	defer file.Close()
	id := must(d.client.StoreStream(ctx, file))
	if err := other.End(ctx); err != nil {
		return nil, err
	}
	stored := must(d.client.FetchStream(ctx, id))
	defer stored.Close()
	return object{"size": must(io.Copy(io.Discard, stored)), "whole": false}, nil // a reader has no pieces
}

func (s *goStep) cell() sbxrun.Cell {
	c := s.call()
	return sbxrun.Cell{Language: c.Language, Code: c.Code, Timeout: c.Timeout, Files: c.Files, Key: c.Key}
}

// leave starts a call, and cancels it when it runs.
func (d *goDriver) leave(ctx context.Context, session *sbxrun.Session, s *goStep) error {
	if s.How == "stream" {
		for e, err := range session.Stream(ctx, s.call()) {
			if err != nil || e.Name == "stdout" {
				return err
			}
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for ctx.Err() == nil {
			if _, err := session.Read(ctx, "up"); err == nil {
				cancel(errLeft)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	var err error
	if s.How == "cell" {
		_, err = session.Cell(ctx, s.cell())
	} else {
		_, err = session.Run(ctx, s.call())
	}
	cancel(nil)
	return err
}
