package room

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxStatus limits the size of the status; bwrap writes about 250 bytes.
const maxStatus = 64 << 10

// readStatus reads the JSON object that bwrap writes to --info-fd: the PID of the room's PID 1 as seen from here, which
// the caller verifies, and the inode of its PID namespace. It returns io.EOF if bwrap exited first.
func readStatus(r io.Reader) (pid int, ns uint64, err error) {
	var m struct {
		PID int    `json:"child-pid"`
		NS  uint64 `json:"pid-namespace"`
	}
	err = json.NewDecoder(io.LimitReader(r, maxStatus)).Decode(&m)
	switch {
	case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF):
		return 0, 0, io.EOF
	case err != nil:
		return 0, 0, fmt.Errorf("read bwrap's status: %w", err)
	case m.PID <= 1 || m.PID > 1<<22 || m.NS == 0:
		return 0, 0, fmt.Errorf("bwrap's status names the impossible pid %d in PID namespace %d", m.PID, m.NS)
	}
	return m.PID, m.NS, nil
}
