package cluster

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// connectionHeader names a connection of the Model Context Protocol that has a state.
const connectionHeader = "Mcp-Session-Id"

// mcp passes on what an agent sends. A connection with a state belongs to one node, whose subject the
// client gets as a part of its id; without one, a tool's session says which node is meant.
func (g *Gateway) mcp(w http.ResponseWriter, r *http.Request) {
	if err := server.CheckOrigin(r, g.door.Settings().Hosts); err != nil { // nodes do not get the header
		w.Header().Set("Connection", "close") // or net/http would first read the body
		api.AsError(err).Write(w)
		return
	}
	body, err := g.body(w, r)
	var name string
	if err == nil {
		name, err = targetNode(r, body)
	}
	if err != nil {
		api.AsError(err).Write(w)
		return
	}
	if id := r.Header.Get(connectionHeader); id != "" {
		node, own, _ := strings.Cut(id, "~")
		at, err := g.home(node+".0", true)
		if err != nil {
			// The protocol has 404 for a connection that is no longer known: a client begins anew.
			http.Error(w, "the connection's node is not there", http.StatusNotFound)
			return
		}
		if name != "" && name != nameIn(at) {
			api.NewError(api.Usage, "the connection belongs to another node than the header "+nodeHeader+" names", "begin it with the header").Write(w)
			return
		}
		r.Header.Set(connectionHeader, own)
		g.answer(w, r)(prefixConnection(node)(g.transport.do(forwardRequest(r, body), at)))
		return
	}
	if session := sessionOf(body); session != "" {
		at, err := g.home(session, true)
		if err == nil {
			g.answer(w, r)(g.transport.do(forwardRequest(r, body), at))
			return
		}
		if e := api.AsError(err); e.Failure.Code != api.Ended && e.Failure.Code != api.NoSuchSession {
			e.Write(w)
			return
		}
		// Any node says in the tool's own words that there is no such session.
	}
	res, at, err := g.sendToAny(r, body)
	g.answer(w, r)(prefixConnection(strings.TrimPrefix(at, NodeKind+"."))(res, err))
}

// prefixConnection has the id of a connection in an answer begin with its node.
func prefixConnection(node string) func(*http.Response, error) (*http.Response, error) {
	return func(res *http.Response, err error) (*http.Response, error) {
		if err == nil && res.Header.Get(connectionHeader) != "" {
			res.Header.Set(connectionHeader, node+"~"+res.Header.Get(connectionHeader))
		}
		return res, err
	}
}

// sessionOf returns the session that a call of a tool, or a read of a file, is about.
func sessionOf(body []byte) string {
	var m struct {
		Params struct {
			Arguments struct {
				Session string `json:"session"`
			} `json:"arguments"`
			URI string `json:"uri"`
		} `json:"params"`
	}
	if json.Unmarshal(body, &m) != nil {
		return ""
	}
	if rest, ok := strings.CutPrefix(m.Params.URI, "sbxrun://sessions/"); ok {
		id, _, _ := strings.Cut(rest, "/")
		return id
	}
	return m.Params.Arguments.Session
}
