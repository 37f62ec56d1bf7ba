package cluster

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/blobs"
	"github.com/sbxrun/sbxrun/internal/server"
)

// Files that are put through a gateway are in an object store of JetStream, one for each tenant, with
// the tenant's quota and the time to live of the content store. Only gateways have the right to it:
// a node that is to bring a file into a workspace, and has it not, asks a gateway for it, as a client
// does, and keeps a copy. What a call collects is on its node, and found there.

// filesOf is what the store of a tenant is called.
func (g *Gateway) filesOf(tenant string) string {
	return g.door.Settings().NATS.Cluster + "-files-" + tenantKey(tenant)
}

// makeFiles opens the store of a tenant, and makes it if need be.
func (g *Gateway) makeFiles(ctx context.Context, tenant string) (jetstream.ObjectStore, error) {
	name := g.filesOf(tenant)
	c := g.door.Settings()
	// As jetstream makes object stores, but for AllowDirect, see [bucket.open].
	_, err := g.bus.queue.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "OBJ_" + name, Subjects: []string{"$O." + name + ".C.>", "$O." + name + ".M.>"}, MaxAge: time.Duration(c.Files.TTL),
		MaxBytes: int64(c.Of(tenant).Files), Replicas: c.NATS.Replicas, Discard: jetstream.DiscardNew, AllowRollup: true,
	})
	if err != nil {
		return nil, err
	}
	return g.bus.queue.js.ObjectStore(ctx, name)
}

// fullReader reads until what it is given is full: each read becomes a message. Only [io.EOF] is an end: a body that is
// broken off says [io.ErrUnexpectedEOF], as [io.ReadFull] does at the end.
type fullReader struct{ io.Reader }

func (w fullReader) Read(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var more int
		more, err = w.Reader.Read(b[n:])
		n += more
	}
	return n, err
}

// store takes a file for the content store.
func (g *Gateway) store(w http.ResponseWriter, r *http.Request) {
	stored, err := g.put(r)
	if err != nil {
		w.Header().Set("Connection", "close") // or net/http would first read the body
		g.failed(w, r, err)
		return
	}
	writeJSON(w, http.StatusCreated, stored)
}

func (g *Gateway) put(r *http.Request) (*api.Stored, error) {
	tenant := server.IdentityOf(r.Context()).Tenant
	full := api.NewError(api.QuotaDisk, "the content store has no room for it", "files go when their time to live is over")
	if g.door.Settings().Of(tenant).Files == 0 { // which JetStream takes for no bound
		return nil, full
	}
	failed := func(err error) error {
		var e *jetstream.APIError
		const storeFailed = 10077 // of which the description says why
		switch {
		case errors.As(err, &e) && e.ErrorCode == storeFailed && strings.Contains(e.Description, "maximum bytes"):
			return full
		case r.Context().Err() != nil:
			return api.NewError(api.Usage, "the request body is incomplete", "")
		}
		return jetStreamError("the file cannot be stored", err)
	}
	// A client that leaves ends the body. If that ended the context, too, what has come could not be removed.
	ctx := context.WithoutCancel(r.Context())
	asking, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	store, err := g.makeFiles(asking, tenant)
	if err != nil {
		return nil, failed(err)
	}
	// What it is called is only known when all of it was read.
	info, err := store.Put(ctx, jetstream.ObjectMeta{Name: "part-" + rand.Text()}, fullReader{r.Body})
	if err != nil {
		return nil, failed(err)
	}
	sum, err := base64.URLEncoding.DecodeString(strings.TrimPrefix(info.Digest, "SHA-256="))
	if err != nil {
		return nil, failed(err)
	}
	name := blobs.Prefix + hex.EncodeToString(sum)
	// The name is a link: one that is put once more lives anew, and is never away.
	old, err := store.GetInfo(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, failed(err)
	}
	if _, err := store.AddLink(ctx, name, info); err != nil {
		return nil, failed(err)
	}
	if old != nil && old.Opts != nil && old.Opts.Link != nil {
		_ = store.Delete(ctx, old.Opts.Link.Name) // else it goes when its time is over
	}
	return &api.Stored{ID: name, Size: int64(info.Size)}, nil
}

// file answers with a file of the content store.
func (g *Gateway) file(w http.ResponseWriter, r *http.Request) {
	f, size, err := g.stored(r.Context(), r.PathValue("id"))
	if err != nil {
		g.failed(w, r, err)
		return
	}
	defer f.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	if size >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	}
	_, _ = io.Copy(w, f) // a length that is not met tells the client
}

// stored opens a file of the store, or of a node. The size is -1 if it is not known.
func (g *Gateway) stored(ctx context.Context, id string) (io.ReadCloser, int64, error) {
	store, err := g.bus.queue.js.ObjectStore(ctx, g.filesOf(server.IdentityOf(ctx).Tenant))
	if err == nil && strings.HasPrefix(id, blobs.Prefix) {
		var f jetstream.ObjectResult
		if f, err = store.Get(ctx, id); err == nil {
			info, err := f.Info()
			if err != nil {
				f.Close()
				return nil, 0, jetStreamError("the file cannot be read", err)
			}
			return f, int64(info.Size), nil
		}
	}
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) && !errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, 0, jetStreamError("the file cannot be read", err)
	}
	return g.transport.file(ctx, id, g.members.Of(NodeKind))
}

// file asks one after the other for a file.
func (l *Transport) file(ctx context.Context, id string, all []Heartbeat) (f io.ReadCloser, size int64, err error) {
	none := error(api.NewError(api.NoSuchFile, "the content store has no "+strconv.Quote(id[:min(len(id), 80)]), "store it by POST /v1/files; files go when their time to live is over"))
	for _, one := range all {
		r := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/v1/files/" + id, RawPath: "/v1/files/" + url.PathEscape(id)}, Header: http.Header{}}).WithContext(ctx)
		res, err := l.do(forwardRequest(r, nil), one.subject())
		switch {
		case err != nil:
			continue // it was lost, and what only it had with it
		case res.StatusCode == http.StatusOK:
			return res.Body, res.ContentLength, nil
		case res.StatusCode != http.StatusNotFound:
			none = api.NewError(api.Busy, "somebody who may have the file does not answer", "try again in a moment")
		}
		res.Body.Close()
	}
	return nil, 0, none
}
