package cluster

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// checkKey is the context key of requests that a node only checks.
type checkKey struct{}

// keepQueue creates the queue, and recreates it and the buckets if they disappear, until ctx is done.
func (g *Gateway) keepQueue(ctx context.Context) {
	for ctx.Err() == nil {
		asking, cancel := context.WithTimeout(ctx, jetStreamTimeout)
		for _, b := range []*bucket{&g.bus.queue.records, &g.bus.leases.bucket, g.bus.quotas} {
			_ = b.stay(asking) // without JetStream, requests that need it fail
		}
		_ = g.bus.queue.keepConsumer(asking) // as above
		cancel()
		select {
		case <-ctx.Done():
		case <-time.After(jetStreamTimeout):
		}
	}
}

// enqueue accepts a detached call.
func (g *Gateway) enqueue(w http.ResponseWriter, r *http.Request) {
	if res, err := g.queueCall(w, r); res != nil || err != nil {
		g.answer(w, r)(res, err)
	}
}

// queueCall queues a call and responds, or returns the response of a node that refuses the call.
func (g *Gateway) queueCall(w http.ResponseWriter, r *http.Request) (*http.Response, error) {
	body, err := g.body(w, r)
	if err != nil {
		return nil, api.AsError(err)
	}
	if len(body) > maxQueued {
		return nil, api.NewError(api.TooLarge, "a queued call has at most "+strconv.Itoa(maxQueued)+" bytes", "upload its files with POST /v1/files")
	}
	if r.Header.Get(nodeHeader) != "" || usesStorage(body) {
		return nil, api.NewError(api.Usage, "queued calls may run on any node, but volumes and snapshots are on one", "use POST /v1/run with the header "+nodeHeader)
	}
	// A node checks languages and limits. A busy node can do that, too.
	res, _, err := g.sendToAny(r.WithContext(context.WithValue(r.Context(), checkKey{}, true)), body)
	var ours *api.Error
	switch {
	case err != nil && !errors.As(err, &ours):
		return nil, api.NewError(api.Busy, "the node does not respond", "try again in a moment") // it only checks the call
	case err != nil || res.StatusCode != http.StatusOK:
		return res, err
	}
	res.Body.Close()

	who := server.IdentityOf(r.Context())
	tenant := who.Tenant
	call := &record{ID: queuedPrefix + rand.Text(), Came: time.Now().UTC(), Hash: sum(body)}
	clients := r.Header.Get(keyHeader)
	if clients != "" {
		call.ID = queuedPrefix + leaseName(tenant, r.URL.Path, clients)[:32]
	}
	key := tenantKey(tenant) + "." + call.ID
	ctx, cancel := context.WithTimeout(r.Context(), jetStreamTimeout)
	defer cancel()
	revision, replayed, err := g.newRecord(ctx, tenant, key, call, clients != "")
	if err != nil {
		return nil, err
	}
	if call.At == "" && call.End == nil { // also for a repeated key: the first attempt may have queued nothing
		err = g.send(ctx, &message{Record: *call, Key: key, Revision: revision, Tenant: tenant, RequestID: who.RequestID, Body: body})
		if err != nil && !replayed {
			// It may still be in the queue.
			call.Gone, call.End = true, call.failed(false, api.NewError(api.Busy, "the queue did not accept it", ""))
			if _, undone := g.bus.queue.records.put(context.WithoutCancel(ctx), key, call, revision); undone == nil {
				return nil, jetStreamError("cannot queue the call", err)
			}
			return nil, ErrLost
		}
	}
	if replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
	g.tell(w, r, http.StatusAccepted, call)
	return nil, nil
}

// newRecord creates the record of a call. If there is one with its key, newRecord copies that to call. A
// record of a call that failed to start because no slot or no NATS was available is replaced: its client
// was told to try again.
func (g *Gateway) newRecord(ctx context.Context, tenant, key string, call *record, keyed bool) (revision uint64, replayed bool, err error) {
	failed := func(err error) (uint64, bool, error) {
		return 0, false, jetStreamError("cannot queue the call", err)
	}
	stream, err := g.bus.queue.open(ctx)
	if err != nil {
		return failed(err)
	}
	for {
		if keyed {
			var old record
			if revision, err = g.bus.queue.records.get(ctx, key, &old); err != nil {
				return failed(err)
			}
			again := old.End != nil && !old.End.Started && old.End.Failure != nil && old.End.Failure.Code == api.Busy
			switch {
			case revision == 0:
			case old.Hash != call.Hash:
				return 0, false, api.NewError(api.Idempotency, "the idempotency key was used for another request", "use a new key for each request")
			case !again:
				*call = old
				return revision, true, nil
			}
		}
		subject := g.bus.queue.name + "." + tenantKey(tenant)
		info, err := stream.Info(ctx, jetstream.WithSubjectFilter(subject))
		if err != nil {
			return failed(err)
		}
		if info.State.Subjects[subject] >= uint64(max(1, g.middleware.Settings().Of(tenant).Queue)) {
			return 0, false, api.NewError(api.Quota, "the tenant's queue is full", "wait for a call's end")
		}
		if revision, err = g.bus.queue.records.put(ctx, key, call, revision); err == nil {
			return revision, false, nil
		}
		if !conflict(err) { // otherwise, another request with the same key was first
			return failed(err)
		}
	}
}

