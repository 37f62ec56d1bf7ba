package tests

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The command shares its stdin, an open file, with sbxrun and its caller. On a terminal or a
// connection that is stdout as well. When the command sets O_NONBLOCK and fills it, sbxrun's
// report is still complete, and the flags are restored for the caller even if the command was
// killed.
func TestSharedOpenFile(t *testing.T) {
	t.Parallel()
	const fill = `
import fcntl, os, time
fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_APPEND)
os.write(2, b"x" * 30000)
for i in range(16): os.write(1, b"x" * 30000)
try:
    while True: os.write(0, b"y" * 1000)
except BlockingIOError: pass
time.sleep(600)
`
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	harness.Must(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	before, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	harness.Must(t, err)
	timeout := harness.Deadline(time.Second).String()
	p := harness.Start(t, harness.Options{Stdin: theirs, Stdout: theirs}, "--json", "--timeout", timeout, "python3", "-c", fill)
	ns := p.Namespace()
	harness.Until(t, harness.Bound, "the sandbox's end", func() bool { return len(harness.Members(ns)) == 0 })
	// The test has not read yet, and the report is larger than the socket's buffer.
	read := make(chan []byte, 1)
	go func() {
		text, _ := io.ReadAll(ours) // an error shows in the text
		read <- text
	}()
	r := p.Wait()
	after, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	harness.Must(t, err)
	harness.Must(t, unix.Shutdown(pair[1], unix.SHUT_WR))
	r.Expect(t, 124, "timeout")
	text := <-read
	report, err := harness.ParseReport(text[max(0, bytes.IndexByte(text, '{')):])
	if err != nil || report.StdoutBytes == nil || *report.StdoutBytes != 16*30000 {
		t.Errorf("the report is not whole, of %d bytes: %v", len(text), err)
	}
	if before != after {
		t.Errorf("the flags of stdin are %#x, and were %#x", after, before)
	}
}
