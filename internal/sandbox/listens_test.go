package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

const heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

func TestTable(t *testing.T) {
	const rest = " 00000000:00000000 00:00000000 00000000     0        0 209 1 000000004343b8b8 100 0 0 10 0\n"
	const want = "   0: 00000000:1F90 00000000:0000 0A" + rest
	tests := []struct {
		name, table string
		want        bool
	}{
		{"empty", "", false},
		{"listens", heading + want, true},
		{"after others", heading + "   0: 0100007F:0016 00000000:0000 0A" + rest + "   1: 0100007F:8124 0100007F:1F90 01" + rest + want, true},
		{"IPv6", heading + "   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A" + rest, true},
		{"no line break at the end", strings.TrimSuffix(want, "\n"), true},
		{"connected", heading + "   0: 0100007F:1F90 0100007F:8124 01" + rest, false},
		{"listens elsewhere, remote looks so", heading + "   0: 00000000:1F91 00000000:1F90 0A" + rest, false},
		{"bound only", heading + "   0: 00000000:1F90 00000000:0000 07" + rest, false},
		{"longer port", "   0: 00000000:01F90 00000000:0000 0A" + rest, false},
		{"port without a colon", "   0: 1F90 00000000:0000 0A" + rest, false},
		{"longer state", "   0: 00000000:1F90 00000000:0000 0AA" + rest, false},
		{"state cut off", "   0: 00000000:1F90 00000000:0000 0", false},
		{"no remote end", "   0: 00000000:1F90 0A\n", false},
		{"state in the next line", "   0: 00000000:1F90 00000000:0000\n0A\n", false},
		{"odd rows before", "\n \n:\n\x00\xff\n0A 0A 0A 0A\n" + want, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(test.table), iotest.OneByteReader(strings.NewReader(test.table))} {
				got, err := listens(r, 8080)
				check.That(t, got == test.want && err == nil, "%t, %v; want %t", got, err, test.want)
			}
		})
	}
}

func TestTableErrors(t *testing.T) {
	got, err := listens(iotest.TimeoutReader(iotest.OneByteReader(strings.NewReader(heading))), 1)
	check.That(t, !got && errors.Is(err, iotest.ErrTimeout), "%t, %v; want the error of reading", got, err)
}

// lookup reads the tables that exist, up to a bound.
func TestLookup(t *testing.T) {
	const row = "   0: 00000000:1F90 00000000:0000 0A\n"
	large := strings.Repeat(heading, maxTable/len(heading)+1)
	tests := []struct {
		name   string
		tables map[string]string
		want   bool
		err    error
	}{
		{"IPv4", map[string]string{"tcp": row, "tcp6": heading}, true, nil},
		{"IPv6", map[string]string{"tcp": heading, "tcp6": row}, true, nil},
		{"neither", map[string]string{"tcp": heading, "tcp6": heading}, false, nil},
		{"IPv6 is off", map[string]string{"tcp": heading}, false, nil},
		{"IPv6 is off, IPv4", map[string]string{"tcp": row}, true, nil},
		{"no tables", nil, false, os.ErrNotExist},
		{"past the limit", map[string]string{"tcp": large + row, "tcp6": ""}, false, nil},
		{"large, and IPv6", map[string]string{"tcp": large, "tcp6": row}, true, nil},
		{"endless row", map[string]string{"tcp": strings.Repeat("x", maxTable), "tcp6": row}, false, bufio.ErrTooLong},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, table := range test.tables {
				check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(table), 0o600))
			}
			got, err := lookup(dir, 8080)
			check.That(t, got == test.want && errors.Is(err, test.err), "%t, %v; want %t, %v", got, err, test.want, test.err)
		})
	}
}

// A port is found only if the table has it, and a listening socket is found whatever precedes it, unless the
// table cannot be read.
func FuzzTable(f *testing.F) {
	f.Add(heading, uint16(8080))
	f.Add("   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000", uint16(8080))
	f.Fuzz(func(t *testing.T, table string, port uint16) {
		row := fmt.Sprintf("0: 0100007F:%04X 00000000:0000 0A", port)
		found, err := listens(strings.NewReader(table), port)
		check.That(t, !found || err == nil && strings.Contains(table, row[11:16]), "found port %d, %v", port, err)
		found, again := listens(strings.NewReader(table+"\n"+row), port)
		check.That(t, found || err != nil && again != nil, "port %d not found, %v, %v", port, err, again)
	})
}

