package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// ControlFD is the proxy's socket to sbxrun: SOCK_SEQPACKET, with one [Message] per packet.
const ControlFD = 3

// maxMessage is the maximum size of a message. Every report fits: it has at most [MaxLines] lines with
// two texts each, which [Clean] bounds, and numbers.
const maxMessage = 160 << 10

// Kinds of a [Listener].
const (
	KindProxy   = "proxy"   // in the sandbox: HTTP and SOCKS5
	KindPublish = "publish" // on the host; forwards to Port in the sandbox
	KindConnect = "connect" // in the sandbox; forwards to the Unix socket Index
)

// Listener describes a socket that sbxrun sends.
type Listener struct {
	Kind  string `json:"kind"`
	Port  uint16 `json:"port,omitempty"`
	Index int    `json:"index,omitempty"`
}

// Message is a message between sbxrun and the proxy. sbxrun first sends Rules and Upstream, and the proxy
// replies with Checked or an Error. Then sbxrun sends Listeners, one for each descriptor of the message,
// and the proxy replies with Ready. From then on the proxy requests Sockets of the sandbox or a
// connection to the Unix socket Dial, one request at a time; the reply has the descriptors or an Errno.
// The proxy reports each Refused host once. When sbxrun shuts its end down, the proxy sends its Report
// and exits.
type Message struct {
	Rules     []Rule     `json:"rules,omitempty"`
	Upstream  *Upstream  `json:"upstream,omitempty"`
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
	to.SetEscapeHTML(false) // it would turn a < into six bytes
	if err := to.Encode(m); err != nil {
		return err
	}
	if b.Len() > maxMessage {
		return errors.New("the message is too long")
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

// ErrClosed means that the other end has closed the socket.
var ErrClosed = errors.New("the other end is closed")

// Receive waits for a message. The caller owns its descriptors: all that were sent, or none if the
// descriptor table had no room for all (MSG_CTRUNC, recvmsg(2)). The message itself is complete in both
// cases.
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
		err = errors.New("a message was truncated")
	default:
		err = json.Unmarshal(buf[:n], &m)
	}
	if err != nil {
		CloseAll(fds)
		fds = nil // their numbers may be reused by now
	}
	return m, fds, err
}

// maxDescriptors is the maximum in one message (unix(7), SCM_MAX_FD).
const maxDescriptors = 253

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
