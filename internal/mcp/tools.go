package mcp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// common is what both ways to run something take.
type common struct {
	Stdin     string   `json:"stdin,omitempty" jsonschema:"what it reads, as text"`
	TimeoutMS float64  `json:"timeout_ms,omitempty" jsonschema:"milliseconds until everything in it is killed"`
	Session   string   `json:"session,omitempty" jsonschema:"session to run in, an id from create_session; without one it runs alone, and its files are gone afterwards"`
	Files     []file   `json:"files,omitempty" jsonschema:"files in the working directory when it begins"`
	Collect   []string `json:"collect,omitempty" jsonschema:"patterns of files to return, such as *.csv or out/*.json; by default, images in the working directory"`
}

type file struct {
	Path   string  `json:"path" jsonschema:"relative to the working directory"`
	Text   *string `json:"text,omitempty" jsonschema:"contents of the file; or give base64 instead"`
	Base64 *string `json:"base64,omitempty" jsonschema:"contents of the file, if it is not text"`
}

type runCode struct {
	Code     string `json:"code" jsonschema:"the program"`
	Language string `json:"language,omitempty" jsonschema:"programming language of the code"`
	common
}

type runCommand struct {
	Command string `json:"command" jsonschema:"a command line for the shell"`
	common
}

type newSession struct {
	IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty" jsonschema:"milliseconds without use after which it ends"`
	LifetimeMS    float64 `json:"lifetime_ms,omitempty" jsonschema:"milliseconds after which it ends in any case"`
	Files         []file  `json:"files,omitempty" jsonschema:"files in its working directory"`

	Overlay *struct {
		Name string `json:"name" jsonschema:"of the directory, as the server's configuration has it"`
		Path string `json:"path,omitempty" jsonschema:"where it is shown; /work by default"`
	} `json:"overlay,omitempty" jsonschema:"a directory of the server's that can be written to in the session, and stays as it is"`
	Snapshot string `json:"snapshot,omitempty" jsonschema:"id or name of a snapshot to begin from"`
	Volumes  []struct {
		Name     string `json:"name" jsonschema:"made when it is used first"`
		Path     string `json:"path" jsonschema:"where it is shown, absolute"`
		ReadOnly bool   `json:"read_only,omitempty" jsonschema:"several sessions can read a volume, or one can write to it"`
	} `json:"volumes,omitempty" jsonschema:"directories that outlive sessions"`
	Network *struct {
		Allow []string `json:"allow" jsonschema:"hosts, as NAME or NAME:PORT"`
	} `json:"network,omitempty" jsonschema:"hosts to be reached; without it there is no network"`
}

// parts are what the session has beside its working directory.
func (n newSession) parts() api.Parts {
	p := api.Parts{Overlay: (*api.Overlay)(n.Overlay), Snapshot: n.Snapshot, Network: (*api.Network)(n.Network)}
	for _, v := range n.Volumes {
		p.Volumes = append(p.Volumes, api.Volume(v))
	}
	return p
}

type inSession struct {
	Session string `json:"session" jsonschema:"an id from create_session"`
}

type writeFile struct {
	inSession
	file
}

type readFile struct {
	inSession
	Path   string `json:"path" jsonschema:"relative to the working directory"`
	Offset int64  `json:"offset,omitempty" jsonschema:"the first byte"`
}

// content is what was read of a file.
type content struct {
	Path      string  `json:"path"`
	Size      int64   `json:"size"`
	MediaType string  `json:"media_type"`
	Offset    int64   `json:"offset"`
	Text      *string `json:"text,omitempty"`
	Base64    *string `json:"base64,omitempty"`
	Next      *int64  `json:"next_offset,omitempty"`
}

// How much goes into one answer, which a model reads as a whole.
const (
	streamBytes = 32 << 10 // of stdout, and of stderr
	readBytes   = 64 << 10 // of a file
	imageBytes  = 3 << 20  // of one image
	mostImages  = 8
	mostListed  = 1000
)

// images are the files that come back by themselves.
var images = []string{"*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp"}