func listen(t *testing.T, network, address string) (l net.Listener, port uint16) {
	t.Helper()
	l, err := net.Listen(network, address)
	check.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return l, uint16(l.Addr().(*net.TCPAddr).Port)
}

func expect(t *testing.T, pid int, port uint16, want bool) {
	t.Helper()
	got, err := listensOn(pid, port)
	check.That(t, got == want && err == nil, "process %d, port %d: %t, %v; want %t", pid, port, got, err, want)
}

func TestListens(t *testing.T) {
	for _, test := range [][2]string{{"tcp4", "127.0.0.1:0"}, {"tcp4", "0.0.0.0:0"}, {"tcp6", "[::1]:0"}, {"tcp", ":0"}} {
		t.Run(test[0]+" "+test[1], func(t *testing.T) {
			if _, err := os.Stat("/proc/self/net/tcp6"); err != nil && test[0] == "tcp6" {
				return // no IPv6 here
			}
			l, port := listen(t, test[0], test[1])
			expect(t, os.Getpid(), port, true)

			// The remains of a connection have the port without listening.
			c, err := net.Dial("tcp", l.Addr().String())
			check.Must(t, err)
			defer c.Close()
			expect(t, os.Getpid(), uint16(c.LocalAddr().(*net.TCPAddr).Port), false)
			s, err := l.Accept()
			check.Must(t, err)
			defer s.Close()
			l.Close()
			expect(t, os.Getpid(), port, false)
		})
	}
}

// listensOn reads the tables of a process in another network namespace.
func TestListensElsewhere(t *testing.T) {
	const inside = "SBXRUN_TEST_IN_NAMESPACE"
	if os.Getenv(inside) != "" {
		_, port := listen(t, "tcp", ":1") // no program on the host listens there
		fmt.Println("port", port)
		io.Copy(io.Discard, os.Stdin) // until the test process ends
		return
	}
	_, ours := listen(t, "tcp", "127.0.0.1:0")
	c := exec.Command(os.Args[0], "-test.run=^TestListensElsewhere$")
	c.Env = append(os.Environ(), inside+"=1")
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	in, err := c.StdinPipe()
	check.Must(t, err)
	out, err := c.StdoutPipe()
	check.Must(t, err)
	check.Must(t, c.Start())
	t.Cleanup(func() { in.Close(); c.Wait() })
	var theirs uint16
	_, err = fmt.Fscanf(out, "port %d\n", &theirs)
	check.Must(t, err)

	expect(t, c.Process.Pid, theirs, true)
	expect(t, os.Getpid(), ours, true)
	expect(t, c.Process.Pid, ours, false)
	expect(t, os.Getpid(), theirs, false)
	pid := c.Process.Pid
	in.Close()
	c.Wait()
	got, err := listensOn(pid, theirs)
	check.That(t, !got && errors.Is(err, os.ErrNotExist), "process gone: %t, %v", got, err)
}

func TestProbe(t *testing.T) {
	errTest := errors.New("test")
	tests := []struct {
		name  string
		tries int // number of calls; the last one …
		last  func(cancel func()) (bool, error)
		want  error
	}{
		{"at once", 1, func(func()) (bool, error) { return true, nil }, nil},
		{"later", 5, func(func()) (bool, error) { return true, nil }, nil},
		{"fails at once", 1, func(func()) (bool, error) { return false, errTest }, errTest},
		{"fails later", 5, func(func()) (bool, error) { return false, errTest }, errTest},
		{"cancelled", 3, func(cancel func()) (bool, error) { cancel(); return false, nil }, context.Canceled},
		{"cancelled before", 0, nil, context.Canceled},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if test.tries == 0 {
				cancel()
			}
			tries := 0
			err := Poll(ctx, time.Millisecond, func(context.Context) (bool, error) {
				if tries++; tries == test.tries {
					return test.last(cancel)
				}
				return false, nil
			})
			check.That(t, err == test.want && tries == test.tries, "%v after %d tries, want %v after %d", err, tries, test.want, test.tries)
		})
	}

	// However long the interval is, neither the first call nor the cause waits for it.
	ctx, cancel := context.WithCancelCause(t.Context())
	err := Poll(ctx, time.Hour, func(context.Context) (bool, error) {
		time.AfterFunc(time.Millisecond, func() { cancel(errTest) })
		return false, nil
	})
	check.Equal(t, err, errTest, "cancelled while it waits")
}
