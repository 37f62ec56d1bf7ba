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

// Gateways keep uploaded files in object stores of JetStream, one per tenant, with the time to live of
// the content store. Only gateways may access them: a node that needs a file for a workspace requests it
// from a gateway, as a client does, and keeps a copy. Files that a call collects stay on its node.

// filesOf returns the name of a tenant's store.
func (g *Gateway) filesOf(tenant string) string {
	return g.middleware.Settings().NATS.Cluster + "-files-" + tenantKey(tenant)
}

// makeFiles opens a tenant's store, and creates it if necessary. It also returns the size of the store.
func (g *Gateway) makeFiles(ctx context.Context, tenant string) (jetstream.ObjectStore, int64, error) {
	name := g.filesOf(tenant)
	c := g.middleware.Settings()
	// Like jetstream's object stores, except for AllowDirect, see [bucket.open]. There is no MaxBytes,
	// because JetStream would reserve that much for every tenant.
	s, err := g.bus.queue.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "OBJ_" + name, Subjects: []string{"$O." + name + ".C.>", "$O." + name + ".M.>"}, MaxAge: time.Duration(c.Files.TTL),
		Replicas: c.NATS.Replicas, Discard: jetstream.DiscardNew, AllowRollup: true,
	})
	if err != nil {
		return nil, 0, err
	}
	store, err := g.bus.queue.js.ObjectStore(ctx, name)
	return store, int64(s.CachedInfo().State.Bytes), err
}

// fullReader fills the buffer with each read, because each read becomes a message. Only [io.EOF] is the
// end: an incomplete body fails with [io.ErrUnexpectedEOF], the error of [io.ReadFull] at the end.
type fullReader struct{ io.Reader }

func (w fullReader) Read(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var more int
		more, err = w.Reader.Read(b[n:])
		n += more
	}
	return n, err
}

// quotaReader fails with errQuota after left bytes.
type quotaReader struct {
	io.Reader
	left int64
}

var errQuota = errors.New("the quota is used up")

func (q *quotaReader) Read(b []byte) (int, error) {
	n, err := q.Reader.Read(b)
	if q.left -= int64(n); q.left < 0 {
		return 0, errQuota
	}
	return n, err
}

// store handles an upload to the content store.
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
	quota := int64(g.middleware.Settings().Of(tenant).Files)
	failed := func(err error) error {
		switch {
		case errors.Is(err, errQuota):
			return api.NewError(api.QuotaDisk, "the content store has no room for it", "files are removed when their time to live ends")
		case r.Context().Err() != nil:
			return api.NewError(api.Usage, "the request body is incomplete", "")
		}
		return jetStreamError("the file cannot be stored", err)
	}
	if quota == 0 {
		return nil, failed(errQuota)
	}
	// A client that disconnects ends the body. Its context must not end here, or the partial file could
	// not be removed.
	ctx := context.WithoutCancel(r.Context())
	opening, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	store, used, err := g.makeFiles(opening, tenant)
	if err != nil {
		return nil, failed(err)
	}
	// The final name depends on the content.
	info, err := store.Put(ctx, jetstream.ObjectMeta{Name: "part-" + rand.Text()}, fullReader{&quotaReader{r.Body, quota - used}})
	if err != nil {
		return nil, failed(err)
	}
	// Concurrent uploads may have used the same room.
	status, err := store.Status(ctx)
	if err == nil && int64(status.Size()) > quota {
		err = errQuota
	}
	if err != nil {
		_ = store.Delete(ctx, info.Name) // else it expires
		return nil, failed(err)
	}
	sum, err := base64.URLEncoding.DecodeString(strings.TrimPrefix(info.Digest, "SHA-256="))
	if err != nil {
		return nil, failed(err)
	}
	name := blobs.Prefix + hex.EncodeToString(sum)
	// The name is a link, so that a second upload renews the file without removing it for a moment.
	old, err := store.GetInfo(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, failed(err)
	}
	if _, err := store.AddLink(ctx, name, info); err != nil {
		return nil, failed(err)
	}
	if old != nil && old.Opts != nil && old.Opts.Link != nil {
		_ = store.Delete(ctx, old.Opts.Link.Name) // else it expires
	}
	return &api.Stored{ID: name, Size: int64(info.Size)}, nil
}

// file serves a file of the content store.
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
	_, _ = io.Copy(w, f) // the client notices a wrong length
}

// ahead is the most of a file that NATS sends before the client has read it (JsFlowControlMaxPending).
const ahead = 32 << 20

// stored opens a file of the store or of a node. Memory is reserved for what NATS sends ahead. The size is -1 if it is unknown.
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
			size := int64(info.Size)
			if err := g.middleware.Hold(ctx, min(size, ahead)); err != nil {
				f.Close()
				return nil, 0, err
			}
			return f, size, nil
		}
	}
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) && !errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, 0, jetStreamError("the file cannot be read", err)
	}
	return g.transport.file(ctx, id, g.members.Of(NodeKind))
}

// file requests a file from several instances, one after the other.
func (l *Transport) file(ctx context.Context, id string, all []Heartbeat) (f io.ReadCloser, size int64, err error) {
	none := error(api.NewError(api.NoSuchFile, "the content store has no "+strconv.Quote(id[:min(len(id), 80)]), "store it by POST /v1/files; files are removed when their time to live ends"))
	for _, one := range all {
		r := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/v1/files/" + id, RawPath: "/v1/files/" + url.PathEscape(id)}, Header: http.Header{}}).WithContext(ctx)
		res, err := l.do(forwardRequest(r, nil), one.subject())
		switch {
		case err != nil:
			continue // lost, with its files
		case res.StatusCode == http.StatusOK:
			return res.Body, res.ContentLength, nil
		case res.StatusCode != http.StatusNotFound:
			none = api.NewError(api.Busy, "a node that may have the file does not answer", "try again in a moment")
		}
		res.Body.Close()
	}
	return nil, 0, none
}
