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
	Code      string   `json:"code" jsonschema:"the cell; the value of its last expression is returned"`
	Language  string   `json:"language,omitempty" jsonschema:"what the cell is written in"`
	TimeoutMS float64  `json:"timeout_ms,omitempty" jsonschema:"milliseconds until it is interrupted; one second later its interpreter is killed"`
	Files     []file   `json:"files,omitempty" jsonschema:"files in the working directory when it begins"`
	Collect   []string `json:"collect,omitempty" jsonschema:"patterns of files to return, such as *.csv or out/*.json; by default, images in the working directory"`
}

// cell carries a cell out.
func (f *Front) cell(ctx context.Context, in runCell) (*sdk.CallToolResult, *api.CellAnswer, error) {
	c := &api.Cell{Language: in.Language, Code: in.Code, TimeoutMS: in.TimeoutMS, Files: filesIn(in.Files), Collect: in.Collect}
	if len(c.Collect) == 0 {
		c.Collect = images
	}
	c.Limits.MaxOutput = streamBytes
	a, err := f.server.Cell(ctx, in.Session, c)
	if err != nil {
		return nil, nil, err
	}
	cut(a)
	res := text("%s", cellWords(a))
	shown := f.addResults(ctx, res, a)
	a.Files = f.addFiles(ctx, res, common{Session: in.Session, Files: in.Files, Collect: in.Collect}, a.StartedAt, a.Files, shown)
	return res, a, nil
}

// resultBytes is how much text of all results goes into one answer.
const resultBytes = 64 << 10

// cut leaves of the results' texts what a model can read. What it has in the content store stays.
func cut(a *api.CellAnswer) {
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
}

// addResults adds what the cell shows that a model can be shown, and returns how many images there
// were.
func (f *Front) addResults(ctx context.Context, res *sdk.CallToolResult, a *api.CellAnswer) (shown int) {
	for _, one := range a.Results {
		for _, m := range one.Media {
			shown += f.addImage(ctx, res, m.MediaType, m.ID, m.Size, shown)
		}
	}
	return shown
}

// cellWords tells how a cell has ended, what it has written and what it shows.
func cellWords(a *api.CellAnswer) string {
	var b strings.Builder
	switch {
	case a.TimedOut:
		fmt.Fprintf(&b, "cell %d timed out after %g ms, and was interrupted", a.Number, a.TimeoutMS)
	case a.Exception != nil:
		fmt.Fprintf(&b, "cell %d has failed: %s: %s", a.Number, a.Exception.Name, a.Exception.Message)
	default:
		fmt.Fprintf(&b, "cell %d: %s", a.Number, a.Cause)
	}
	if a.State == "lost" {
		b.WriteString("\nits interpreter was ended: all that cells had defined is gone, and the next cell begins with nothing")
	}
	if a.Earlier != nil {
		b.WriteString("\nthe interpreter before it had ended meanwhile: this cell began with nothing defined")
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
