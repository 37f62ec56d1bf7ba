package cluster

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// connectionHeader names a stateful connection of the Model Context Protocol.
const connectionHeader = "Mcp-Session-Id"

// mcp forwards the messages of agents. A stateful connection belongs to one node, whose subject is part of the ID
// that the client gets. Without a connection, the session of a tool call determines the node.
func (g *Gateway) mcp(w http.ResponseWriter, r *http.Request) {
	if err := server.CheckOrigin(r, g.middleware.Settings().Hosts); err != nil { // nodes do not get the header
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
			// In the protocol, 404 tells the client that the connection is unknown and that it should open a new one.
			http.Error(w, "the node of the connection is gone", http.StatusNotFound)
			return
		}
		if name != "" && name != nameIn(at) {
			api.NewError(api.Usage, "the connection does not belong to the node in "+nodeHeader, "open the connection with this header").Write(w)
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
		// Any node returns the tool's error about the unknown session.
	}
	res, at, err := g.sendToAny(r, body)
	g.answer(w, r)(prefixConnection(strings.TrimPrefix(at, NodeKind+"."))(res, err))
}

// prefixConnection adds the node to the connection ID in a response.
func prefixConnection(node string) func(*http.Response, error) (*http.Response, error) {
	return func(res *http.Response, err error) (*http.Response, error) {
		if err == nil && res.Header.Get(connectionHeader) != "" {
			res.Header.Set(connectionHeader, node+"~"+res.Header.Get(connectionHeader))
		}
		return res, err
	}
}

// sessionOf returns the session of a tool call or of a file to read.
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
