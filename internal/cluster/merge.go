package cluster

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// copies is the number of copies of a text in a merged response: as received, as parsed, as merged, and encoded.
const copies = 4

// held reads a response that is kept in memory.
type held struct {
	io.Reader
	hold func(n int64) error // reserves memory
}

func (h held) Read(p []byte) (int, error) {
	n, err := h.Reader.Read(p)
	if n > 0 {
		err = cmp.Or(h.hold(copies*int64(n)), err)
	}
	return n, err
}

// held reserves memory for the response of a node until the request ends: its client may read slowly.
func (g *Gateway) held(r *http.Request, body io.Reader) io.Reader {
	return held{body, func(n int64) error { return g.middleware.Hold(r.Context(), n) }}
}

// sendToAll sends a request to all nodes and returns their responses.
func (g *Gateway) sendToAll(r *http.Request) (texts [][]byte, err error) {
	nodes := g.members.Of(NodeKind)
	if len(nodes) == 0 {
		return nil, g.none()
	}
	const most = 16 << 20 // bytes of a response
	texts = make([][]byte, len(nodes))
	errs := make([]error, len(nodes))
	var all sync.WaitGroup
	for i, n := range nodes {
		all.Go(func() {
			res, err := g.transport.do(forwardRequest(r, nil), n.subject())
			if err != nil {
				errs[i] = err
				return
			}
			defer res.Body.Close()
			text, err := io.ReadAll(io.LimitReader(g.held(r, res.Body), most+1))
			if err == nil && len(text) > most {
				err = api.NewError(api.Setup, "the response of a node is too large", "send the request to that node with Sbxrun-Node")
			}
			if err == nil && res.StatusCode != http.StatusOK {
				e := &api.Error{}
				if err = json.Unmarshal(text, e); err == nil {
					err = e
				}
			}
			texts[i], errs[i] = text, err
		})
	}
	all.Wait()
	texts = slices.DeleteFunc(texts, func(text []byte) bool { return text == nil })
	if len(texts) == 0 {
		return nil, errors.Join(errs...)
	}
	for _, err := range errs {
		if e := (*api.Error)(nil); errors.As(err, &e) {
			return nil, e
		}
	}
	return texts, nil // except for nodes that were lost
}

// status adds up the status of all nodes.
func (g *Gateway) status(w http.ResponseWriter, r *http.Request) {
	out := &api.Status{Version: g.version, Tenant: server.IdentityOf(r.Context()).Tenant, Draining: g.draining.Load(), Recent: []api.Recent{}}
	if len(g.members.Of(NodeKind)) > 0 {
		texts, err := g.sendToAll(r)
		if err != nil {
			g.failed(w, r, err)
			return
		}
		for _, text := range texts {
			var one api.Status
			if json.Unmarshal(text, &one) != nil {
				continue // from another version
			}
			out.Running += one.Running
			out.Waiting += one.Waiting
			out.Sessions += one.Sessions
			out.Recent = append(out.Recent, one.Recent...)
		}
	}
	slices.SortStableFunc(out.Recent, func(a, b api.Recent) int { return b.Ended.Compare(a.Ended) })
	out.Recent = out.Recent[:min(len(out.Recent), api.MaxRecent)]
	if g.middleware.SeesAll(server.IdentityOf(r.Context())) {
		out.Machine = machine(g.members.Status().Nodes)
	}
	writeJSON(w, http.StatusOK, out)
}

// machine sums up all nodes.
func machine(nodes []api.Node) *api.Machine {
	m := &api.Machine{Tasks: []api.TaskBound{}, Nodes: nodes}
	for _, n := range nodes {
		m.Places += n.Places
		m.Running += n.Running
		m.Kept += n.Kept
		m.Waiting += n.Waiting
		m.Oldest = max(m.Oldest, n.Oldest)
		m.Sessions += n.Sessions
		m.Rooms.Idle += n.RoomsIdle
		m.Rooms.All += n.RoomsAll
	}
	return m
}

// entry is a member of a list.
type entry struct {
	text json.RawMessage
	time time.Time
}

// merge merges the lists of all nodes, sorted by the time in each entry.
func (g *Gateway) merge(w http.ResponseWriter, r *http.Request, name, by string) {
	texts, err := g.sendToAll(r)
	if err != nil {
		g.failed(w, r, err)
		return
	}
	var all []entry
	listed := map[string]bool{}
	for _, text := range texts {
		var list map[string][]json.RawMessage
		if json.Unmarshal(text, &list) != nil {
			continue // from another version
		}
		for _, one := range list[name] {
			var members map[string]json.RawMessage
			var at time.Time
			if json.Unmarshal(one, &members) == nil {
				_ = json.Unmarshal(members[by], &at) // without a time, it comes first
				listed[strings.Trim(string(members["id"]), `"`)] = true
			}
			all = append(all, entry{one, at})
		}
	}
	if name == "calls" {
		more, err := g.queuedCalls(r.Context(), server.IdentityOf(r.Context()).Tenant, listed)
		if err != nil {
			if _, ok := errors.AsType[*api.Error](err); !ok {
				err = jetStreamError("cannot list the waiting calls", err)
			}
			g.failed(w, r, err)
			return
		}
		all = append(all, more...)
	}
	slices.SortStableFunc(all, func(a, b entry) int { return a.time.Compare(b.time) })
	out := make([]json.RawMessage, 0, len(all))
	for _, e := range all {
		out = append(out, e.text)
	}
	writeJSON(w, http.StatusOK, map[string]any{name: out})
}
