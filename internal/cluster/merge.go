package cluster

import (
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
			text, err := io.ReadAll(io.LimitReader(res.Body, most+1))
			if err == nil && len(text) > most {
				err = api.NewError(api.Setup, "the response of a node is too large", "send the request to that node with Sbxrun-Node")
			}
			if err == nil {
				err = g.middleware.Hold(r.Context(), 2*int64(len(text))) // and the parsed form
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

// merge merges the lists of all nodes, sorted by the time in each entry.
func (g *Gateway) merge(w http.ResponseWriter, r *http.Request, name, by string) {
	texts, err := g.sendToAll(r)
	if err != nil {
		g.failed(w, r, err)
		return
	}
	type entry struct {
		text json.RawMessage
		time time.Time
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
			g.failed(w, r, jetStreamError("cannot list the waiting calls", err))
			return
		}
		for _, call := range more {
			text, err := json.Marshal(call)
			if err != nil {
				panic(err) // impossible for this type
			}
			all = append(all, entry{text, call.Came})
		}
	}
	slices.SortStableFunc(all, func(a, b entry) int { return a.time.Compare(b.time) })
	out := make([]json.RawMessage, 0, len(all))
	for _, e := range all {
		out = append(out, e.text)
	}
	writeJSON(w, http.StatusOK, map[string]any{name: out})
}
