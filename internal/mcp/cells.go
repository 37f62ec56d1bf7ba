package mcp

import (
	"context"
	"fmt"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
)

type runCell struct {
	inSession
	Code      string   `json:"code"`
	Language  string   `json:"language,omitempty"`
	TimeoutMS float64  `json:"timeout_ms,omitempty" jsonschema:"milliseconds until it is interrupted; the interpreter is killed a second later"`
	Files     []file   `json:"files,omitempty" jsonschema:"files to create first"`
	Collect   []string `json:"collect,omitempty" jsonschema:"patterns of files to return; images by default"`
}

// cell runs a cell.
func (f *Server) cell(ctx context.Context, in runCell) (*sdk.CallToolResult, *api.CellAnswer, error) {
	c := &api.Cell{Language: in.Language, Code: in.Code, TimeoutMS: in.TimeoutMS, Files: filesIn(in.Files), Collect: in.Collect}
	if len(c.Collect) == 0 {
		c.Collect = images
	}
	c.Limits.MaxOutput = streamBytes
	if err := f.holdText(ctx, 2*streamBytes+resultBytes+2*exceptionBytes); err != nil {
		return nil, nil, err
	}
	a, err := f.server.Cell(ctx, in.Session, c)
	if err != nil {
		return nil, nil, err
	}
	truncate(a)
	res := text("%s", describeCell(a))
	shown := f.addResults(ctx, res, a)
	a.Files = f.addFiles(ctx, res, common{Session: in.Session, Files: in.Files, Collect: in.Collect}, a.StartedAt, a.Files, shown)
	return res, a, nil
}

const (
	resultBytes    = 64 << 10 // of all text results in one answer
	exceptionBytes = 32 << 10 // of an exception's message, and of its traceback
)

// truncate shortens texts to a length that a model can read. The content store keeps the rest of results.
func truncate(a *api.CellAnswer) {
	left := resultBytes
	for i := range a.Results {
		for j, m := range a.Results[i].Media {
			if m.Text == nil {
				continue
			}
			if len(*m.Text) > left {
				kept := strings.ToValidUTF8((*m.Text)[:left], "")
				a.Results[i].Media[j].Text, a.Results[i].Truncated = &kept, true
			}
			left -= len(*a.Results[i].Media[j].Text)
		}
	}
	if e := a.Exception; e != nil {
		for _, text := range []*string{&e.Message, &e.Traceback} {
			*text = strings.ToValidUTF8((*text)[:min(len(*text), exceptionBytes)], "")
		}
	}
}

// addResults adds the images that a cell displayed, and returns their number.
func (f *Server) addResults(ctx context.Context, res *sdk.CallToolResult, a *api.CellAnswer) (shown int) {
	for _, one := range a.Results {
		for _, m := range one.Media {
			shown += f.addImage(ctx, res, m.MediaType, m.ID, m.Size, shown)
		}
	}
	return shown
}

// describeCell describes the end of a cell, its output and its results.
func describeCell(a *api.CellAnswer) string {
	var b strings.Builder
	switch {
	case a.TimedOut:
		fmt.Fprintf(&b, "cell %d timed out after %g ms and was interrupted", a.Number, a.TimeoutMS)
	case a.Exception != nil:
		fmt.Fprintf(&b, "cell %d failed: %s: %s", a.Number, a.Exception.Name, a.Exception.Message)
	default:
		fmt.Fprintf(&b, "cell %d: %s", a.Number, a.Cause)
	}
	if a.State == "lost" {
		b.WriteString("\nthe interpreter has ended: all variables are lost, and the next cell starts a new one")
	}
	if a.Earlier != nil {
		b.WriteString("\nthe previous interpreter had ended: this cell started without its variables")
	}
	writeClamped(&b, a.Clamped)
	silent := writeStreams(&b, a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64)
	for _, one := range a.Results {
		for _, m := range one.Media {
			if m.MediaType == "text/plain" && m.Text != nil {
				fmt.Fprintf(&b, "\n%s:\n%s", one.Kind, *m.Text)
				if one.Truncated {
					b.WriteString(" […]")
				}
				silent = false
			}
		}
	}
	if a.Exception != nil && a.Exception.Traceback != "" {
		fmt.Fprintf(&b, "\n%s", a.Exception.Traceback)
	} else if silent {
		b.WriteString("\nno output")
	}
	return b.String()
}
