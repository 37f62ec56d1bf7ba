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

// Resources are files: the files of a session, and files in the content store that a call without a session
// returned.
const (
	sessionFiles = "sbxrun://sessions/"
	storedFiles  = "sbxrun://files/"

	resourceBytes = 4 << 20 // the largest file that can be read
)

func (f *Server) addResources(p *sdk.Server) {
	p.AddResourceTemplate(&sdk.ResourceTemplate{
		URITemplate: sessionFiles + "{session}/files/{+path}", Name: "session-file", Title: "File of a session",
		Description: "Up to 4 MiB; read_file reads parts of larger files.",
	}, f.read)
	p.AddResourceTemplate(&sdk.ResourceTemplate{
		URITemplate: storedFiles + "{id}", Name: "stored-file", Title: "File returned by a call without a session",
		Description: "Available for a limited time.",
	}, f.read)
}

// sessionURI returns the URI of a file of a session.
func sessionURI(session, name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = url.PathEscape(part)
	}
	return sessionFiles + url.PathEscape(session) + "/files/" + strings.Join(parts, "/")
}

// read handles resources/read.
func (f *Server) read(ctx context.Context, req *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
	ctx, cancel, err := f.callContext(ctx, req.Extra)
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

func (f *Server) resource(ctx context.Context, uri string) (b []byte, name string, err error) {
	if id, ok := strings.CutPrefix(uri, storedFiles); ok {
		b, err = f.stored(ctx, blobs.Prefix+id)
		return b, "", err
	}
	rest, _ := strings.CutPrefix(uri, sessionFiles)
	session, escaped, _ := strings.Cut(rest, "/files/")
	if name, err = url.PathUnescape(escaped); err != nil {
		return nil, "", api.NewError(api.Usage, "invalid URI", "")
	}
	file, size, _, release, err := f.server.OpenFile(ctx, session, name)
	if err != nil {
		return nil, "", err
	}
	defer release()
	b, err = f.all(ctx, file, size)
	return b, name, err
}

func (f *Server) stored(ctx context.Context, id string) ([]byte, error) {
	file, size, err := f.server.OpenStored(ctx, id)
	if err != nil {
		return nil, err
	}
	return f.all(ctx, file, size)
}

// all reads a file and closes it.
func (f *Server) all(ctx context.Context, file *os.File, size int64) ([]byte, error) {
	defer file.Close()
	if size > resourceBytes {
		return nil, api.NewError(api.TooLarge, "the file is larger than 4 MiB", "")
	}
	const copies = 4 // the file, its base64, and the response
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

// isImage reports whether a model can see a file of this type.
func isImage(mediaType string) bool {
	return slices.Contains([]string{"image/png", "image/jpeg", "image/gif", "image/webp"}, mediaType)
}

// addImage adds an image of the content store to a result, unless it is too large or shown, the number
// of images so far, has reached the maximum. It returns the number of images added.
func (f *Server) addImage(ctx context.Context, res *sdk.CallToolResult, mediaType, id string, size int64, shown int) int {
	if !isImage(mediaType) || id == "" || size > imageBytes || shown == maxImages {
		return 0
	}
	b, err := f.stored(ctx, id)
	if err != nil {
		return 0
	}
	res.Content = append(res.Content, &sdk.ImageContent{Data: b, MIMEType: mediaType})
	return 1
}

// tick is the error of a file's modification time: the kernel takes it from its last timer tick, of
// which there are at least 100 per second.
const tick = 10 * time.Millisecond

// addFiles adds the collected files that a call has written since it started: a link to each, and the images
// themselves. shown is the number of images that the result already has. It returns the files.
func (f *Server) addFiles(ctx context.Context, res *sdk.CallToolResult, in common, started string, files []api.FileOut, shown int) []api.FileOut {
	began, err := time.Parse(result.TimeFormat, started)
	if err != nil {
		return files // nothing was run
	}
	written := files[:0]
	for _, out := range files {
		switch {
		case out.Error != "" && len(in.Collect) == 0:
			continue // images are collected without a request
		case out.Error != "":
			written = append(written, out)
			res.Content = append(res.Content, &sdk.TextContent{Text: out.Path + " was not returned: " + out.Error})
			continue
		case out.ModTime.Before(began.Add(-tick)), slices.ContainsFunc(in.Files, func(old file) bool { return path.Clean(old.Path) == out.Path }):
			continue // older than the call
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
