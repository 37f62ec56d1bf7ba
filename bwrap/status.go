package bwrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// statusStream reads bwrap's --json-status-fd: one JSON object after another,
// each of which may arrive in several writes, with members we do not know.
type statusStream struct{ dec *json.Decoder }

// maxStatus bounds what is read of the stream; bwrap writes about 250 bytes.
const maxStatus = 64 << 10

func newStatusStream(r io.Reader) statusStream {
	return statusStream{json.NewDecoder(io.LimitReader(r, maxStatus))}
}

// statusChild is bwrap's first word: init exists.
type statusChild struct {
	pid   int    // of init, as seen from here; to be verified
	pidNS uint64 // inode of its PID namespace; bubblewrap 0.5
}

// child reads up to the object that names init. io.EOF if bwrap ended before.
func (s statusStream) child() (statusChild, error) {
	for {
		var m struct {
			PID   *int64  `json:"child-pid"`
			PIDNS *uint64 `json:"pid-namespace"`
		}
		if err := s.dec.Decode(&m); err != nil {
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

// exitCode reads on to the payload's exit code. io.EOF if bwrap ended without
// one: the payload was not executed, or was killed together with init.
func (s statusStream) exitCode() (int, error) {
	for {
		var m struct {
			ExitCode *int64 `json:"exit-code"`
		}
		if err := s.dec.Decode(&m); err != nil {
			return 0, streamError(err)
		}
		if m.ExitCode == nil {
			continue
		}
		if *m.ExitCode < 0 || *m.ExitCode > 255 {
			return 0, fmt.Errorf("bwrap's status names the impossible exit code %d", *m.ExitCode)
		}
		return int(*m.ExitCode), nil
	}
}

// streamError takes an object that was cut for the end: bwrap died writing it.
func streamError(err error) error {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return io.EOF
	case errors.As(err, &syntax), errors.As(err, &kind):
		return errors.New("bwrap's status is not what bubblewrap writes")
	}
	return err
}