// add adds a tool, whose errors are words for an agent. fit completes what its types do not say.
func add[In, Out any](f *Front, p *sdk.Server, tool *sdk.Tool, fit func(*jsonschema.Schema), do func(context.Context, In) (*sdk.CallToolResult, Out, error)) {
	in, err := jsonschema.For[In](nil)
	if err != nil {
		panic(err) // of a type in this file
	}
	out, err := jsonschema.For[Out](nil)
	if err != nil {
		panic(err)
	}
	walk(in, plain)
	walk(out, open)
	out.Type, out.Types = "object", nil // the whole is there
	for name, of := range in.Properties {
		if of.Type == "number" || of.Type == "integer" {
			of.Minimum = new(float64)
		}
		if name == "session" {
			of.MinLength = new(1)
		}
	}
	if fit != nil {
		fit(in)
	}
	tool.InputSchema, tool.OutputSchema = in, out
	sdk.AddTool(p, tool, func(ctx context.Context, req *sdk.CallToolRequest, in In) (*sdk.CallToolResult, Out, error) {
		var none Out
		asked := ctx
		ctx, cancel, err := f.callerOf(ctx, req.Extra)
		if err != nil {
			return nil, none, failure(err)
		}
		defer cancel()
		go f.server.Recover(ctx, func() error {
			progress(ctx, asked, req)
			return nil
		})
		var res *sdk.CallToolResult
		var out Out
		err = f.server.Recover(ctx, func() (err error) {
			res, out, err = do(ctx, in)
			return err
		})
		if err != nil {
			return nil, none, failure(err)
		}
		return res, out, nil
	})
}

// addIn adds a tool for code in one of these languages, or removes it if there are none. usual is the
// language where none is given.
func addIn[In, Out any](f *Front, p *sdk.Server, languages []string, tool *sdk.Tool, do func(ctx context.Context, in In, usual string) (*sdk.CallToolResult, Out, error)) {
	if len(languages) == 0 {
		p.RemoveTools(tool.Name)
		return
	}
	usual := languages[0]
	if slices.Contains(languages, "python") {
		usual = "python"
	}
	tool.Description += " Languages: " + strings.Join(languages, ", ") + "."
	add(f, p, tool, func(in *jsonschema.Schema) {
		l := in.Properties["language"]
		for _, name := range languages {
			l.Enum = append(l.Enum, name)
		}
		l.Description += "; " + usual + " unless given"
	}, func(ctx context.Context, in In) (*sdk.CallToolResult, Out, error) { return do(ctx, in, usual) })
}

// walk calls each with a schema and all that it is made of.
func walk(s *jsonschema.Schema, each func(*jsonschema.Schema)) {
	if s == nil {
		return
	}
	each(s)
	walk(s.Items, each)
	for _, p := range s.Properties {
		walk(p, each)
	}
}

// plain says of what may be left out only what it is when it is given: not all clients know
// lists of types.
func plain(s *jsonschema.Schema) {
	if len(s.Types) == 2 && slices.Contains(s.Types, "null") {
		s.Type = s.Types[0]
		if s.Type == "null" {
			s.Type = s.Types[1]
		}
		s.Types = nil
	}
}

// open lets new members come.
func open(s *jsonschema.Schema) {
	if len(s.Properties) > 0 {
		s.AdditionalProperties = nil
	}
}

