package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// maxTable bounds what is read of a table of sockets, about 25,000 rows. The
// kernel lists those that listen first.
const maxTable = 4 << 20

// listensOn reports whether a TCP socket listens on the port, on any address of
// either family, in the network namespace of process pid: it reads that
// namespace's own tables, wherever the caller is (proc_pid_net(5)). Nothing is
// connected, so that the program does not see the probe.
//
// The caller must hold the process, and if it has ended meanwhile not believe the
// answer. In a namespace that is shared, as the host's, anybody may be listening.
func listensOn(pid int, port uint16) (bool, error) {
	return lookup(fmt.Sprintf("/proc/%d/net", pid), port)
}

func lookup(dir string, port uint16) (bool, error) {
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open(dir + "/" + table)
		if table == "tcp6" && errors.Is(err, fs.ErrNotExist) {
			break // a kernel without IPv6
		}
		if err != nil {
			return false, err
		}
		found, err := listens(io.LimitReader(f, maxTable), port)
		f.Close()
		if found || err != nil {
			return found, err
		}
	}
	return false, nil
}

// listens looks for the port in a table, whose rows begin so:
//
//	0: 0100007F:1F90 00000000:0000 0A …
//
// with the local address, a colon and the port, all hexadecimal, the same of the
// remote end, and the state. What does not look like that is no socket, as the
// heading is none.
func listens(table io.Reader, port uint16) (bool, error) {
	const stateListen = "0A" // TCP_LISTEN of the kernel's include/net/tcp_states.h
	want := fmt.Appendf(nil, ":%04X", port)
	rows := bufio.NewScanner(table)
	for rows.Scan() {
		f := bytes.Fields(rows.Bytes())
		if len(f) > 3 && string(f[3]) == stateListen && bytes.HasSuffix(f[1], want) {
			return true, nil
		}
	}
	return false, rows.Err()
}

// Poll tries at once and then at every interval, never twice at a time, until
// try says yes, which is nil, or fails, or ctx is done, which is its cause. try
// must heed its ctx. The interval is positive.
func Poll(ctx context.Context, interval time.Duration, try func(context.Context) (bool, error)) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for ctx.Err() == nil {
		if ok, err := try(ctx); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return context.Cause(ctx)
}
