package serve

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// session creates a session, and returns its path.
func (s *server) session(body string, headers ...string) string {
	s.t.Helper()
	return "/v1/sessions/" + decoded[api.Session](s, http.StatusCreated, http.MethodPost, "/v1/sessions", body, headers...).ID
}

func TestSession(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{"files":[{"path":"given","text":"here"}]}`)
	s.want(path+"/exec", "cat given; echo kept >a", "here")
	s.want(path+"/exec", "cat a; sleep 1000 & echo", "kept\n\n")
	for _, p := range []string{"/v1/sessions", path + "/snapshot"} {
		_, e := s.refused(http.MethodPost, p, nil)
		check.That(t, e.Failure.Code == api.Usage && e.Failure.Hint == "send {} for an empty request", "%s without a body: %+v", p, e)
	}
	s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/empty", nil, "Content-Type", "application/octet-stream")
	other := s.session(`{}`)
	s.want(other+"/exec", "ls", "")
	s.answers(http.StatusOK, `"verdict":"proven"`, http.MethodDelete, path, nil)
	_, e := s.refused(http.MethodPost, path+"/exec", sh("true"))
	check.That(t, e.Failure.Code == api.Ended && strings.Contains(e.Failure.Message, "killed"), "%+v", e)
	s.refuses(api.NoSuchSession, http.MethodGet, "/v1/sessions/none", nil)
	list := decoded[struct{ Sessions []api.Session }](s, 200, http.MethodGet, "/v1/sessions", nil)
	check.That(t, len(list.Sessions) == 1 && strings.HasSuffix(other, list.Sessions[0].ID), "%+v", list)
}

// A session ends when it is unused, and at the end of its lifetime, whatever runs.
func TestSessionEnds(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	gone := func(path, cause string) {
		t.Helper()
		harness.Until(t, harness.Bound, "the end of "+path, func() bool {
			status, _ := s.ask(http.MethodGet, path, nil)
			return status != 200
		})
		_, e := s.refused(http.MethodGet, path, nil)
		check.That(t, e.Failure.Code == api.Ended && strings.Contains(e.Failure.Message, cause), "%+v, want %s", e, cause)
	}
	// used makes a request in a session that ends after some time, which is raised until the request comes before that.
	used := func(limit, request string, call func(after time.Duration) api.Call) (path string, after time.Duration) {
		for after = 500 * time.Millisecond; ; after *= 2 {
			path = s.session(fmt.Sprintf(`{"%s":%d}`, limit, after.Milliseconds()))
			status, b := s.ask(http.MethodPost, path+request, call(after))
			if status != http.StatusGone || after > harness.Bound {
				check.Require(t, status < 300, "%s: %d %s", limit, status, b)
				return path, after
			}
		}
	}
	var began time.Time
	idle, after := used("idle_timeout_ms", "/exec", func(after time.Duration) api.Call {
		began = time.Now()
		return sh(fmt.Sprintf("sleep %v", 2*after.Seconds()))
	})
	gone(idle, "idle-timeout")
	took := time.Since(began)
	check.That(t, took >= 3*after, "idle after %v, while it was used", took)
	short, _ := used("lifetime_ms", "/processes", func(time.Duration) api.Call { return sh("sleep 3456") })
	gone(short, "timeout")
	s.idle()
}

// A process that is just starting gets a signal.
func TestSignalAtOnce(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nconcurrency = 1\n")
	path := s.session(`{}`) + "/processes"
	for range 10 {
		at := path + "/" + s.status(http.MethodPost, path, sh("sleep 4568"), http.StatusAccepted).ID
		s.answers(http.StatusNoContent, "", http.MethodPost, at+"/signal", api.Signal{Signal: "TERM"})
		c := s.status(http.MethodGet, at+"?wait_ms=60000", nil, 200)
		check.That(t, c.Report != nil && c.Report.Cause == "signaled", "%+v", c)
	}
	other := path + "/" + s.status(http.MethodPost, path, sh("sleep 4568"), http.StatusAccepted).ID
	s.refuses(api.Usage, http.MethodPost, other+"/signal", api.Signal{Signal: "nonsense"})
	s.refuses(api.NoSuchProcess, http.MethodGet, path+"/none", nil)
	s.ask(http.MethodDelete, strings.TrimSuffix(path, "/processes"), nil)
	s.idle() // the session's end ends its process
}

func TestProcessStdin(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	octet := []string{"Content-Type", "application/octet-stream"}
	begin := func(call api.Call) string {
		return path + "/processes/" + s.status(http.MethodPost, path+"/processes", api.NewProcess{Call: call, KeepStdin: true}, http.StatusAccepted).ID
	}
	call := sh("while read line; do echo \"got $line\"; done; wc -c; echo over")
	call.Stdin = "one\n"
	at := begin(call)
	wrote := func(text string) {
		t.Helper()
		harness.Until(t, harness.Bound, text, func() bool {
			_, b := s.ask(http.MethodGet, at+"/output", nil)
			return string(b) == text
		})
	}
	wrote("got one\n")
	s.answers(http.StatusNoContent, "", http.MethodPost, at+"/stdin", "two\nthr", octet...)
	wrote("got one\ngot two\n")
	s.answers(http.StatusNoContent, "", http.MethodPost, at+"/stdin?end=1", "ee\n", octet...)
	wrote("got one\ngot two\ngot three\n0\nover\n")
	for _, end := range []string{"", "?end=1"} {
		s.refuses(api.Ended, http.MethodPost, at+"/stdin"+end, "x", octet...)
	}

	// More than a pipe holds arrives completely, and unchanged.
	at = begin(api.Call{Argv: []string{"sha256sum"}})
	big := bytes.Repeat([]byte("0123456789\x00\xff"), 100_000)
	s.answers(http.StatusNoContent, "", http.MethodPost, at+"/stdin?end=1", big, octet...)
	wrote(fmt.Sprintf("%x  -\n", sha256.Sum256(big)))

	// A process without kept stdin reads nothing.
	at = path + "/processes/" + s.status(http.MethodPost, path+"/processes", sh("cat; sleep 1000"), http.StatusAccepted).ID
	s.refuses(api.Usage, http.MethodPost, at+"/stdin", "x", octet...)

	// When a client disconnects while the process does not read, the next one gets its turn.
	at = begin(sh("echo up; sleep 1000"))
	wrote("up\n")
	sends, leave := context.WithCancel(t.Context())
	sent := &counted{Reader: bytes.NewReader(big)}
	left := make(chan struct{})
	go func() {
		defer close(left)
		_, _, _, err := s.try(sends, http.MethodPost, at+"/stdin", io.Reader(sent), octet...)
		check.That(t, err != nil, "it was answered")
	}()
	harness.Until(t, harness.Bound, "more than fits into a pipe", func() bool { return sent.n.Load() > 150<<10 })
	leave()
	<-left
	soon, cancel := context.WithTimeout(t.Context(), harness.Scaled(20*time.Second))
	defer cancel()
	status, b, _, err := s.try(soon, http.MethodPost, at+"/stdin?end=1", nil, octet...)
	check.That(t, status == http.StatusNoContent, "after a client that has left: %d %s %v", status, b, err)

	// A client that sends to a process that does not read is released by the process's end, and
	// told that part of the data may have been read.
	at = begin(sh("head -c 10; sleep 1000"))
	told := make(chan *api.Error, 1)
	go func() {
		var e api.Error
		_, b, _, err := s.try(t.Context(), http.MethodPost, at+"/stdin", big, octet...)
		if err == nil {
			err = json.Unmarshal(b, &e)
		}
		if err != nil {
			e.Failure.Message = err.Error()
		}
		told <- &e
	}()
	wrote(string(big[:10]))
	s.answers(http.StatusOK, "", http.MethodDelete, path, nil)
	e := <-told
	check.That(t, e.Failure.Code == api.Ended, "%+v", e)
	s.idle()
}

// counted counts the bytes that were read.
type counted struct {
	io.Reader
	n atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n.Add(int64(n))
	return n, err
}

func TestSessionFiles(t *testing.T) {
	t.Parallel()
	s := serve(t, "[sandbox]\ntmp_size = \"1M\"\n[sessions]\nmax_entries = 20\n")
	path := s.session(`{}`)
	octet := []string{"Content-Type", "application/octet-stream"}
	s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/d/e/f.txt?mode=755", strings.NewReader("#!/bin/sh\necho ran\n"), octet...)
	// The file belongs to the sandbox's user, who may run, change and remove it.
	s.want(path+"/exec", "d/e/f.txt; echo more >>d/e/f.txt; stat -c %U d d/e/f.txt; ln -s /etc/passwd link; ln -s d dirlink; mkfifo fifo", "ran\nsandbox\nsandbox\n")
	s.answers(http.StatusOK, "echo ran\nmore\n", http.MethodGet, path+"/files/d/e/f.txt", nil)
	for _, name := range []string{"link", "dirlink/e/f.txt", "fifo", "d", "%2e%2e/%2e%2e/etc/passwd", "d/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "%2fetc/passwd"} {
		status, b := s.ask(http.MethodGet, path+"/files/"+name, nil)
		check.That(t, status != 200 && !strings.Contains(string(b), "root:"), "GET %s: %d %s", name, status, b)
		if name == "d" {
			continue
		}
		status, b = s.ask(http.MethodPut, path+"/files/"+name, strings.NewReader("x"), octet...)
		check.That(t, status >= 300, "PUT %s: %d %s", name, status, b)
	}
	list := decoded[struct{ Files []struct{ Path, Type string } }](s, 200, http.MethodGet, path+"/files", nil)
	check.Equal(t, fmt.Sprint(list.Files), "[{d directory} {d/e directory} {d/e/f.txt file} {dirlink link} {fifo other} {link link}]")
	s.answers(204, "", http.MethodDelete, path+"/files/link", nil)
	s.refuses(api.NoSuchFile, http.MethodGet, path+"/files/none", nil)
	// More than there is room for, at once and step by step.
	_, e := s.refused(http.MethodPut, path+"/files/big", io.LimitReader(zeros{}, 2<<20), octet...)
	check.That(t, e.Failure.Code == api.TooLarge || e.Failure.Code == api.QuotaDisk, "%+v", e)
	// Commands may create more entries than the API does, which then creates none and says so.
	s.call(path+"/exec", sh("rm -f big; for i in $(seq 30); do : >n$i; done"))
	for _, name := range []string{"more", "d/more", "new/more"} {
		s.refuses(api.QuotaDisk, http.MethodPut, path+"/files/"+name, strings.NewReader("x"), octet...)
	}
	s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/n1", strings.NewReader("x"), octet...)
	for _, all := range []string{"/files", "/archive"} {
		s.refuses(api.TooLarge, http.MethodGet, path+all, nil)
	}
	// Sparse files and hard links cost a command nothing, but are expensive to read into memory.
	for _, script := range []string{"rm -rf * && truncate -s 7E huge", "rm -rf * && head -c 200000 /dev/zero >a && for i in $(seq 12); do ln a a$i; done"} {
		s.call(path+"/exec", sh(script))
		s.refuses(api.TooLarge, http.MethodGet, path+"/archive", nil)
		status, _ := s.ask(http.MethodHead, path+"/files/huge", nil)
		check.That(t, status != http.StatusOK, "a file of holes is sent")
	}
	status, b := s.ask(http.MethodGet, path+"/files/a", nil)
	check.That(t, status == http.StatusOK && len(b) == 200_000, "%d, %d bytes", status, len(b))
}

// archive creates a tar stream; each file contains its name.
func archive(t *testing.T, all ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range all {
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = int64(len(h.Name))
		}
		h.Mode = 0o644
		check.Must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte(h.Name))
			check.Must(t, err)
		}
	}
	check.Must(t, w.Close())
	return b.Bytes()
}

// untar returns the contents of the entries of a tar stream.
func untar(t *testing.T, b []byte) map[string]string {
	t.Helper()
	files := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		check.Must(t, err)
		files[h.Name] = string(harness.ReadAll(t, r))
	}
}

func TestArchive(t *testing.T) {
	t.Parallel()
	s := serve(t, "[sandbox]\ntmp_size = \"1M\"\n[sessions]\nmax_entries = 100\n")
	path := s.session(`{}`)
	kind := []string{"Content-Type", "application/x-tar"}
	good := archive(t, tar.Header{Typeflag: tar.TypeDir, Name: "./d/"}, tar.Header{Typeflag: tar.TypeReg, Name: "d/a"}, tar.Header{Typeflag: tar.TypeReg, Name: "b"})
	s.answers(http.StatusNoContent, "", http.MethodPut, path+"/archive", good, kind...)
	s.want(path+"/exec", "cat d/a b; ln -s /etc/passwd l", "d/ab")
	_, b := s.ask(http.MethodGet, path+"/archive", nil)
	check.NoDiff(t, cmp.Diff(map[string]string{"b": "b", "d/": "", "d/a": "d/a"}, untar(t, b)), "(-want +got)")
	many := make([]tar.Header, 200)
	for i := range many {
		many[i] = tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprint("n", i)}
	}
	bomb := bytes.NewBuffer(nil)
	w := tar.NewWriter(bomb)
	check.Must(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "bomb", Size: 3 << 20}))
	_, _ = io.CopyN(w, zeros{}, 3<<20)
	for _, bad := range []struct {
		name   string
		status int
		stream []byte
	}{
		{"a link", 400, archive(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "x", Linkname: "/etc"})},
		{"a hard link", 400, archive(t, tar.Header{Typeflag: tar.TypeLink, Name: "x", Linkname: "b"})},
		{"a device", 400, archive(t, tar.Header{Typeflag: tar.TypeChar, Name: "x", Devmajor: 1, Devminor: 3})},
		{"a fifo", 400, archive(t, tar.Header{Typeflag: tar.TypeFifo, Name: "x"})},
		{"leads out", 400, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "../x"})},
		{"leads out inside", 400, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "d/../../x"})},
		{"absolute", 400, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "/x"})},
		{"through a link", 400, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "l/x"})},
		{"over a link", 400, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "l"})},
		{"a bomb", 413, bomb.Bytes()},
		{"no tar", 400, bytes.Repeat([]byte("nonsense"), 200)},
		{"broken off", 400, good[:700]},
		{"too many", 413, archive(t, many...)},
		{"into a full one", 507, good},
	} {
		status, e := s.refused(http.MethodPut, path+"/archive", bad.stream, kind...)
		check.That(t, status == bad.status, "%s: %d %+v", bad.name, status, e)
	}
	want := []string{"/home/sandbox", "/home/sandbox/b", "/home/sandbox/d", "/home/sandbox/d/a", "/home/sandbox/l"}
	for i := range 96 {
		want = append(want, fmt.Sprint("/home/sandbox/n", i))
	}
	slices.Sort(want)
	check.Equal(t, text(s.call(path+"/exec", sh("find /home /tmp -mindepth 1 | LC_ALL=C sort")).Stdout), strings.Join(want, "\n")+"\n")
}

// The session's quotas apply to everything in it together.
func TestSessionQuota(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nsessions = 1\n")
	path := s.session(`{}`)
	status, b, header, err := s.try(t.Context(), http.MethodPost, "/v1/sessions", `{}`)
	check.That(t, status == 409 && header.Get("Retry-After") == "" && err == nil && strings.Contains(string(b), `"quota-kept"`), "%d %v %s %v", status, header, b, err) // waiting does not help
	s.ask(http.MethodDelete, path, nil)
	s.session(`{}`)
}

// Clients that stall in the middle of a transfer, or that send or read one byte now and then, do not delay the end of
// their session.
func TestSessionEndsDuringTransfers(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]bool{"stalled": false, "slow": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			endDuringTransfers(t, slow)
		})
	}
}

func endDuringTransfers(t *testing.T, slow bool) {
	s := serve(t, "")
	path := s.session(`{}`)
	s.call(path+"/exec", sh("head -c 64M /dev/zero >big"))
	for _, request := range []string{"PUT " + path + "/files/made/new", "PUT " + path + "/archive", "GET " + path + "/files/big", "GET " + path + "/archive"} {
		c, err := net.Dial("unix", s.socket())
		check.Must(t, err)
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(harness.Bound)) // of sockets
		puts := strings.HasPrefix(request, "PUT")
		rest := "\r\n"
		if puts {
			rest = "Content-Length: 1000000\r\n\r\nx"
		}
		_, err = io.WriteString(c, request+" HTTP/1.1\r\nHost: sbxrun\r\n"+rest)
		check.Must(t, err)
		if !puts { // the answer has started
			_, err := io.ReadFull(c, make([]byte, 1000))
			check.Must(t, err)
		}
		go func() {
			for piece := []byte("x"); slow && err == nil; time.Sleep(50 * time.Millisecond) { // until the server or the test closes it
				if puts {
					_, err = c.Write(piece)
				} else {
					_, err = c.Read(piece)
				}
			}
		}()
	}
	harness.Until(t, harness.Bound, "the directory of the file that is written", func() bool {
		status, _ := s.ask(http.MethodGet, path+"/files/made", nil)
		return status != http.StatusNotFound
	})
	begin := time.Now()
	s.answers(http.StatusOK, "", http.MethodDelete, path, nil)
	took := time.Since(begin)
	check.That(t, took <= 20*time.Second, "the end took %v", took) // the server waits 30 s for a client
}
