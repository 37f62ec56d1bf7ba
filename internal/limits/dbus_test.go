package limits

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"testing"
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
	if err != nil || m.kind != messageSignal || m.iface != iface || m.member != "JobRemoved" || m.signature != "uoss" {
		t.Fatalf("%+v, %v", m, err)
	}
	if n, job, unit, result := m.body.u32(), m.body.text(), m.body.text(), m.body.text(); n != 7 || job != object+"/job/7" || unit != "x.scope" || result != "done" || m.body.err != nil {
		t.Errorf("%d %q %q %q, %v", n, job, unit, result, m.body.err)
	}
	if text := m.body.text(); text != "" || m.body.err == nil {
		t.Errorf("behind its end: %q, %v", text, m.body.err)
	}
}

// Any message of a manager is read or rejected; lengths in it are bounded.
func TestMessageDamaged(t *testing.T) {
	whole := removed()
	for n := range whole {
		if m, err := received(whole[:n]); err == nil {
			t.Errorf("%d bytes of %d: %+v", n, len(whole), m)
		}
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
		if _, err := received(huge); err != errMessage {
			t.Errorf("a length of 2 GiB: %v", err)
		}
	}
}
