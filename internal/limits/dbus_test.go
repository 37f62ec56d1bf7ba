package limits

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// removed is a signal as sent by systemd.
func removed() []byte {
	var body encoder
	body.u32(7)
	body.text(object + "/job/7")
	body.text("x.scope")
	body.text("done")
	var e encoder
	e.bytes('l', messageSignal, 0, 1)
	e.u32(uint32(len(body.data)))
	e.u32(1)
	fields := e.array()
	for code, value := range map[byte]string{fieldPath: object, fieldInterface: iface, fieldMember: "JobRemoved"} {
		e.align(8)
		e.bytes(code)
		e.signature(map[bool]string{true: "o", false: "s"}[code == fieldPath])
		e.text(value)
	}
	e.align(8)
	e.bytes(fieldSignature)
	e.signature("g")
	e.signature("uoss")
	e.end(fields)
	e.align(8)
	return append(e.data, body.data...)
}

func received(data []byte) (*message, error) {
	c := &dbusConn{in: bufio.NewReader(bytes.NewReader(data))}
	return c.read()
}

func TestMessage(t *testing.T) {
	m, err := received(removed())
	check.Require(t, err == nil && m.kind == messageSignal && m.iface == iface && m.member == "JobRemoved" && m.signature == "uoss", "%+v, %v", m, err)
	n, job, unit, result := m.body.u32(), m.body.text(), m.body.text(), m.body.text()
	check.That(t, n == 7 && job == object+"/job/7" && unit == "x.scope" && result == "done" && m.body.err == nil, "%d %q %q %q, %v", n, job, unit, result, m.body.err)
	text := m.body.text()
	check.That(t, text == "" && m.body.err != nil, "behind its end: %q, %v", text, m.body.err)
}

// Any message of a manager is read or rejected; lengths in it are bounded.
func TestMessageDamaged(t *testing.T) {
	whole := removed()
	for n := range whole {
		m, err := received(whole[:n])
		check.That(t, err != nil, "%d bytes of %d: %+v", n, len(whole), m)
	}
	for at := range whole {
		for _, b := range []byte{0, 1, 0x7f, 0x80, 0xff, whole[at] + 1} {
			damaged := bytes.Clone(whole)
			damaged[at] = b
			if m, err := received(damaged); err == nil {
				m.body.u32()
				for range 4 {
					m.body.text()
				}
				m.body.signature()
			}
		}
	}
	for _, at := range []int{4, 12} { // lengths of body and fields
		huge := bytes.Clone(whole)
		binary.LittleEndian.PutUint32(huge[at:], 1<<31)
		_, err := received(huge)
		check.That(t, err == errMessage, "a length of 2 GiB: %v", err)
	}
}