// send puts a call into the queue.
func (g *Gateway) send(ctx context.Context, m *message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = publish(ctx, g.bus.queue.js, g.bus.queue.name+"."+tenantKey(m.Tenant), text)
	return err
}

// call handles requests about one call.
func (g *Gateway) call(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if !strings.HasPrefix(id, queuedPrefix) {
		g.handlePinned(w, r)
		return
	}
	key := tenantKey(server.IdentityOf(r.Context()).Tenant) + "." + id
	wait, _ := strconv.ParseFloat(r.URL.Query().Get("wait_ms"), 64) // a node reports invalid values
	const most = time.Minute
	until := time.Now().Add(min(most, time.Duration(wait)*time.Millisecond))
	if r.URL.Query().Get("follow") == "1" {
		until = time.Now().Add(maxWait)
	}
	for {
		call, revision, err := g.record(r.Context(), key)
		if err != nil {
			g.failed(w, r, cmp.Or(r.Context().Err(), err)) // a client that is gone gets no response
			return
		}
		waits, known := call.At == "" && call.End == nil, call.End != nil
		if waits && r.Method == http.MethodGet && time.Now().Before(until) {
			if g.await(r.Context(), key, revision, until); r.Context().Err() != nil {
				g.failed(w, r, r.Context().Err())
				return
			}
			continue
		}
		switch {
		case !strings.HasSuffix(r.URL.Path, "/"+id):
			g.output(w, r, call)
			return
		case call.At != "" && !known:
			var answered bool
			if call.End, answered = g.ask(w, r, call); answered {
				return
			}
		case call.At != "" && r.Method == http.MethodDelete:
			// The node forgets it, too; if this fails, it does so later.
			if res, err := g.transport.do(forwardRequest(r, nil), call.At); err == nil {
				res.Body.Close()
			}
		case waits && r.Method == http.MethodDelete:
			call.End = call.failed(false, api.NewError(api.Ended, "the call was canceled before it started", ""))
		}
		call.Gone = r.Method == http.MethodDelete
		if call.Gone || call.End != nil && !known { // a reported end does not change
			ctx, cancel := context.WithTimeout(r.Context(), jetStreamTimeout)
			_, err := g.bus.queue.records.put(ctx, key, call, revision)
			cancel()
			if conflict(err) {
				continue
			}
			if err != nil {
				g.failed(w, r, jetStreamError("cannot record the end of the call", err))
				return
			}
		}
		g.tell(w, r, http.StatusOK, call)
		return
	}
}

// tell writes the status of a call, after reserving memory if it is long. The status of a deleted call is shortened if
// there is no memory.
func (g *Gateway) tell(w http.ResponseWriter, r *http.Request, code int, call *record) {
	status := call.status()
	text, err := json.Marshal(status)
	if err != nil {
		panic(err) // impossible for this type
	}
	if len(text) > api.MaxListed {
		err = g.middleware.Hold(r.Context(), copies*int64(len(text)))
	}
	switch {
	case err == nil:
		writeJSON(w, code, json.RawMessage(text))
	case call.Gone:
		status.Shorten()
		writeJSON(w, code, status)
	default:
		g.failed(w, r, err)
	}
}

// ask forwards a request about a call to its node. If the call has ended, ask returns the end; otherwise it
// forwards the response.
func (g *Gateway) ask(w http.ResponseWriter, r *http.Request, call *record) (end *api.CallStatus, answered bool) {
	res, err := g.transport.do(forwardRequest(r, nil), call.At)
	if err != nil {
		g.failed(w, r, err)
		return nil, true
	}
	const most = 16 << 20
	body := io.Reader(res.Body)
	if r.Method != http.MethodDelete { // whose answer the node has only once
		body = g.held(r, body)
	}
	text, err := io.ReadAll(io.LimitReader(body, most))
	res.Body.Close()
	if err != nil {
		g.failed(w, r, err)
		return nil, true
	}
	var told api.CallStatus
	switch {
	case res.StatusCode == http.StatusNotFound: // it gave up before it knew that it had the call
		return call.failed(true, api.NewError(api.Lost, "the node of the call no longer knows it", "it may have run; retry it only if it may run twice")), false
	case res.StatusCode == http.StatusOK && json.Unmarshal(text, &told) == nil && told.State == api.Over:
		return ended(told), false
	}
	res.Body = io.NopCloser(bytes.NewReader(text))
	g.answer(w, r)(res, nil)
	return nil, true
}

