package mcp

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/blobs"
)

// Files are resources: those of a session, while it lasts, and those that came back from a call
// without one, in the content store.
const (
	sessionFiles = "sbxrun://sessions/"
	storedFiles  = "sbxrun://files/"

	resourceBytes = 4 << 20 // of one that is read
)

func (f *Front) addResources(p *sdk.Server) {
	p.AddResourceTemplate(&sdk.ResourceTemplate{
		URITemplate: sessionFiles + "{session}/files/{+path}", Name: "session-file", Title: "A file of a session",
		Description: "While the session lasts, and up to 4 MiB; read_file reads parts.",
	}, f.read)
	p.AddResourceTemplate(&sdk.ResourceTemplate{
		URITemplate: storedFiles + "{id}", Name: "stored-file", Title: "A file that came back from a call without a session",
		Description: "It is kept for a while.",
	}, f.read)
}

// sessionURI names a file of a session.
func sessionURI(session, name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = url.PathEscape(part)
	}
	return sessionFiles + url.PathEscape(session) + "/files/" + strings.Join(parts, "/")
}

// read answers resources/read.
func (f *Front) read(ctx context.Context, req *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
	ctx, cancel, err := f.callerOf(ctx, req.Extra)
	if err != nil {
		return nil, err
	}
	defer cancel()
	var b []byte
	var name string
	err = f.server.Recover(ctx, func() (err error) {
		b, name, err = f.resource(ctx, req.Params.URI)
		return err
	})
	if err != nil {
		e := api.AsError(err)
		if slices.Contains([]api.Code{api.NoSuchFile, api.NoSuchSession, api.Ended}, e.Failure.Code) {
			return nil, sdk.ResourceNotFoundError(req.Params.URI)
		}
		return nil, errors.New(e.Failure.Message)
	}
	out := &sdk.ResourceContents{URI: req.Params.URI, MIMEType: mediaType(name, b)}
	if out.Text = string(b); !utf8.Valid(b) || isImage(out.MIMEType) {
		out.Text, out.Blob = "", b
	}
	return &sdk.ReadResourceResult{Contents: []*sdk.ResourceContents{out}}, nil
}

func (f *Front) resource(ctx context.Context, uri string) (b []byte, name string, err error) {
	if id, ok := strings.CutPrefix(uri, storedFiles); ok {
		b, err = f.stored(ctx, blobs.Prefix+id)
		return b, "", err
	}
	rest, _ := strings.CutPrefix(uri, sessionFiles)
	session, escaped, _ := strings.Cut(rest, "/files/")
	if name, err = url.PathUnescape(escaped); err != nil {
		return nil, "", api.NewError(api.Usage, "the URI is not right", "")
	}
	file, size, _, release, err := f.server.OpenFile(ctx, session, name)
	if err != nil {
		return nil, "", err
	}
	defer release()
	b, err = f.all(ctx, file, size)
	return b, name, err
}

func (f *Front) stored(ctx context.Context, id string) ([]byte, error) {
	file, size, err := f.server.OpenStored(ctx, id)
	if err != nil {
		return nil, err
	}
	return f.all(ctx, file, size)
}

// all reads a file and closes it.
func (f *Front) all(ctx context.Context, file *os.File, size int64) ([]byte, error) {
	defer file.Close()
	if size > resourceBytes {
		return nil, api.NewError(api.TooLarge, "the file is larger than what is read at once", "")
	}
	const copies = 4 // as base64, and that in the answer
	if err := f.server.Hold(ctx, copies*size); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(file, size))
}

func mediaType(name string, b []byte) string {
	if t := mime.TypeByExtension(path.Ext(name)); t != "" {
		return t
	}
	return http.DetectContentType(b)
}

// isImage reports whether models are shown such a file.
func isImage(mediaType string) bool {
	return slices.Contains([]string{"image/png", "image/jpeg", "image/gif", "image/webp"}, mediaType)
}

// addImage adds an image of the content store to a result, if models are shown such a file, it is not too
// large, and there are not too many already. It returns how many it has added.
func (f *Front) addImage(ctx context.Context, res *sdk.CallToolResult, mediaType, id string, size int64, shown int) int {
	if !isImage(mediaType) || id == "" || size > imageBytes || shown == mostImages {
		return 0
	}
	b, err := f.stored(ctx, id)
	if err != nil {
		return 0
	}
	res.Content = append(res.Content, &sdk.ImageContent{Data: b, MIMEType: mediaType})
	return 1
}

// tick is how much older than its moment a file's time may be: the kernel takes that from its
// last tick (current_time, 100 a second at least).
const tick = 10 * time.Millisecond

// addFiles adds to a result what a call that began then has written of the files that were asked
// for: a link to each, and images that are not too large, of which there are so many already. It
// returns these files.
func (f *Front) addFiles(ctx context.Context, res *sdk.CallToolResult, in common, started string, files []api.FileOut, shown int) []api.FileOut {
	began, err := time.Parse(result.TimeFormat, started)
	if err != nil {
		return files // nothing has run
	}
	written := files[:0]
	for _, out := range files {
		switch {
		case out.Error != "" && len(in.Collect) == 0:
			continue // nobody has asked for it
		case out.Error != "":
			written = append(written, out)
			res.Content = append(res.Content, &sdk.TextContent{Text: out.Path + " did not come back: " + out.Error})
			continue
		case out.ModTime.Before(began.Add(-tick)), slices.ContainsFunc(in.Files, func(old file) bool { return path.Clean(old.Path) == out.Path }):
			continue // it was there before
		}
		written = append(written, out)
		shown += f.addImage(ctx, res, out.MediaType, out.ID, out.Size, shown)
		uri := storedFiles + strings.TrimPrefix(out.ID, blobs.Prefix)
		if in.Session != "" {
			uri = sessionURI(in.Session, out.Path)
		}
		res.Content = append(res.Content, &sdk.ResourceLink{URI: uri, Name: out.Path, MIMEType: out.MediaType, Size: new(out.Size)})
	}
	return written
}