// addTools adds all tools, or replaces them.
func (f *Front) addTools(p *sdk.Server) {
	var all, kept []string
	for _, l := range f.server.Languages() {
		if all = append(all, l.Name); l.Cells {
			kept = append(kept, l.Name)
		}
	}
	running := func(title string) *sdk.ToolAnnotations {
		return &sdk.ToolAnnotations{Title: title, DestructiveHint: new(false), OpenWorldHint: new(f.network)}
	}
	closed := new(false)

	addIn(f, p, all, &sdk.Tool{
		Name: "run_code", Annotations: running("Run code"),
		Description: "Run a program in a sandbox, and return its output and how it ended.",
	}, func(ctx context.Context, in runCode, usual string) (*sdk.CallToolResult, *api.Answer, error) {
		return f.run(ctx, in.common, &api.Call{Language: cmp.Or(in.Language, usual), Code: in.Code})
	})
	addIn(f, p, kept, &sdk.Tool{
		Name: "run_cell", Annotations: running("Run a cell"),
		Description: "Run code in an interpreter that a session keeps, as in a notebook: what one cell defines, the next can use.",
	}, func(ctx context.Context, in runCell, usual string) (*sdk.CallToolResult, *api.CellAnswer, error) {
		in.Language = cmp.Or(in.Language, usual)
		return f.cell(ctx, in)
	})
	shell := "sh"
	if slices.Contains(all, "bash") {
		shell = "bash"
	}
	add(f, p, &sdk.Tool{
		Name: "run_command", Annotations: running("Run a command"),
		Description: "Run a command line in " + shell + " in a sandbox, and return its output and how it ended. Whatever it leaves in the background is killed.",
	}, nil, func(ctx context.Context, in runCommand) (*sdk.CallToolResult, *api.Answer, error) {
		return f.run(ctx, in.common, &api.Call{Argv: []string{shell, "-c", "--", in.Command}})
	})
	add(f, p, &sdk.Tool{
		Name: "create_session", Annotations: &sdk.ToolAnnotations{Title: "Create a session", DestructiveHint: closed, OpenWorldHint: closed},
		Description: "Create a sandbox that keeps its files from call to call, and return its id. It ends by itself when it is not used.",
	}, nil, func(ctx context.Context, in newSession) (*sdk.CallToolResult, *api.Session, error) {
		x, err := f.server.CreateSession(ctx, &api.NewSession{IdleTimeoutMS: in.IdleTimeoutMS, LifetimeMS: in.LifetimeMS, Files: filesIn(in.Files), Parts: in.parts()})
		if err != nil {
			return nil, nil, err
		}
		return text("session %s", x.ID), x, nil
	})
	add(f, p, &sdk.Tool{
		Name: "end_session", Annotations: &sdk.ToolAnnotations{Title: "End a session", DestructiveHint: new(true), OpenWorldHint: closed},
		Description: "End a session, with everything that runs in it and all its files.",
	}, nil, func(ctx context.Context, in inSession) (*sdk.CallToolResult, *api.SessionEnd, error) {
		end, err := f.server.EndSession(ctx, in.Session)
		if err != nil {
			return nil, nil, err
		}
		return text("session %s has ended; everything in it is gone (%s)", end.ID, end.Verdict), end, nil
	})
	add(f, p, &sdk.Tool{
		Name: "write_file", Annotations: &sdk.ToolAnnotations{Title: "Write a file", DestructiveHint: new(true), IdempotentHint: true, OpenWorldHint: closed},
		Description: "Write a file in a session, replacing an existing one. Missing directories are created.",
	}, nil, func(ctx context.Context, in writeFile) (*sdk.CallToolResult, *api.Written, error) {
		var r io.Reader
		switch {
		case (in.Text == nil) == (in.Base64 == nil):
			return nil, nil, api.NewError(api.Usage, "give either text or base64", "")
		case in.Text != nil:
			r = strings.NewReader(*in.Text)
		default:
			b, err := base64.StdEncoding.DecodeString(*in.Base64)
			if err != nil {
				return nil, nil, api.NewError(api.Usage, "base64 is none", "")
			}
			r = bytes.NewReader(b)
		}
		const mode = fs.FileMode(0o644)
		w, err := f.server.PutFile(ctx, in.Session, in.Path, r, mode)
		if err != nil {
			return nil, nil, err
		}
		return text("%s: %d bytes", w.Path, w.Size), w, nil
	})
	add(f, p, &sdk.Tool{
		Name: "read_file", Annotations: &sdk.ToolAnnotations{Title: "Read a file", ReadOnlyHint: true, OpenWorldHint: closed},
		Description: fmt.Sprintf("Read a file of a session: an image as an image, of others %d bytes at most, from any byte on.", readBytes),
	}, nil, f.readFile)
	add(f, p, &sdk.Tool{
		Name: "list_files", Annotations: &sdk.ToolAnnotations{Title: "List files", ReadOnlyHint: true, OpenWorldHint: closed},
		Description: "List the files of a session.",
	}, nil, func(ctx context.Context, in inSession) (*sdk.CallToolResult, *workspace.Listing, error) {
		all, err := f.server.ListFiles(ctx, in.Session)
		if err != nil {
			return nil, nil, err
		}
		rest := max(0, len(all.Files)-mostListed)
		all.Files = all.Files[:len(all.Files)-rest]
		var b strings.Builder
		for _, e := range all.Files {
			fmt.Fprintf(&b, "%s\t%s\t%d bytes\n", e.Path, e.Type, e.Size)
		}
		if rest > 0 {
			fmt.Fprintf(&b, "and %d more", rest)
		}
		if len(all.Files) == 0 {
			b.WriteString("there are no files")
		}
		return text("%s", b.String()), all, nil
	})
}

func text(format string, args ...any) *sdk.CallToolResult {
	return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: fmt.Sprintf(format, args...)}}}
}

func filesIn(files []file) (in []api.FileIn) {
	for _, f := range files {
		in = append(in, api.FileIn{Path: f.Path, Text: f.Text, Base64: f.Base64})
	}
	return in
}

// run carries a call out.
func (f *Front) run(ctx context.Context, in common, c *api.Call) (*sdk.CallToolResult, *api.Answer, error) {
	c.Stdin, c.TimeoutMS, c.Files, c.Collect = in.Stdin, in.TimeoutMS, filesIn(in.Files), in.Collect
	if len(c.Collect) == 0 {
		c.Collect = images
	}
	c.Limits.MaxOutput = streamBytes
	a, err := f.server.Run(ctx, in.Session, c)
	if err != nil {
		e := api.AsError(err)
		if e.Report == nil {
			return nil, nil, err
		}
		res := text("%s\n%s", failure(e), words(e.Report))
		res.IsError = true
		return res, e.Report, nil
	}
	res := text("%s", words(a))
	a.Files = f.addFiles(ctx, res, in, a.StartedAt, a.Files, 0)
	return res, a, nil
}

