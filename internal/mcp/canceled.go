package mcp

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// stdioTransport drops the responses to canceled requests, as the specification demands.
type stdioTransport struct{ sdk.Transport }

func (t stdioTransport) Connect(ctx context.Context) (sdk.Connection, error) {
	c, err := t.Transport.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &stdioConn{Connection: c, pending: map[jsonrpc.ID]bool{}}, nil
}

type stdioConn struct {
	sdk.Connection
	mu      sync.Mutex
	pending map[jsonrpc.ID]bool // whether a request without a response was canceled
}

func (c *stdioConn) Read(ctx context.Context) (jsonrpc.Message, error) {
	m, err := c.Connection.Read(ctx)
	r, ok := m.(*jsonrpc.Request)
	if err != nil || !ok {
		return m, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case r.IsCall():
		c.pending[r.ID] = false
	case r.Method == "notifications/cancelled":
		var params sdk.CancelledParams
		if json.Unmarshal(r.Params, &params) != nil {
			break // the SDK ignores it, too
		}
		id, err := jsonrpc.MakeID(params.RequestID)
		if _, ok := c.pending[id]; ok && err == nil {
			c.pending[id] = true
		}
	}
	return m, nil
}

func (c *stdioConn) Write(ctx context.Context, m jsonrpc.Message) error {
	if r, ok := m.(*jsonrpc.Response); ok {
		c.mu.Lock()
		canceled := c.pending[r.ID]
		delete(c.pending, r.ID)
		c.mu.Unlock()
		if canceled {
			return nil
		}
	}
	return c.Connection.Write(ctx, m)
}
