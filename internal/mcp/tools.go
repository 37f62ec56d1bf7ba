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

// common are the arguments of run_code and run_command.
type common struct {
	Stdin     string   `json:"stdin,omitempty" jsonschema:"text for its stdin"`
	TimeoutMS float64  `json:"timeout_ms,omitempty" jsonschema:"milliseconds until everything is killed"`
	Session   string   `json:"session,omitempty" jsonschema:"run in this session, and keep files there"`
	Image     string   `json:"image,omitempty" jsonschema:"programs and files to run with, outside sessions"`
	Files     []file   `json:"files,omitempty" jsonschema:"files to create first"`
	Collect   []string `json:"collect,omitempty" jsonschema:"patterns of files to return, such as out/*.json; images by default"`
}

type file struct {
	Path   string  `json:"path" jsonschema:"relative to the working directory"`
	Text   *string `json:"text,omitempty"`
	Base64 *string `json:"base64,omitempty" jsonschema:"for binary files, instead of text"`
}

type runCode struct {
	Code     string `json:"code"`
	Language string `json:"language,omitempty"`
	common
}

type runCommand struct {
	Command string `json:"command" jsonschema:"shell command line"`
	common
}

type newSession struct {
	IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty" jsonschema:"milliseconds without use until it ends"`
	LifetimeMS    float64 `json:"lifetime_ms,omitempty" jsonschema:"milliseconds until it ends in any case"`
	Files         []file  `json:"files,omitempty"`

	Image   string `json:"image,omitempty" jsonschema:"programs and files that the session has"`
	Overlay *struct {
		Name string `json:"name" jsonschema:"its name in the server's configuration"`
		Path string `json:"path,omitempty" jsonschema:"mount point; /work by default"`
	} `json:"overlay,omitempty" jsonschema:"copy-on-write view of a directory of the server"`
	Snapshot string `json:"snapshot,omitempty" jsonschema:"ID or name of a snapshot to start from"`
	Volumes  []struct {
		Name     string `json:"name" jsonschema:"created on first use"`
		Path     string `json:"path" jsonschema:"absolute mount point"`
		ReadOnly bool   `json:"read_only,omitempty" jsonschema:"allows several sessions at once"`
	} `json:"volumes,omitempty" jsonschema:"directories that outlive sessions"`
	Network *struct {
		Allow []string `json:"allow" jsonschema:"hosts, as NAME or NAME:PORT"`
	} `json:"network,omitempty" jsonschema:"reachable hosts; none by default"`
}

// parts returns the image, overlay, snapshot, volumes and network of the session.
func (n newSession) parts() api.Parts {
	p := api.Parts{Image: n.Image, Overlay: (*api.Overlay)(n.Overlay), Snapshot: n.Snapshot, Network: (*api.Network)(n.Network)}
	for _, v := range n.Volumes {
		p.Volumes = append(p.Volumes, api.Volume(v))
	}
	return p
}

type inSession struct {
	Session string `json:"session"`
}

type writeFile struct {
	inSession
	file
}

type readFile struct {
	inSession
	Path   string `json:"path" jsonschema:"relative to the working directory"`
	Offset int64  `json:"offset,omitempty" jsonschema:"first byte to read"`
}

// content is a part of a file.
type content struct {
	Path      string  `json:"path"`
	Size      int64   `json:"size"`
	MediaType string  `json:"media_type"`
	Offset    int64   `json:"offset"`
	Text      *string `json:"text,omitempty"`
	Base64    *string `json:"base64,omitempty"`
	Next      *int64  `json:"next_offset,omitempty"`
}

// Limits of one result, which a model reads completely.
const (
	streamBytes = 32 << 10 // of stdout and stderr each
	readBytes   = 64 << 10 // of a file
	imageBytes  = 3 << 20  // of one image
	maxImages   = 8
	maxListed   = 1000
)

// images are the files that are returned by default.
var images = []string{"*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp"}

// reportKey is the member of a result's _meta that has the report of the HTTP API. It is not in
// structuredContent by default, because some clients then pass only that to their model.
const reportKey = "sbxrun/report"

