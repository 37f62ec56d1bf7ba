package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// ControlFD is the proxy's socket to sbxrun: SOCK_SEQPACKET, a [Message] in each packet.
const ControlFD = 3

// maxMessage bounds a message. A report takes less, whatever is in it: [MaxLines], those of hosts with two
// texts as [Clean] leaves them, and numbers.
const maxMessage = 160 << 10

// What listens, of a [Listener].
const (
	KindProxy   = "proxy"   // in the sandbox: HTTP and SOCKS5
	KindPublish = "publish" // on the host: each connection leads to Port in the sandbox
	KindConnect = "connect" // in the sandbox: each connection leads to the unix socket Index
)

// Listener says what a socket is for that comes with the settings.
type Listener struct {
	Kind  string `json:"kind"`
	Port  uint16 `json:"port,omitempty"`
	Index int    `json:"index,omitempty"`
}

// Message is what sbxrun and the proxy say to each other. sbxrun begins with Rules, which are
// answered by Checked or an Error, and goes on with Listeners, one for each descriptor that comes
// with them, which are answered by Ready. Then the proxy asks, one thing at a time, for Sockets of
// the sandbox or for a connection to unix socket Dial, and gets them, or an error number, by the next
// message. Of each host that it has Refused it says so at the first time. When sbxrun shuts its end
// down the proxy answers with Report, and exits.
type Message struct {
	Rules     []Rule     `json:"rules,omitempty"`
	Checked   bool       `json:"checked,omitempty"`
	Error     string     `json:"error,omitempty"`
	Listeners []Listener `json:"listeners,omitempty"`
	Ready     bool       `json:"ready,omitempty"`

	Sockets int  `json:"sockets,omitempty"`
	Dial    *int `json:"dial,omitempty"`
	Errno   int  `json:"errno,omitempty"`

	Refused *result.ReportHost    `json:"refused,omitempty"`
	Report  *result.ReportNetwork `json:"report,omitempty"`
}

// Send sends a message with descriptors on a socket.
func Send(conn *os.File, m Message, fds ...int) error {
	var b bytes.Buffer
	to := json.NewEncoder(&b)
	to.SetEscapeHTML(false) // of a < of the sandbox's it would make six bytes
	if err := to.Encode(m); err != nil {
		return err
	}
	if b.Len() > maxMessage {
		return errors.New("the list is too long")
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		failed = unix.Sendmsg(int(fd), b.Bytes(), rights, nil, unix.MSG_NOSIGNAL)
		return failed != unix.EAGAIN
	})
	if err != nil {
		return err
	}
	return failed
}

// ErrClosed says that the other end is closed.
var ErrClosed = errors.New("the other end is closed")

// Receive waits for a message. Its descriptors are the caller's: all that were sent, or none if the table of
// descriptors had no room for all (MSG_CTRUNC, recvmsg(2)). The message itself is whole then.
func Receive(conn *os.File) (m Message, fds []int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return m, nil, err
	}
	buf := make([]byte, maxMessage)
	oob := make([]byte, unix.CmsgSpace(4*maxDescriptors))
	var n, oobn, flags int
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		n, oobn, flags, _, failed = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		return failed != unix.EAGAIN && failed != unix.EINTR
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return m, nil, err
	}
	if list, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for _, c := range list {
			if got, err := unix.ParseUnixRights(&c); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	if flags&unix.MSG_CTRUNC != 0 {
		CloseAll(fds)
		fds = nil
	}
	switch {
	case n == 0:
		err = ErrClosed
	case flags&unix.MSG_TRUNC != 0:
		err = errors.New("a message was cut")
	default:
		err = json.Unmarshal(buf[:n], &m)
	}
	if err != nil {
		CloseAll(fds)
		fds = nil // their numbers may be others' by now
	}
	return m, fds, err
}

// maxDescriptors is how many come in one message (unix(7), SCM_MAX_FD).
const maxDescriptors = 253

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
