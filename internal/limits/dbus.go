package limits

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// This file implements the part of D-Bus (D-Bus Specification) needed to call a manager: one call at a
// time, and signals. Linking a library would cost each start of sbxrun, which rarely needs it, 0.15 ms, mostly
// for package net.

// dbusConn is a connection to a manager or a bus, after the handshake.
type dbusConn struct {
	socket  *os.File
	in      *bufio.Reader
	serial  uint32    // serial of the last call
	signals []message // received while waiting for an answer
}

// message is a received message.
type message struct {
	kind      byte
	answers   uint32 // serial of the call
	iface     string
	member    string
	failure   string // name of an error
	signature string // signature of the body
	body      decoder
}

const (
	messageCall   = 1
	messageReturn = 2
	messageError  = 3
	messageSignal = 4
)

// Header fields.
const (
	fieldPath        = 1
	fieldInterface   = 2
	fieldMember      = 3
	fieldError       = 4
	fieldAnswers     = 5
	fieldDestination = 6
	fieldSignature   = 8
)

// maxMessage is larger than any message of a manager; the specification allows 128 MiB.
const maxMessage = 1 << 20

// dialDBus connects to a socket and performs the handshake. All operations on the connection fail with
// [os.ErrDeadlineExceeded] after the deadline. It first calls trust with the listener's credentials
// (unix(7), SO_PEERCRED). The caller closes the connection.
func dialDBus(path string, deadline time.Time, trust func(*unix.Ucred) error) (c *dbusConn, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if c == nil {
			unix.Close(fd)
		}
	}()
	// connect(2) blocks while the listener is busy.
	left := unix.NsecToTimeval(max(1000, int64(time.Until(deadline))))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &left); err != nil {
		return nil, fmt.Errorf("SO_SNDTIMEO: %w", err)
	}
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	if err == unix.EAGAIN {
		err = os.ErrDeadlineExceeded
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("credentials of the listener at %s: %w", path, err)
	}
	if err := trust(peer); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil { // for the poller, which implements deadlines
		return nil, err
	}
	c = &dbusConn{socket: os.NewFile(uintptr(fd), path)}
	c.in = bufio.NewReader(c.socket)
	err = c.socket.SetDeadline(deadline)
	if err == nil {
		err = c.authenticate()
	}
	if err != nil {
		c.close()
	}
	return c, err
}

func (c *dbusConn) close() { _ = c.socket.Close() } // no writes to lose

// authenticate performs the client's part of the handshake in one write, as systemd's own clients do.
// systemd (252) does not look at data that it has read together with BEGIN before more data arrives, so a
// call in the same write might get no answer. The OK shows that BEGIN was read.
func (c *dbusConn) authenticate() error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := io.WriteString(c.socket, "\x00AUTH EXTERNAL "+user+"\r\nBEGIN\r\n"); err != nil {
		return err
	}
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("authenticate: %w", err)
	}
	if !strings.HasPrefix(string(line), "OK ") {
		return fmt.Errorf("authenticate: %.80q", line)
	}
	return nil
}

// call calls a method and returns the body of the reply, which must have the signature out. args holds the
// arguments; in is their signature.
func (c *dbusConn) call(to, path, iface, member, in string, args *encoder, out string) (*decoder, error) {
	c.serial++
	var e encoder
	e.bytes('l', messageCall, 0, 1) // little-endian; version 1
	e.u32(uint32(len(args.data)))
	e.u32(c.serial)
	fields := e.array()
	for _, f := range []struct {
		code      byte
		signature string
		value     string
	}{{fieldPath, "o", path}, {fieldInterface, "s", iface}, {fieldMember, "s", member}, {fieldDestination, "s", to}, {fieldSignature, "g", in}} {
		if f.value == "" {
			continue
		}
		e.align(8)
		e.bytes(f.code)
		e.signature(f.signature)
		if f.signature == "g" {
			e.signature(f.value)
		} else {
			e.text(f.value)
		}
	}
	e.end(fields)
	e.align(8)
	if _, err := c.socket.Write(append(e.data, args.data...)); err != nil {
		return nil, err
	}
	for {
		m, err := c.read()
		switch {
		case err != nil:
			return nil, err
		case m.kind == messageSignal:
			c.signals = append(c.signals, *m)
		case m.answers != c.serial:
		case m.kind == messageError:
			if strings.HasPrefix(m.signature, "s") {
				if text := m.body.text(); m.body.err == nil && text != "" {
					return nil, errors.New(text)
				}
			}
			return nil, errors.New(m.failure)
		case m.signature != out:
			return nil, fmt.Errorf("%s returned type %.80q", member, m.signature)
		default:
			return &m.body, nil
		}
	}
}