// add adds a tool. Its errors are texts for an agent. adjust completes the schema of its arguments.
func add[In, Out any](f *Server, p *sdk.Server, tool *sdk.Tool, adjust func(*jsonschema.Schema), do func(context.Context, In) (*sdk.CallToolResult, Out, error)) {
	in := inputSchema[In]()
	if s := in.Properties["session"]; s != nil {
		s.MinLength = new(1)
	}
	if adjust != nil {
		adjust(in)
	}
	tool.InputSchema = in
	structured := f.server.Settings().MCP.Structured
	if structured {
		out, err := jsonschema.For[Out](nil)
		if err != nil {
			panic(err) // a type of this program
		}
		walk(out, func(s *jsonschema.Schema) {
			if len(s.Properties) > 0 {
				s.AdditionalProperties = nil // new members may be added
			}
		})
		out.Type, out.Types = "object", nil
		tool.OutputSchema = out
	}
	p.AddTool(tool, func(handler context.Context, req *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		res, report, err := call(f, handler, req, in, do)
		if err != nil {
			res = &sdk.CallToolResult{}
			res.SetError(toolError(err))
			return res, nil
		}
		if structured {
			res.StructuredContent = report
		} else {
			res.Meta = sdk.Meta{reportKey: report}
		}
		return res, nil
	})
}

func call[In, Out any](f *Server, handler context.Context, req *sdk.CallToolRequest, schema *jsonschema.Schema, do func(context.Context, In) (*sdk.CallToolResult, Out, error)) (res *sdk.CallToolResult, out Out, err error) {
	ctx, cancel, err := f.callContext(handler, req.Extra)
	if err != nil {
		return nil, out, err
	}
	defer cancel()
	var in In
	if err := decode(schema, req.Params.Arguments, &in); err != nil {
		return nil, out, err
	}
	go f.server.Recover(ctx, func() error {
		reportProgress(ctx, handler, req)
		return nil
	})
	err = f.server.Recover(ctx, func() (err error) {
		res, out, err = do(ctx, in)
		return err
	})
	return res, out, err
}

// addCode adds a tool for code in one of languages, or removes it if there are none. It passes the
// default language to do.
func addCode[In, Out any](f *Server, p *sdk.Server, languages []string, image func(*jsonschema.Schema), tool *sdk.Tool, do func(ctx context.Context, in In, language string) (*sdk.CallToolResult, Out, error)) {
	if len(languages) == 0 {
		p.RemoveTools(tool.Name)
		return
	}
	language := languages[0]
	if slices.Contains(languages, "python") {
		language = "python"
	}
	add(f, p, tool, func(in *jsonschema.Schema) {
		l := in.Properties["language"]
		for _, name := range languages {
			l.Enum = append(l.Enum, name)
		}
		l.Description = "default " + language
		image(in)
	}, func(ctx context.Context, in In) (*sdk.CallToolResult, Out, error) { return do(ctx, in, language) })
}

