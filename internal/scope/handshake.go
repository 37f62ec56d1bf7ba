package scope

import (
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
)

// authenticate does the client's half of the handshake, all in one write as systemd's own clients do.
//
// godbus says BEGIN last and goes on with a call. What systemd (252) reads together with BEGIN it
// leaves in its buffer until there is more to read, so that now and then the first call is not answered.
// The OK that comes after BEGIN was sent says that it has been read.
func authenticate(socket net.Conn) error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := io.WriteString(socket, "\x00AUTH EXTERNAL "+user+"\r\nBEGIN\r\n"); err != nil {
		return err
	}
	var line []byte
	for b := make([]byte, 1); len(line) < 256; line = append(line, b[0]) {
		// One by one: messages may follow.
		if _, err := io.ReadFull(socket, b); err != nil {
			return fmt.Errorf("authenticate: %w", err)
		}
		if b[0] == '\n' {
			break
		}
	}
	if !strings.HasPrefix(string(line), "OK ") {
		return fmt.Errorf("authenticate: %q", line)
	}
	return nil
}

// authenticated is a connection after the handshake, for a library that insists on its
// own: that one gets its answers from here, and the other side hears nothing of it.
type authenticated struct {
	net.Conn
	answers *strings.Reader
	begun   bool
}

func newAuthenticated(c net.Conn) *authenticated {
	return &authenticated{Conn: c, answers: strings.NewReader("REJECTED EXTERNAL\r\nOK 0\r\n")}
}

func (a *authenticated) Read(b []byte) (int, error) {
	if a.answers.Len() > 0 {
		return a.answers.Read(b)
	}
	return a.Conn.Read(b)
}

func (a *authenticated) Write(b []byte) (int, error) {
	if a.begun {
		return a.Conn.Write(b)
	}
	a.begun = string(b) == "BEGIN\r\n"
	return len(b), nil
}
