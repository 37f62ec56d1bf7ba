package mcp

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
)

type startProcess struct {
	inSession
	Command   string  `json:"command" jsonschema:"shell command line"`
	Stdin     string  `json:"stdin,omitempty" jsonschema:"text for its stdin"`
	TimeoutMS float64 `json:"timeout_ms,omitempty" jsonschema:"milliseconds until it is killed; by default it runs as long as the session"`
}

type oneProcess struct {
	inSession
	Process string `json:"process" jsonschema:"an ID from start_process"`
}

type readProcess struct {
	oneProcess
	Stream string  `json:"stream,omitempty" jsonschema:"both by default"`
	Offset *int64  `json:"offset,omitempty" jsonschema:"first byte to return of stream"`
	WaitMS float64 `json:"wait_ms,omitempty" jsonschema:"wait up to 60000 milliseconds for its end"`
}

// output is a part of a process's output.
type output struct {
	api.CallStatus
	Next *int64 `json:"next_offset,omitempty"`
}

func (f *Server) startProcess(ctx context.Context, in startProcess, argv []string) (*sdk.CallToolResult, *api.CallStatus, error) {
	status, err := f.server.StartProcess(ctx, in.Session, &api.Call{Argv: argv, Stdin: in.Stdin, TimeoutMS: in.TimeoutMS})
	if err != nil {
		return nil, nil, err
	}
	return text("process %s", status.ID), status, nil
}

func (f *Server) listProcesses(ctx context.Context, in inSession) (*sdk.CallToolResult, *api.Calls, error) {
	all, err := f.server.Processes(ctx, in.Session)
	if err != nil {
		return nil, nil, err
	}
	var b strings.Builder
	for _, s := range all.Calls {
		fmt.Fprintf(&b, "%s\n", describeProcess(s))
	}
	if len(all.Calls) == 0 {
		b.WriteString("no processes")
	}
	return text("%s", b.String()), all, nil
}

func (f *Server) readProcess(ctx context.Context, in readProcess) (*sdk.CallToolResult, *output, error) {
	c, err := f.server.Process(ctx, in.Session, in.Process)
	if err != nil {
		return nil, nil, err
	}
	if in.WaitMS > 0 {
		const most = time.Minute
		timer := time.NewTimer(min(most, time.Duration(in.WaitMS)*time.Millisecond))
		defer timer.Stop()
		select {
		case <-c.Ended():
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	out := &output{CallStatus: c.Status()}
	shorten(&out.CallStatus)
	var b strings.Builder
	b.WriteString(describeProcess(out.CallStatus))
	streams := []string{"stdout", "stderr"}
	if in.Stream != "" {
		streams = []string{in.Stream}
	} else if in.Offset != nil {
		streams = streams[:1]
	}
	for _, name := range streams {
		next, err := f.writeOutput(ctx, &b, c, name, in.Offset)
		if err != nil {
			return nil, nil, err
		}
		if len(streams) == 1 {
			out.Next = &next
			fmt.Fprintf(&b, "\n[next offset %d]", next)
		}
	}
	return text("%s", b.String()), out, nil
}

func (f *Server) stopProcess(ctx context.Context, in oneProcess) (*sdk.CallToolResult, *api.CallStatus, error) {
	c, err := f.server.Process(ctx, in.Session, in.Process)
	if err != nil {
		return nil, nil, err
	}
	c.Cancel()
	<-c.Ended()
	status := c.Status()
	shorten(&status)
	var b strings.Builder
	b.WriteString(describeProcess(status))
	for _, name := range []string{"stdout", "stderr"} {
		if _, err := f.writeOutput(ctx, &b, c, name, nil); err != nil {
			return nil, nil, err
		}
	}
	return text("%s", b.String()), &status, nil
}

// shorten drops the lists of a report if they are long.
func shorten(s *api.CallStatus) {
	const files = 16
	if r := s.Report; r != nil && (brief(r) != r || len(r.Files) > files) {
		s.Shorten()
	}
}

// describeProcess describes the state of a process, or its end, in one line.
func describeProcess(s api.CallStatus) string {
	line := fmt.Sprintf("process %s: %s", s.ID, s.State)
	switch {
	case s.Report != nil:
		line += fmt.Sprintf(" (%s, exit code %d)", s.Report.Cause, s.Report.ExitCode)
	case s.Failure != nil:
		line += ": " + s.Failure.Message
	}
	return line
}

// writeOutput writes a part of a stream: from an offset, or its end. It returns the offset after that part.
func (f *Server) writeOutput(ctx context.Context, b *strings.Builder, c *calls.Call, name string, offset *int64) (next int64, err error) {
	spool := c.Stream(name)
	size, _, _ := spool.Size()
	from := max(0, size-streamBytes)
	if offset != nil {
		from = min(*offset, size)
	}
	text, err := io.ReadAll(spool.Section(from, min(size, from+streamBytes)))
	if err == nil {
		err = f.holdText(ctx, len(text))
	}
	if err != nil {
		return 0, err
	}
	if len(text) > 0 {
		fmt.Fprintf(b, "\n%s", name)
		if from > 0 {
			fmt.Fprintf(b, " from byte %d", from)
		}
		fmt.Fprintf(b, ":\n%s", strings.ToValidUTF8(string(text), "\uFFFD"))
	}
	return from + int64(len(text)), nil
}
