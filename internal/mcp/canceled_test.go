package mcp

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A canceled request gets no response; later requests do, and so does one that a late cancellation names.
func TestCanceled(t *testing.T) {
	p := sdk.NewServer(&sdk.Implementation{Name: "test"}, nil)
	started, ended := make(chan bool), make(chan bool)
	p.AddTool(&sdk.Tool{Name: "wait", InputSchema: inputSchema[struct{}]()}, func(ctx context.Context, _ *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		started <- true
		<-ctx.Done()
		close(ended)
		return text("canceled"), nil
	})
	in, client := io.Pipe()
	out, server := io.Pipe()
	go func() { _ = p.Run(t.Context(), stdioTransport{&sdk.IOTransport{Reader: in, Writer: server}}) }()
	send := func(line string) {
		t.Helper()
		_, err := io.WriteString(client, line+"\n")
		check.Must(t, err)
	}
	lines := bufio.NewReader(out)
	receive := func() string {
		t.Helper()
		line, err := lines.ReadString('\n')
		check.Must(t, err)
		var m struct{ ID json.RawMessage }
		check.Must(t, json.Unmarshal([]byte(line), &m))
		return string(m.ID)
	}
	send(`{"jsonrpc":"2.0","id":"a","method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`)
	id := receive()
	check.Require(t, id == `"a"`, "%v", id)
	send(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"a"}}`) // too late
	send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"wait","arguments":{}}}`)
	<-started
	send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`)
	<-ended
	for _, id := range []string{"2", `"a"`} {
		send(`{"jsonrpc":"2.0","id":` + id + `,"method":"ping"}`)
		check.Equal(t, receive(), id, "response to")
	}
}