// signal waits for the next signal of this name.
func (c *dbusConn) signal(iface, member, signature string) (*decoder, error) {
	for {
		m := &message{}
		if len(c.signals) > 0 {
			*m, c.signals = c.signals[0], c.signals[1:]
		} else {
			var err error
			if m, err = c.read(); err != nil {
				return nil, err
			}
		}
		if m.kind == messageSignal && m.iface == iface && m.member == member && m.signature == signature {
			return &m.body, nil
		}
	}
}

var errMessage = errors.New("invalid D-Bus message")

// read reads a message.
func (c *dbusConn) read() (*message, error) {
	var fixed [16]byte // up to the length of the fields
	if _, err := io.ReadFull(c.in, fixed[:]); err != nil {
		return nil, err
	}
	body, fields := binary.LittleEndian.Uint32(fixed[4:]), binary.LittleEndian.Uint32(fixed[12:])
	// Both lengths are in the sender's byte order, which is ours.
	if fixed[0] != 'l' || fixed[3] != 1 || body > maxMessage || fields > maxMessage {
		return nil, errMessage
	}
	header := len(fixed) + (int(fields)+7)&^7
	data := make([]byte, header+int(body))
	copy(data, fixed[:])
	if _, err := io.ReadFull(c.in, data[len(fixed):]); err != nil {
		return nil, err
	}
	m := &message{kind: fixed[1], body: decoder{data: data[header:]}}
	d := decoder{data: data[:len(fixed)+int(fields)], at: len(fixed)}
	for d.at < len(d.data) && d.err == nil {
		d.align(8)
		code := d.byte()
		switch kind := d.signature(); kind {
		case "s", "o":
			text := d.text()
			switch code {
			case fieldInterface:
				m.iface = text
			case fieldMember:
				m.member = text
			case fieldError:
				m.failure = text
			}
		case "g":
			if text := d.signature(); code == fieldSignature {
				m.signature = text
			}
		case "u":
			if n := d.u32(); code == fieldAnswers {
				m.answers = n
			}
		default:
			d.err = errMessage
		}
	}
	return m, d.err
}

// encoder encodes values. The zero value is empty.
type encoder struct{ data []byte }

func (e *encoder) align(n int) {
	for len(e.data)%n != 0 {
		e.data = append(e.data, 0)
	}
}

func (e *encoder) bytes(b ...byte) { e.data = append(e.data, b...) }

func (e *encoder) u32(n uint32) {
	e.align(4)
	e.data = binary.LittleEndian.AppendUint32(e.data, n)
}

func (e *encoder) u64(n uint64) {
	e.align(8)
	e.data = binary.LittleEndian.AppendUint64(e.data, n)
}

// text encodes a string or an object path.
func (e *encoder) text(s string) {
	e.u32(uint32(len(s)))
	e.data = append(append(e.data, s...), 0)
}

func (e *encoder) signature(s string) {
	e.data = append(append(append(e.data, byte(len(s))), s...), 0)
}

// array begins an array of structures, which are aligned to 8, and returns the argument for end.
func (e *encoder) array() (at int) {
	e.u32(0)
	at = len(e.data)
	e.align(8)
	return at
}

// end ends an array. Its length excludes the padding before the first element.
func (e *encoder) end(at int) {
	binary.LittleEndian.PutUint32(e.data[at-4:], uint32(len(e.data)-(at+7)&^7))
}

// decoder decodes values. After an error, which it keeps, they are zero.
type decoder struct {
	data []byte
	at   int
	err  error
}

// take returns the next n bytes.
func (d *decoder) take(n int) []byte {
	if d.err != nil || n < 0 || n > len(d.data)-d.at {
		d.err = errMessage
		return make([]byte, 8)
	}
	d.at += n
	return d.data[d.at-n : d.at]
}

func (d *decoder) align(n int) { d.take((n - d.at%n) % n) }

func (d *decoder) byte() byte { return d.take(1)[0] }

func (d *decoder) u32() uint32 {
	d.align(4)
	return binary.LittleEndian.Uint32(d.take(4))
}

func (d *decoder) text() string {
	n := d.u32()
	if n > maxMessage {
		d.err = errMessage
	}
	s := string(d.take(int(n)))
	d.take(1) // NUL
	if d.err != nil {
		return ""
	}
	return s
}

func (d *decoder) signature() string {
	s := string(d.take(int(d.byte())))
	d.take(1) // NUL
	if d.err != nil {
		return ""
	}
	return s
}
