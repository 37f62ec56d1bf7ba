package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// textFile contains lines, which a command prints several times.
const (
	textSize = 64 << 20
	line     = "The quick brown fox jumps over the lazy dog, and says \"so what\" about it, twice.\n"
)

// streams compares throughput of output: as JSON lines, with encoding/json alone for the same
// text; and by offset, with cat through a pipe.
func streams(builds []*build) {
	dir := got(os.MkdirTemp("", "sbxrun-bench-"))
	defer os.RemoveAll(dir)
	must(os.Chmod(dir, 0o755))
	text := strings.Repeat(line, textSize/len(line)+1)[:textSize]
	must(os.WriteFile(filepath.Join(dir, "text"), []byte(text), 0o644))
	times := max(1, *megabytes<<20/textSize)
	size := int64(times) * textSize
	s := builds[0].serve(fmt.Sprintf("[call]\nmax_timeout = \"1h\"\ntimeout = \"1h\"\n[tenant]\nmax_output = \"64G\"\noutput = \"64G\"\n[calls]\noutput = \"64G\"\n[sandbox]\nmounts = [\"%s:/data\"]\n", dir))
	defer s.close()
	call := measure.Object{"argv": append([]string{"cat"}, slices.Repeat([]string{"/data/text"}, times)...), "limits": measure.Object{"max_output": size + 1}}
	variants := []variant{
		{"A", "NDJSON", func() time.Duration { return s.read("/v1/run?stream=1", call, size) }},
		{"B", "encoding/json alone", func() time.Duration { return encode(text, times) }},
		{"C", "by offset", func() time.Duration { return s.byOffset(call, size) }},
		{"D", "cat through a pipe", func() time.Duration { return pipe(filepath.Join(dir, "text"), times) }},
	}
	before := s.peak()
	compare("stream", fmt.Sprintf("%d MiB of output; ratios of rates are the inverse", size>>20), rounds(3), 1, variants)
	fmt.Printf("  the server's memory at its peak: before %s, after %s\n\n", before, s.peak())
}

// peak returns the server's peak memory.
func (s *server) peak() string {
	_, rest, _ := strings.Cut(measure.Read(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid)), "VmHWM:")
	size, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(size)
}

// read makes a call, and reads the answer, which is longer than size, as it comes.
func (s *server) read(path string, call any, size int64) time.Duration {
	c := s.dial()
	defer c.Close()
	begin := time.Now()
	answer := got(c.Begin(measure.Post(path, call, "")))
	defer answer.Body.Close()
	last := &tail{}
	n := got(io.CopyBuffer(last, answer.Body, make([]byte, 256<<10)))
	took := time.Since(begin)
	if n < size || !bytes.Contains(last.end, []byte(`"exit_code":0`)) {
		fail("%d bytes, which end with %.600s", n, last.end)
	}
	return took
}

// tail keeps the end of what is written to it.
type tail struct{ end []byte }

func (t *tail) Write(b []byte) (int, error) {
	const most = 2048
	t.end = append(t.end, b[max(0, len(b)-most):]...)
	t.end = t.end[max(0, len(t.end)-most):]
	return len(b), nil
}

// encode measures encoding/json alone, with pieces of the server's size.
func encode(text string, times int) time.Duration {
	const piece = 32 << 10
	enc := json.NewEncoder(io.Discard)
	enc.SetEscapeHTML(false)
	begin := time.Now()
	for range times {
		for at := 0; at < len(text); at += piece {
			event := struct {
				Event string `json:"event"`
				Text  string `json:"text"`
			}{"stdout", text[at:min(at+piece, len(text))]}
			must(enc.Encode(event))
		}
	}
	return time.Since(begin)
}

// byOffset starts a detached call and follows its output.
func (s *server) byOffset(call any, size int64) time.Duration {
	c := s.dial()
	defer c.Close()
	begin := time.Now()
	text := got(c.Ask(measure.Post("/v1/calls", call, "")))
	var made struct{ ID string }
	must(json.Unmarshal(text, &made))
	answer := got(c.Begin(fmt.Appendf(nil, "GET /v1/calls/%s/output?from=0&follow=1 HTTP/1.1\r\nHost: sbxrun\r\n\r\n", made.ID)))
	n := got(io.CopyBuffer(struct{ io.Writer }{io.Discard}, answer.Body, make([]byte, 256<<10)))
	took := time.Since(begin)
	if n != size {
		fail("%d bytes of %d, %s", n, size, answer.Status)
	}
	got(c.Ask(fmt.Appendf(nil, "DELETE /v1/calls/%s HTTP/1.1\r\nHost: sbxrun\r\n\r\n", made.ID)))
	return took
}

// pipe measures cat of the same through a pipe.
func pipe(name string, times int) time.Duration {
	r, w, err := os.Pipe()
	must(err)
	defer r.Close()
	cmd := exec.CommandContext(ctx, "cat", slices.Repeat([]string{name}, times)...)
	cmd.Stdout = w
	begin := time.Now()
	err = cmd.Start()
	w.Close()
	must(err)
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Read(int(r.Fd()), buf)
		if n <= 0 && err != unix.EINTR {
			break
		}
	}
	took := time.Since(begin)
	must(cmd.Wait())
	return took
}
