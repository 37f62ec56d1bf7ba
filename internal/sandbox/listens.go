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

// maxTable bounds the size of a table of sockets that is read: about 25,000 rows. The kernel lists
// listening sockets first.
const maxTable = 4 << 20

// listensOn reports whether a TCP socket listens on the port, on any address of either family, in the network
// namespace of process pid. It reads that namespace's tables (proc_pid_net(5)) and makes no connection, so
// the program does not notice the probe.
//
// The caller must hold the process, and ignore the answer if it has ended since. In a shared namespace, such as
// the host's, any process may be listening.
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

// listens looks for the port in a table with rows such as
//
//	0: 0100007F:1F90 00000000:0000 0A …
//
// The fields are the local address and port in hexadecimal, the same of the remote end, and the state. Other
// lines, such as the heading, are ignored.
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

// Poll calls try at once and then at every interval, never concurrently, until try returns true, in which case
// Poll returns nil, or an error, or ctx is done, in which case it returns the cause. try must respect its
// ctx. The interval must be positive.
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