// addTools adds all tools for a tenant, or replaces them.
func (f *Server) addTools(p *sdk.Server, tenant string) {
	var all, cells []string
	for _, l := range f.server.Languages(tenant) {
		if all = append(all, l.Name); l.Cells {
			cells = append(cells, l.Name)
		}
	}
	c := f.server.Settings()
	network := c.Sandbox.Network == "host" || len(c.Of(tenant).Network) > 0
	annotate := func(title string, destructive, network bool) *sdk.ToolAnnotations {
		return &sdk.ToolAnnotations{Title: title, DestructiveHint: &destructive, OpenWorldHint: &network}
	}
	reads := func(title string) *sdk.ToolAnnotations {
		return &sdk.ToolAnnotations{Title: title, ReadOnlyHint: true, OpenWorldHint: new(false)}
	}

	var offered []any
	for _, m := range f.server.Images(tenant) {
		offered = append(offered, m.Name)
	}
	// image lists the images that the tenant may use, or removes the argument if there are none.
	image := func(in *jsonschema.Schema) {
		if m := in.Properties["image"]; m != nil && len(offered) > 0 {
			m.Enum = offered
		} else {
			delete(in.Properties, "image")
			in.PropertyOrder = slices.DeleteFunc(in.PropertyOrder, func(name string) bool { return name == "image" })
		}
	}

	addCode(f, p, all, image, &sdk.Tool{
		Name: "run_code", Annotations: annotate("Run code", false, network),
		Description: "Run a program in a sandbox, and return its output and exit code.",
	}, func(ctx context.Context, in runCode, language string) (*sdk.CallToolResult, *api.Answer, error) {
		return f.run(ctx, in.common, &api.Call{Language: cmp.Or(in.Language, language), Code: in.Code})
	})
	addCode(f, p, cells, image, &sdk.Tool{
		Name: "run_cell", Annotations: annotate("Run a cell", false, network),
		Description: "Run a notebook cell in an interpreter that the session keeps: later cells can use its variables. Returns the value of its last expression.",
	}, func(ctx context.Context, in runCell, language string) (*sdk.CallToolResult, *api.CellAnswer, error) {
		in.Language = cmp.Or(in.Language, language)
		return f.cell(ctx, in)
	})
	shell := "sh"
	if slices.Contains(all, "bash") {
		shell = "bash"
	}
	// An image may have no bash. The shell finds out if there may be an image.
	command := func(line string, image bool) []string {
		if image && len(offered) > 0 && shell == "bash" {
			return []string{"sh", "-c", `command -v bash >/dev/null && exec bash -c -- "$0"; exec sh -c -- "$0"`, line}
		}
		return []string{shell, "-c", "--", line}
	}
	add(f, p, &sdk.Tool{
		Name: "run_command", Annotations: annotate("Run a command", false, network),
		Description: "Run a command line with " + shell + " in a sandbox, and return its output and exit code. Background processes are killed when it returns; start_process keeps one running.",
	}, image, func(ctx context.Context, in runCommand) (*sdk.CallToolResult, *api.Answer, error) {
		return f.run(ctx, in.common, &api.Call{Argv: command(in.Command, in.Image+in.Session != "")})
	})
	add(f, p, &sdk.Tool{
		Name: "create_session", Annotations: annotate("Create a session", false, false),
		Description: "Create a sandbox that keeps its files between calls, and return its ID. It ends when it has not been used for a while.",
	}, image, func(ctx context.Context, in newSession) (*sdk.CallToolResult, *api.Session, error) {
		x, err := f.server.CreateSession(ctx, &api.NewSession{IdleTimeoutMS: in.IdleTimeoutMS, LifetimeMS: in.LifetimeMS, Files: filesIn(in.Files), Parts: in.parts()})
		if err != nil {
			return nil, nil, err
		}
		return text("session %s", x.ID), x, nil
	})
	add(f, p, &sdk.Tool{
		Name: "end_session", Annotations: annotate("End a session", true, false),
		Description: "End a session: kill its processes and delete its files.",
	}, nil, func(ctx context.Context, in inSession) (*sdk.CallToolResult, *api.SessionEnd, error) {
		end, err := f.server.EndSession(ctx, in.Session)
		if err != nil {
			return nil, nil, err
		}
		return text("session %s has ended; all its processes have exited (%s)", end.ID, end.Verdict), end, nil
	})
	write := annotate("Write a file", true, false)
	write.IdempotentHint = true
	add(f, p, &sdk.Tool{
		Name: "write_file", Annotations: write,
		Description: "Create or replace a file in a session. Missing directories are created.",
	}, nil, f.writeFile)
	add(f, p, &sdk.Tool{
		Name: "read_file", Annotations: reads("Read a file"),
		Description: fmt.Sprintf("Read a file of a session: an image as an image, other files up to %d bytes from an offset.", readBytes),
	}, nil, f.readFile)
	add(f, p, &sdk.Tool{
		Name: "list_files", Annotations: reads("List files"),
		Description: "List the files of a session.",
	}, nil, f.listFiles)
	add(f, p, &sdk.Tool{
		Name: "start_process", Annotations: annotate("Start a process", false, network),
		Description: "Start a command line in the background of a session, such as a development server, and return its ID. It runs until it exits, its timeout, stop_process or the end of the session. Other calls in the session reach its ports at localhost.",
	}, nil, func(ctx context.Context, in startProcess) (*sdk.CallToolResult, *api.CallStatus, error) {
		return f.startProcess(ctx, in, command(in.Command, true))
	})
	add(f, p, &sdk.Tool{
		Name: "list_processes", Annotations: reads("List processes"),
		Description: "List the background processes of a session.",
	}, nil, f.listProcesses)
	add(f, p, &sdk.Tool{
		Name: "read_process", Annotations: reads("Read the output of a process"),
		Description: "Return the state of a background process and its output, by default the end of it.",
	}, func(in *jsonschema.Schema) { in.Properties["stream"].Enum = []any{"stdout", "stderr"} }, f.readProcess)
	add(f, p, &sdk.Tool{
		Name: "stop_process", Annotations: annotate("Stop a process", true, false),
		Description: "Kill a background process and everything it started, and return the end of its output.",
	}, nil, f.stopProcess)
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

// holdText reserves memory for n bytes of text in a result. The text is also in the report, and the SDK makes several copies,
// in which some characters take six bytes.
func (f *Server) holdText(ctx context.Context, n int) error {
	const copies = 16
	return f.server.Hold(ctx, copies*int64(n))
}

// brief returns a report without a long command line. The client knows that, and the SDK makes several copies of a result,
// in which some characters take six bytes.
func brief(a *api.Answer) *api.Answer {
	const word = 4 // at least, of an item of a list
	size := 0
	for _, text := range a.Argv {
		size += word + len(text)
	}
	if size <= api.MaxListed {
		return a
	}
	short := *a // the original is shared
	short.Argv = []string{}
	return &short
}

// run executes a call.
func (f *Server) run(ctx context.Context, in common, c *api.Call) (*sdk.CallToolResult, *api.Answer, error) {
	c.Stdin, c.TimeoutMS, c.Image, c.Files, c.Collect = in.Stdin, in.TimeoutMS, in.Image, filesIn(in.Files), in.Collect
	if len(c.Collect) == 0 {
		c.Collect = images
	}
	c.Limits.MaxOutput = streamBytes
	if err := f.holdText(ctx, 2*streamBytes); err != nil {
		return nil, nil, err
	}
	a, err := f.server.Run(ctx, in.Session, c)
	if err != nil {
		e := api.AsError(err)
		if e.Report == nil {
			return nil, nil, err
		}
		res := text("%s\n%s", toolError(e), describe(e.Report))
		res.IsError = true
		return res, brief(e.Report), nil
	}
	a = brief(a)
	res := text("%s", describe(a))
	a.Files = f.addFiles(ctx, res, in, a.StartedAt, a.Files, 0)
	return res, a, nil
}

func (f *Server) writeFile(ctx context.Context, in writeFile) (*sdk.CallToolResult, *api.Written, error) {
	var r io.Reader
	switch {
	case (in.Text == nil) == (in.Base64 == nil):
		return nil, nil, api.NewError(api.Usage, "give either text or base64", "")
	case in.Text != nil:
		r = strings.NewReader(*in.Text)
	default:
		b, err := base64.StdEncoding.DecodeString(*in.Base64)
		if err != nil {
			return nil, nil, api.NewError(api.Usage, "invalid base64", "")
		}
		r = bytes.NewReader(b)
	}
	const mode = fs.FileMode(0o644)
	w, err := f.server.PutFile(ctx, in.Session, in.Path, r, mode)
	if err != nil {
		return nil, nil, err
	}
	return text("%s: %d bytes", w.Path, w.Size), w, nil
}

func (f *Server) listFiles(ctx context.Context, in inSession) (*sdk.CallToolResult, *workspace.Listing, error) {
	all, err := f.server.ListFiles(ctx, in.Session)
	if err != nil {
		return nil, nil, err
	}
	rest := max(0, len(all.Files)-maxListed)
	all.Files = all.Files[:len(all.Files)-rest]
	var b strings.Builder
	for _, e := range all.Files {
		fmt.Fprintf(&b, "%s\t%s\t%d bytes\n", e.Path, e.Type, e.Size)
	}
	if rest > 0 {
		fmt.Fprintf(&b, "and %d more", rest)
	}
	if len(all.Files) == 0 {
		b.WriteString("no files")
	}
	return text("%s", b.String()), all, nil
}

// readFile reads a part of a file, or an image.
func (f *Server) readFile(ctx context.Context, in readFile) (*sdk.CallToolResult, *content, error) {
	r, size, _, release, err := f.server.OpenFile(ctx, in.Session, in.Path)
	if err != nil {
		return nil, nil, err
	}
	defer release()
	defer r.Close()
	head := make([]byte, 512) // as much as http.DetectContentType uses
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
	if err == nil {
		err = f.holdText(ctx, len(b))
	}
	if err != nil {
		return nil, nil, err
	}
	whole := b
	if in.Offset+int64(len(b)) < size { // the next part has the rest of the last character
		whole = b[:len(b)-stream.Partial(b)]
	}
	shown := ""
	binary := !utf8.Valid(whole)
	if binary {
		out.Base64 = new(base64.StdEncoding.EncodeToString(b))
		shown = fmt.Sprintf("%d bytes of binary data; read it with a program", len(b))
	} else {
		b = whole
		shown = string(b)
		out.Text = new(shown)
	}
	if next := in.Offset + int64(len(b)); next < size && len(b) > 0 {
		out.Next = &next
		shown += fmt.Sprintf("\n[… %d more bytes from offset %d …]", size-next, next)
	}
	res := text("%s", shown)
	if binary {
		res.Content = append(res.Content, &sdk.ResourceLink{URI: sessionURI(in.Session, in.Path), Name: in.Path, MIMEType: out.MediaType, Size: &size})
	}
	return res, out, nil
}

// describe returns a text about the end of a command and its output.
func describe(a *api.Answer) string {
	var b strings.Builder
	switch {
	case a.Cause == result.Exited:
		fmt.Fprintf(&b, "exit code %d", a.ExitCode)
	case a.Cause == result.Timeout:
		fmt.Fprintf(&b, "timed out after %g ms; everything it started was killed (exit code %d). Output that the program had buffered is missing", a.TimeoutMS, a.ExitCode)
	case a.Payload != nil && a.Payload.Signal != nil && a.Cause == result.Signaled:
		fmt.Fprintf(&b, "killed by signal %s (exit code %d)", *a.Payload.Signal, a.ExitCode)
	default:
		fmt.Fprintf(&b, "%s (exit code %d)", a.Cause, a.ExitCode)
	}
	if a.Error != nil {
		b.WriteString("\n" + a.Error.Message)
	}
	if n := a.Teardown.Strays; n > 0 && a.Cause != result.Timeout {
		processes := "processes were"
		if n == 1 {
			processes = "process was"
		}
		fmt.Fprintf(&b, "\n%d leftover %s killed; start_process keeps one running", n, processes)
	}
	writeClamped(&b, a.Clamped)
	if writeStreams(&b, a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64) {
		b.WriteString("\nno output")
	}
	return b.String()
}

func writeClamped(b *strings.Builder, clamped []string) {
	if len(clamped) > 0 {
		fmt.Fprintf(b, "\nreduced to the server's maximum: %s", strings.Join(clamped, ", "))
	}
}

// writeStreams writes the output of a command, and reports whether there was none.
func writeStreams(b *strings.Builder, stdout, stdoutBase64, stderr, stderrBase64 *string) (silent bool) {
	silent = true
	for _, s := range []struct {
		name         string
		text, binary *string
	}{{"stdout", stdout, stdoutBase64}, {"stderr", stderr, stderrBase64}} {
		switch {
		case s.text != nil && *s.text != "":
			fmt.Fprintf(b, "\n%s:\n%s", s.name, *s.text)
		case s.binary != nil && *s.binary != "":
			if text := mostlyText(*s.binary); text != "" {
				fmt.Fprintf(b, "\n%s, with invalid bytes replaced:\n%s", s.name, text)
			} else {
				fmt.Fprintf(b, "\n%s: binary data; write it to a file instead", s.name)
			}
		default:
			continue
		}
		silent = false
	}
	return silent
}

// mostlyText decodes output that is not UTF-8, and replaces invalid bytes with U+FFFD. It returns "" if a tenth or
// more of the bytes are invalid or control characters, because a model cannot use that.
func mostlyText(encoded string) string {
	b, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return "" // impossible: the server encoded it
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