// readFile reads a part of a file, or an image.
func (f *Front) readFile(ctx context.Context, in readFile) (*sdk.CallToolResult, *content, error) {
	r, size, _, release, err := f.server.OpenFile(ctx, in.Session, in.Path)
	if err != nil {
		return nil, nil, err
	}
	defer release()
	defer r.Close()
	head := make([]byte, 512) // what http.DetectContentType looks at
	n, _ := r.ReadAt(head, 0)
	out := &content{Path: in.Path, Size: size, Offset: in.Offset, MediaType: http.DetectContentType(head[:n])}
	if isImage(out.MediaType) && in.Offset == 0 && size <= imageBytes {
		b, err := f.all(ctx, r, size)
		if err != nil {
			return nil, nil, err
		}
		return &sdk.CallToolResult{Content: []sdk.Content{&sdk.ImageContent{Data: b, MIMEType: out.MediaType}}}, out, nil
	}
	b, err := io.ReadAll(io.NewSectionReader(r, in.Offset, min(readBytes, max(0, size-in.Offset))))
	if err != nil {
		return nil, nil, err
	}
	whole := b
	if in.Offset+int64(len(b)) < size { // the rest of a character may come
		whole = b[:len(b)-stream.Partial(b)]
	}
	said := ""
	if utf8.Valid(whole) {
		b = whole
		said = string(b)
		out.Text = new(said)
	} else {
		out.Base64 = new(base64.StdEncoding.EncodeToString(b))
		said = fmt.Sprintf("%d bytes that are no text; base64 has them", len(b))
	}
	if next := in.Offset + int64(len(b)); next < size && len(b) > 0 {
		out.Next = &next
		said += fmt.Sprintf("\n[… %d bytes more from offset %d on …]", size-next, next)
	}
	return text("%s", said), out, nil
}

// words tells how a command has ended, and what it has written.
func words(a *api.Answer) string {
	var b strings.Builder
	switch {
	case a.Cause == result.Exited:
		fmt.Fprintf(&b, "exit code %d", a.ExitCode)
	case a.Cause == result.Timeout:
		fmt.Fprintf(&b, "timed out after %g ms, and was killed with all that it had started (exit code %d)", a.TimeoutMS, a.ExitCode)
	case a.Payload != nil && a.Payload.Signal != nil && a.Cause == result.Signaled:
		fmt.Fprintf(&b, "died of signal %s (exit code %d)", *a.Payload.Signal, a.ExitCode)
	default:
		fmt.Fprintf(&b, "%s (exit code %d)", a.Cause, a.ExitCode)
	}
	if a.Error != nil {
		b.WriteString("\n" + a.Error.Message)
	}
	writeClamped(&b, a.Clamped)
	if writeStreams(&b, a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64) {
		b.WriteString("\nno output")
	}
	return b.String()
}

func writeClamped(b *strings.Builder, clamped []string) {
	if len(clamped) > 0 {
		fmt.Fprintf(b, "\ncut down to the server's maximum: %s", strings.Join(clamped, ", "))
	}
}

// writeStreams tells what was written, and reports whether that is nothing.
func writeStreams(b *strings.Builder, stdout, stdoutBase64, stderr, stderrBase64 *string) (silent bool) {
	silent = true
	for _, s := range []struct {
		name        string
		text, other *string
	}{{"stdout", stdout, stdoutBase64}, {"stderr", stderr, stderrBase64}} {
		switch {
		case s.text != nil && *s.text != "":
			fmt.Fprintf(b, "\n%s:\n%s", s.name, *s.text)
		case s.other != nil && *s.other != "":
			if text := mostlyText(*s.other); text != "" {
				fmt.Fprintf(b, "\n%s, not all of which is text:\n%s", s.name, text)
			} else {
				fmt.Fprintf(b, "\n%s: no text; stdout_base64 and stderr_base64 have it", s.name)
			}
		default:
			continue
		}
		silent = false
	}
	return silent
}

// mostlyText returns output that is not UTF-8, with marks in place of what is wrong; or "" if a tenth or more
// of its bytes are wrong, or control characters, by which a model sees nothing.
func mostlyText(encoded string) string {
	b, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return "" // the server has encoded it
	}
	wrong := 0
	for rest := b; len(rest) > 0; {
		r, size := utf8.DecodeRune(rest)
		if r == utf8.RuneError && size == 1 || unicode.IsControl(r) && !unicode.IsSpace(r) {
			wrong++
		}
		rest = rest[size:]
	}
	if 10*wrong >= len(b) {
		return ""
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
