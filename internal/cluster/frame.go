package cluster

import (
	"encoding/binary"
	"errors"
)

// Bits of a frame.
const (
	opens   = 1 << iota // opens a connection; sent until the peer responds, or for [opensFor]
	ends                // the stream ends with this frame
	resets              // the sender no longer has this connection
	asks                // requests a frame in return
	refuses             // with resets: the request was not started, and will not be
)

// frame is one message of a connection.
type frame struct {
	bits  byte
	at    uint64 // stream offset of data
	ack   uint64 // stream offset up to which everything has arrived
	limit uint64 // stream offset up to which the receiver may send
	data  []byte
}

const headSize = 1 + 8 + 8 + 8

func (f *frame) append(to []byte) []byte {
	to = append(to, f.bits)
	to = binary.BigEndian.AppendUint64(to, f.at)
	to = binary.BigEndian.AppendUint64(to, f.ack)
	to = binary.BigEndian.AppendUint64(to, f.limit)
	return append(to, f.data...)
}

// parse parses a frame, which shares the memory of the message.
func parse(b []byte) (f frame, err error) {
	if len(b) < headSize {
		return f, errors.New("invalid frame")
	}
	return frame{b[0], binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint64(b[9:]), binary.BigEndian.Uint64(b[17:]), b[headSize:]}, nil
}
