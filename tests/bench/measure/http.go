package measure

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
)

// Object is a JSON object.
type Object map[string]any

// Connection is a persistent connection with little overhead.
type Connection struct {
	net.Conn
	r *bufio.Reader
}

func Dial(ctx context.Context, network, address string) (*Connection, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &Connection{c, bufio.NewReaderSize(c, 64<<10)}, nil
}

// Post returns a request that is ready to send. headers are additional lines, each with its line
// break.
func Post(path string, body any, headers string) []byte {
	text, err := json.Marshal(body)
	if err != nil {
		panic(err) // a programming error
	}
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: sbxrun\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, headers, len(text), text)
}

// Begin sends a request, and returns the answer without its body.
func (c *Connection) Begin(request []byte) (*http.Response, error) {
	if _, err := c.Write(request); err != nil {
		return nil, err
	}
	return http.ReadResponse(c.r, nil)
}

// Ask sends a request, and returns the body of the answer.
func (c *Connection) Ask(request []byte) ([]byte, error) {
	answer, err := c.Begin(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %.300s", answer.Status, body)
	}
	return body, err
}
