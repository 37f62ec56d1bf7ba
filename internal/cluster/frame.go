package cluster

import (
	"encoding/binary"
	"errors"
)

// Bits of a frame.
const (
	opens   = 1 << iota // the first frame of a connection, until the other side was heard, or for [opensFor]
	ends                // there is nothing after the data of this frame
	resets              // the connection is over on the other side
	asks                // for a frame in return
	refuses             // with resets: nothing of the connection was begun, nor will be
)

// frame is one message of a connection.
type frame struct {
	bits  byte
	at    uint64 // of the first byte of data in the stream
	ack   uint64 // all before that has arrived
	limit uint64 // how far the receiver may send
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

// parse reads a frame. Its data is that of the message.
func parse(b []byte) (f frame, err error) {
	if len(b) < headSize {
		return f, errors.New("a message that is no frame")
	}
	return frame{b[0], binary.BigEndian.Uint64(b[1:]), binary.BigEndian.Uint64(b[9:]), binary.BigEndian.Uint64(b[17:]), b[headSize:]}, nil
}