// output serves the output of a call, which is on its node.
func (g *Gateway) output(w http.ResponseWriter, r *http.Request, call *record) {
	switch {
	case call.At == "":
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("X-Output-Size", "0")
		w.Header().Set("X-Output-Ended", strconv.FormatBool(call.End != nil))
	case !g.members.Has(call.At):
		api.NewError(api.Ended, "the node with the output of the call is lost", "").Write(w)
	default:
		g.answer(w, r)(g.transport.do(forwardRequest(r, nil), call.At))
	}
}

// record returns the record of a call. It adds an end if the call cannot continue.
func (g *Gateway) record(ctx context.Context, key string) (*record, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	call := &record{}
	revision, err := g.bus.queue.records.get(ctx, key, call)
	switch {
	case err != nil:
		return nil, 0, jetStreamError("cannot read the record of the call", err)
	case revision == 0 || call.Gone:
		return nil, 0, api.NewError(api.NoSuchCall, "no such call", "GET /v1/calls lists them")
	case call.End != nil:
		return call, revision, nil
	case call.At == "" && time.Since(call.Came) > maxWait:
		call.End = call.failed(false, api.NewError(api.Busy, "no node had a free slot for the call", "try again"))
	case call.At == "" && g.forgotten(ctx, call):
		call.End = call.failed(false, api.NewError(api.Busy, "the queue has lost the call", "try again"))
	case call.At != "" && !g.members.Alive(call.At):
		call.End = call.failed(true, api.NewError(api.Lost, "the node of the call was lost, with everything that ran there", "it may have run; retry it only if it may run twice"))
	default:
		return call, revision, nil
	}
	next, err := g.bus.queue.records.put(ctx, key, call, revision)
	switch {
	case conflict(err):
		return g.record(ctx, key)
	case err != nil:
		return nil, 0, jetStreamError("cannot read the record of the call", err)
	}
	return call, next, nil
}

// forgotten reports whether the queue has lost an unclaimed call: then everything in it is newer. A NATS
// server syncs its store only every two minutes (sync_interval), and relies on replicas until then.
func (g *Gateway) forgotten(ctx context.Context, call *record) bool {
	const margin = 10 * time.Second // for transmission and clock differences
	if time.Since(call.Came) < margin {
		return false
	}
	s, err := g.bus.queue.js.Stream(ctx, g.bus.queue.name)
	if err != nil {
		return false
	}
	state := s.CachedInfo().State // just fetched
	return state.Msgs == 0 || state.FirstTime.After(call.Came.Add(margin))
}

// await waits a while for a change of a record, which may never come.
func (g *Gateway) await(ctx context.Context, key string, revision uint64, until time.Time) {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	pause := tick
	var changes <-chan jetstream.KeyValueEntry
	if kv, err := g.bus.queue.records.open(ctx); err == nil {
		if w, err := kv.Watch(ctx, key); err == nil {
			defer stop(w)
			changes, pause = w.Updates(), 2*jetStreamTimeout
		}
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case e, ok := <-changes:
			if !ok {
				changes = nil // wait for the timer
			} else if e != nil && e.Revision() > revision {
				return
			}
		}
	}
}

// queuedCalls returns the status of a tenant's calls that no node lists, after reserving memory for it.
func (g *Gateway) queuedCalls(ctx context.Context, tenant string, listed map[string]bool) (all []entry, err error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	kv, err := g.bus.queue.records.open(ctx)
	if err != nil {
		return nil, err
	}
	w, err := kv.Watch(ctx, tenantKey(tenant)+".*", jetstream.IgnoreDeletes())
	if err != nil {
		return nil, err
	}
	defer stop(w)
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case e := <-w.Updates():
			if e == nil { // end of the list
				return all, nil
			}
			var r record
			if json.Unmarshal(e.Value(), &r) != nil || r.Gone || listed[r.ID] {
				continue
			}
			status := r.status()
			if len(e.Value()) > api.MaxListed {
				status.Shorten()
			}
			text, err := json.Marshal(status)
			if err != nil {
				panic(err) // impossible for this type
			}
			if err := g.middleware.Hold(ctx, copies*int64(len(text))); err != nil {
				return nil, err
			}
			all = append(all, entry{text, status.Came})
		}
	}
}

// stop ends a watcher. Its goroutine may wait until an update is received, and would keep that and all others.
func stop(w jetstream.KeyWatcher) {
	_ = w.Stop() // if it fails, it ends with the connection
	go func() {
		for range w.Updates() {
		}
	}()
}
