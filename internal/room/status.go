package room

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxStatus limits the size of the status; bwrap writes about 250 bytes.
const maxStatus = 64 << 10

// statusChild is the room's PID 1.
type statusChild struct {
	pid   int    // as seen from here; to be verified
	pidNS uint64 // inode of its PID namespace
}

// readStatus reads a JSON object from bwrap's --info-fd. The object may arrive in several writes and have unknown
// members. readStatus returns io.EOF if bwrap exited first.
func readStatus(r io.Reader) (statusChild, error) {
	dec := json.NewDecoder(io.LimitReader(r, maxStatus))
	for {
		var m struct {
			PID   *int64  `json:"child-pid"`
			PIDNS *uint64 `json:"pid-namespace"`
		}
		if err := dec.Decode(&m); err != nil {
			return statusChild{}, streamError(err)
		}
		if m.PID == nil {
			continue
		}
		if *m.PID <= 1 || *m.PID > 1<<22 {
			return statusChild{}, fmt.Errorf("bwrap's status names the impossible pid %d", *m.PID)
		}
		if m.PIDNS == nil || *m.PIDNS == 0 {
			return statusChild{}, errors.New("bwrap's status names no PID namespace")
		}
		return statusChild{pid: int(*m.PID), pidNS: *m.PIDNS}, nil
	}
}

// streamError maps an error of the JSON decoder. A truncated object becomes io.EOF, because bwrap died while writing it.
func streamError(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return io.EOF
	case errors.As(err, new(*json.SyntaxError)), errors.As(err, new(*json.UnmarshalTypeError)):
		return errors.New("bwrap's status is not what bubblewrap writes")
	}
	return err
}
