package cluster

import (
	"bytes"
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

// checkKey is in the context of a request that a node is to check only.
type checkKey struct{}

// keepQueue makes the queue before the first call comes, and has it and all buckets stay, until ctx is done.
func (g *Gateway) keepQueue(ctx context.Context) {
	for ctx.Err() == nil {
		asking, cancel := context.WithTimeout(ctx, jetStreamTimeout)
		for _, b := range []*bucket{&g.bus.queue.records, &g.bus.leases.bucket, g.bus.quotas} {
			_ = b.stay(asking) // there may be no JetStream, and no need of it
		}
		_ = g.bus.queue.keepConsumer(asking) // as above
		cancel()
		select {
		case <-ctx.Done():
		case <-time.After(jetStreamTimeout):
		}
	}
}

// enqueue takes a call that nobody waits for. It is as good as begun when the queue has it.
func (g *Gateway) enqueue(w http.ResponseWriter, r *http.Request) {
	if res, err := g.queueCall(w, r); res != nil || err != nil {
		g.answer(w, r)(res, err)
	}
}

// queueCall queues a call, and answers; or returns a node's answer, that it is no right one.
func (g *Gateway) queueCall(w http.ResponseWriter, r *http.Request) (*http.Response, error) {
	body, err := g.body(w, r)
	if err != nil {
		return nil, api.AsError(err)
	}
	if len(body) > maxQueued {
		return nil, api.NewError(api.TooLarge, "a call in the queue has at most "+strconv.Itoa(maxQueued)+" bytes", "store its files by POST /v1/files")
	}
	if r.Header.Get(nodeHeader) != "" || usesStorage(body) {
		return nil, api.NewError(api.Usage, "the queue brings calls to any node, and volumes and snapshots are on one", "send it by POST /v1/run, with the header "+nodeHeader)
	}
	// A node knows languages and limits. It is asked also when it is busy.
	res, _, err := g.sendToAny(r.WithContext(context.WithValue(r.Context(), checkKey{}, true)), body)
	var ours *api.Error
	switch {
	case err != nil && !errors.As(err, &ours):
		return nil, api.NewError(api.Busy, "the node that was asked does not answer", "try again in a moment") // it was not to start it
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
	if call.At == "" && call.End == nil { // also once more: it may be that nothing was queued for it
		err = g.send(ctx, &message{Record: *call, Key: key, Revision: revision, Tenant: tenant, RequestID: who.RequestID, Body: body})
		if err != nil && !replayed {
			// It may be in the queue all the same.
			call.Gone, call.End = true, call.failed(false, api.NewError(api.Busy, "the queue did not take it", ""))
			if _, undone := g.bus.queue.records.put(context.WithoutCancel(ctx), key, call, revision); undone == nil {
				return nil, jetStreamError("the call cannot be queued", err)
			}
			return nil, ErrLost
		}
	}
	if replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
	writeJSON(w, http.StatusAccepted, call.status())
	return nil, nil
}

// newRecord makes a call's record; or, if there is one for its key, has call be that. One that has ended
// before it began, for want of a place or of NATS, is made anew: its client was told to try again.
func (g *Gateway) newRecord(ctx context.Context, tenant, key string, call *record, keyed bool) (revision uint64, replayed bool, err error) {
	failed := func(err error) (uint64, bool, error) {
		return 0, false, jetStreamError("the call cannot be queued", err)
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
		if info.State.Subjects[subject] >= uint64(max(1, g.door.Settings().Of(tenant).Queue)) {
			return 0, false, api.NewError(api.Quota, "as many calls of the tenant wait as may", "wait for a call's end")
		}
		if revision, err = g.bus.queue.records.put(ctx, key, call, revision); err == nil {
			return revision, false, nil
		}
		if !conflict(err) { // else another request with the same key was first
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

// call answers what is asked of one call.
func (g *Gateway) call(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if !strings.HasPrefix(id, queuedPrefix) {
		g.handlePinned(w, r)
		return
	}
	key := tenantKey(server.IdentityOf(r.Context()).Tenant) + "." + id
	wait, _ := strconv.ParseFloat(r.URL.Query().Get("wait_ms"), 64) // a node says what is wrong with it
	const most = time.Minute
	until := time.Now().Add(min(most, time.Duration(wait)*time.Millisecond))
	if r.URL.Query().Get("follow") == "1" {
		until = time.Now().Add(maxWait)
	}
	for {
		call, revision, err := g.record(r.Context(), key)
		if err != nil {
			g.failed(w, r, err)
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
			// The node forgets it too; if it does not hear of that, later.
			if res, err := g.transport.do(forwardRequest(r, nil), call.At); err == nil {
				res.Body.Close()
			}
		case waits && r.Method == http.MethodDelete:
			call.End = call.failed(false, api.NewError(api.Ended, "the call was canceled before it started", ""))
		}
		call.Gone = r.Method == http.MethodDelete
		if call.Gone || call.End != nil && !known { // what a client was told stays so
			ctx, cancel := context.WithTimeout(r.Context(), jetStreamTimeout)
			_, err := g.bus.queue.records.put(ctx, key, call, revision)
			cancel()
			if conflict(err) {
				continue
			}
			if err != nil {
				g.failed(w, r, jetStreamError("the end of the call cannot be recorded", err))
				return
			}
		}
		writeJSON(w, http.StatusOK, call.status())
		return
	}
}

// ask passes a request about a call on to the node that has it. If that says that the call has ended,
// the end is returned; all else is the answer.
func (g *Gateway) ask(w http.ResponseWriter, r *http.Request, call *record) (end *api.CallStatus, answered bool) {
	res, err := g.transport.do(forwardRequest(r, nil), call.At)
	if err != nil {
		g.failed(w, r, err)
		return nil, true
	}
	const most = 16 << 20
	text, err := io.ReadAll(io.LimitReader(res.Body, most))
	res.Body.Close()
	if err != nil {
		g.failed(w, r, err)
		return nil, true
	}
	var told api.CallStatus
	switch {
	case res.StatusCode == http.StatusNotFound: // it gave up, without knowing that it had the call
		return call.failed(true, api.NewError(api.Lost, "the node that had the call does not know it any more", "it may have run: try again only what may run twice")), false
	case res.StatusCode == http.StatusOK && json.Unmarshal(text, &told) == nil && told.State == api.Over:
		return ended(told), false
	}
	res.Body = io.NopCloser(bytes.NewReader(text))
	g.answer(w, r)(res, nil)
	return nil, true
}

// output answers with what a call has written: the node that runs it has that.
func (g *Gateway) output(w http.ResponseWriter, r *http.Request, call *record) {
	switch {
	case call.At == "":
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("X-Output-Size", "0")
		w.Header().Set("X-Output-Ended", strconv.FormatBool(call.End != nil))
	case !g.members.Has(call.At):
		api.NewError(api.Ended, "the node that had the call's output is lost", "").Write(w)
	default:
		g.answer(w, r)(g.transport.do(forwardRequest(r, nil), call.At))
	}
}

// record returns a call's record, with an end if it can have no other.
func (g *Gateway) record(ctx context.Context, key string) (*record, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	call := &record{}
	revision, err := g.bus.queue.records.get(ctx, key, call)
	switch {
	case err != nil:
		return nil, 0, jetStreamError("nothing is known of the call", err)
	case revision == 0 || call.Gone:
		return nil, 0, api.NewError(api.NoSuchCall, "no such call", "GET /v1/calls lists them")
	case call.End != nil:
		return call, revision, nil
	case call.At == "" && time.Since(call.Came) > maxWait:
		call.End = call.failed(false, api.NewError(api.Busy, "no node had a place for the call", "try again"))
	case call.At == "" && g.forgotten(ctx, call):
		call.End = call.failed(false, api.NewError(api.Busy, "the queue has lost the call", "try again"))
	case call.At != "" && !g.members.Alive(call.At):
		call.End = call.failed(true, api.NewError(api.Lost, "the node that had the call was lost; what ran there has ended with it", "it may have run: try again only what may run twice"))
	default:
		return call, revision, nil
	}
	next, err := g.bus.queue.records.put(ctx, key, call, revision)
	switch {
	case conflict(err):
		return g.record(ctx, key)
	case err != nil:
		return nil, 0, jetStreamError("nothing is known of the call", err)
	}
	return call, next, nil
}

// forgotten reports whether the queue has a call no more that no node has claimed: then all that is in it
// is younger. A server of NATS writes to the disk for good every two minutes (its sync_interval), and relies
// on replicas before.
func (g *Gateway) forgotten(ctx context.Context, call *record) bool {
	const margin = 10 * time.Second // longer than it takes to send it, and for clocks that differ
	if time.Since(call.Came) < margin {
		return false
	}
	s, err := g.bus.queue.js.Stream(ctx, g.bus.queue.name)
	if err != nil {
		return false
	}
	state := s.CachedInfo().State // of a moment ago
	return state.Msgs == 0 || state.FirstTime.After(call.Came.Add(margin))
}

// await waits until a record changes, but not for long: it may be that nobody changes it any more.
func (g *Gateway) await(ctx context.Context, key string, revision uint64, until time.Time) {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	pause := tick
	var changes <-chan jetstream.KeyValueEntry
	if kv, err := g.bus.queue.records.open(ctx); err == nil {
		if w, err := kv.Watch(ctx, key); err == nil {
			defer func() { _ = w.Stop() }() // at worst it is stopped with the connection
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
				changes = nil // until the timer
			} else if e != nil && e.Revision() > revision {
				return
			}
		}
	}
}

// queuedCalls are the records of a tenant's calls that no node lists.
func (g *Gateway) queuedCalls(ctx context.Context, tenant string, listed map[string]bool) (all []api.CallStatus, err error) {
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
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case e := <-w.Updates():
			if e == nil { // that was all
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
			all = append(all, status)
		}
	}
}
