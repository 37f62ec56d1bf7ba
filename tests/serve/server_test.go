// Package serve tests the built server from outside, over its sockets.
package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// server is a server of a test, with its own socket and state.
type server struct {
	t      *testing.T
	dir    string
	cmd    *exec.Cmd
	log    *harness.Log
	ended  <-chan struct{}
	client *http.Client
	killed bool

	cluster string // with a gateway in front
}

// serve starts a server with lines of configuration, and ends it after the test. It must then exit
// with 0 and leave no process.
func serve(t *testing.T, config string, flags ...string) *server {
	t.Helper()
	return serveIn(t, harness.Dir(t), config, flags...)
}

func serveIn(t *testing.T, dir, config string, flags ...string) *server {
	t.Helper()
	return serveBy(t, nil, dir, config, flags...)
}

// serveBy starts the server through a command.
func serveBy(t *testing.T, by []string, dir, config string, flags ...string) *server {
	t.Helper()
	if !strings.Contains(config, "[rooms]") {
		config += "\n[rooms]\nmin = 0\nmax = 0\n" // then all processes below the server belong to calls
	}
	s := &server{t: t, dir: dir, log: &harness.Log{}}
	file := filepath.Join(dir, "config.toml")
	own := s.socket()
	if url := os.Getenv("SBXRUN_TESTS_NATS"); url != "" {
		own = s.behindGateway(url, config, flags)
		config += "\n[nats]\nnode = \"node\"\nurl = \"" + url + "\"\ncluster = \"" + s.cluster + "\"\n"
	}
	if !strings.Contains(config, "proof_timeout") {
		config = fmt.Sprintf("proof_timeout = %q\n%s", harness.ProofTimeout(), config)
	}
	config = "listen = [\"unix:" + own + "\"]\nstate_dir = \"" + filepath.Join(dir, "state") + "\"\n" + config
	check.Must(t, os.WriteFile(file, []byte(config), 0o600))
	args := slices.Concat(by, []string{harness.Binary(t), "serve", "--config", file}, flags)
	s.cmd = exec.Command(args[0], args[1:]...)
	s.cmd.Stderr = s.log
	s.start()
	t.Cleanup(s.end)
	harness.Until(t, harness.Bound, "the server: "+s.log.String(), func() bool {
		select {
		case <-s.ended:
			t.Fatalf("the server has ended: %s", s.log)
		default:
		}
		r, err := s.client.Get("http://sbxrun/readyz")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == http.StatusOK
	})
	return s
}

// logs waits until the server's log contains all words. The server logs before it answers, but the
// test reads its log through a pipe.
func (s *server) logs(words ...string) {
	s.t.Helper()
	for _, word := range words {
		harness.Until(s.t, harness.Bound, word+" in the log", func() bool { return strings.Contains(s.log.String(), word) })
	}
}

// combined runs a command, and returns its output, without stderr if that leads elsewhere. It registers the command, because the harness
// treats unknown children as abandoned and kills them.
func combined(c *exec.Cmd) ([]byte, error) {
	out := &harness.Log{}
	c.Stdout = out
	if c.Stderr == nil {
		c.Stderr = out
	}
	done, err := harness.StartCommand(c)
	if err != nil {
		return nil, err
	}
	defer done()
	err = c.Wait()
	return []byte(out.String()), err
}

// start starts the server's command.
func (s *server) start() {
	s.t.Helper()
	s.ended = harness.Serve(s.t, s.cmd)
	s.client = &http.Client{Timeout: harness.Bound, Transport: &http.Transport{
		MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.socket())
		},
	}}
}

func (s *server) socket() string { return filepath.Join(s.dir, "socket") }

// end ends the server as an operator does.
func (s *server) end() {
	if s.killed {
		return
	}
	s.killed = true
	s.client.CloseIdleConnections()
	_ = s.cmd.Process.Signal(unix.SIGTERM) // fails only if it has exited
	code := harness.Ended(s.t, s.cmd, s.ended, s.log)
	check.That(s.t, code == 0, "the server has ended with %d: %s", code, s.log)
}

// kill kills the server, and returns when all its processes have exited.
func (s *server) kill() { s.killBy(unix.SIGKILL) }

func (s *server) killBy(sig unix.Signal) {
	s.t.Helper()
	s.killed = true
	harness.KillServer(s.t, s.cmd, s.ended, sig)
	s.client.CloseIdleConnections()
}

// begin starts a call, and returns when n processes have a command line that begins with the text. leave disconnects,
// before which there must be no answer.
func (s *server) begin(n int, text, path string, body any, headers ...string) (leave func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		status, b, _, err := s.try(ctx, http.MethodPost, path, body, headers...)
		check.That(s.t, ctx.Err() != nil, "%s is answered before it was left: %d %s, %v", path, status, b, err)
	}()
	s.busy(n, text)
	return func() {
		cancel()
		<-gone
	}
}

// idle waits until nothing runs below the server.
func (s *server) idle() {
	s.t.Helper()
	pid := s.cmd.Process.Pid
	harness.Until(s.t, harness.Bound, "the end of all that the server runs", func() bool { return len(harness.Descendants(pid)) == 0 })
}

// busy waits until n processes below the server have a command line that begins with the text.
func (s *server) busy(n int, text string) {
	s.t.Helper()
	harness.Until(s.t, harness.Bound, "commands with "+text, func() bool { return s.count(text) >= n })
}

// count returns the number of processes below the server whose command lines begin with the text.
func (s *server) count(text string) (found int) {
	for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
		line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")) // it may have exited
		if strings.HasPrefix(strings.ReplaceAll(string(line), "\x00", " "), text) {
			found++
		}
	}
	return found
}

// release ends one process below the server whose command line is the text, with a signal that shells do not report.
func (s *server) release(text string) {
	s.t.Helper()
	harness.Until(s.t, harness.Bound, text, func() bool {
		for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
			p, ok := harness.ReadProc(pid)
			line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")) // it may have exited
			if !ok || strings.TrimSuffix(strings.ReplaceAll(string(line), "\x00", " "), " ") != text {
				continue
			}
			target, hit := harness.Strike(pid, p.Parent, unix.SIGPIPE)
			if hit {
				target.Close()
				return true
			}
		}
		return false
	})
}

// ask sends a request, and returns the status and the whole answer.
func (s *server) ask(method, path string, body any, headers ...string) (int, []byte) {
	s.t.Helper()
	status, answer, _, err := s.try(s.t.Context(), method, path, body, headers...)
	check.Require(s.t, err == nil, "%s %s: %v\n%s", method, path, err, s.log)
	return status, answer
}

// answers sends a request, whose answer must have the status and contain the text.
func (s *server) answers(want int, contains, method, path string, body any, headers ...string) {
	s.t.Helper()
	status, b := s.ask(method, path, body, headers...)
	check.That(s.t, status == want && strings.Contains(string(b), contains), "%s %s: %d %.2000s, want %d and %q", method, path, status, b, want, contains)
}

func (s *server) try(ctx context.Context, method, path string, body any, headers ...string) (int, []byte, http.Header, error) {
	return exchange(ctx, s.client, method, "http://sbxrun"+path, body, headers...)
}

// exchange sends a request, and returns the whole answer.
func exchange(ctx context.Context, client *http.Client, method, url string, body any, headers ...string) (int, []byte, http.Header, error) {
	a, err := send(ctx, client, method, url, body, headers...)
	if err != nil {
		return 0, nil, nil, err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	return a.StatusCode, b, a.Header, err
}

// send sends a request, whose body is a text, a reader, or a value for JSON.
func send(ctx context.Context, client *http.Client, method, url string, body any, headers ...string) (*http.Response, error) {
	var r io.Reader
	switch body := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(body)
	case []byte:
		r = bytes.NewReader(body)
	case io.Reader:
		r = body
	default:
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	q, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		return nil, err
	}
	if body != nil {
		q.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		q.Header.Set(headers[i], headers[i+1])
	}
	return client.Do(q)
}

// run runs a call, which must be answered.
func (s *server) run(call api.Call) *api.Answer {
	s.t.Helper()
	return s.call("/v1/run", call)
}

func (s *server) call(path string, call api.Call, headers ...string) *api.Answer {
	s.t.Helper()
	a := decoded[api.Answer](s, http.StatusOK, http.MethodPost, path, call, headers...)
	check.That(s.t, !a.Started || a.Teardown.Verdict == "proven", "verdict %s: %+v", a.Teardown.Verdict, a)
	return &a
}

// decoded makes a request, which must have this status, and returns the decoded answer.
func decoded[T any](s *server, want int, method, path string, body any, headers ...string) (a T) {
	s.t.Helper()
	status, b := s.ask(method, path, body, headers...)
	err := json.Unmarshal(b, &a)
	check.Require(s.t, status == want && err == nil, "%s %s: %d %s\n%s", method, path, status, b, s.log)
	return a
}

// late runs a call that prints a text before its deadline, which is raised until it does, as on a busy machine.
func (s *server) late(path string, call api.Call, first time.Duration, out string) (a *api.Answer) {
	s.t.Helper()
	for d := harness.Deadline(first); ; d *= 2 {
		call.TimeoutMS = result.Milliseconds(d)
		began := time.Now()
		a = s.call(path, call)
		harness.Within(s.t, "the answer", time.Since(began), 0, d)
		if text(a.Stdout) == out || d > harness.Bound {
			return a
		}
	}
}

// in runs a call until it gets a room of a kind: a room that is not ready is left out.
func (s *server) in(room string, call api.Call) (a *api.Answer) {
	s.t.Helper()
	harness.Until(s.t, harness.Bound, "a room that is "+room, func() bool {
		a = s.run(call)
		return a.Room == room
	})
	return a
}

// refused makes a request that must fail, and returns the error.
func (s *server) refused(method, path string, body any, headers ...string) (int, *api.Error) {
	s.t.Helper()
	status, b := s.ask(method, path, body, headers...)
	e := &api.Error{}
	err := json.Unmarshal(b, e)
	check.Require(s.t, err == nil && e.Failure.Code != "" && e.Failure.Message != "", "%s %s %.200s: %d, no error: %.300s", method, path, body, status, b)
	want := api.Codes()[e.Failure.Code]
	check.That(s.t, want == status, "%s %s: %s with status %d, want %d", method, path, e.Failure.Code, status, want)
	check.That(s.t, status != http.StatusBadRequest || e.Failure.Hint != "", "%s %s: no hint: %s", method, path, b)
	check.That(s.t, !e.Started, "%s %s: started: %s", method, path, b)
	return status, e
}

// refuses makes a request that must fail with the code.
func (s *server) refuses(code api.Code, method, path string, body any, headers ...string) {
	s.t.Helper()
	_, e := s.refused(method, path, body, headers...)
	check.That(s.t, e.Failure.Code == code, "%s %s: %+v, want %s", method, path, e, code)
}

// prints makes a call, and compares its output.
func (s *server) prints(path string, call api.Call, out string) {
	s.t.Helper()
	a := s.call(path, call)
	check.That(s.t, text(a.Stdout) == out && a.ExitCode == 0, "%q: %d %q %q, want %q", call.Argv, a.ExitCode, text(a.Stdout), text(a.Stderr), out)
}

// want runs a command line in a session, or without one, and compares its output.
func (s *server) want(path, line, out string) {
	s.t.Helper()
	s.prints(path, sh(line), out)
}

func sh(script string) api.Call { return api.Call{Argv: []string{"sh", "-c", script}} }

func text(s *string) string {
	if s == nil {
		return "<none>"
	}
	return *s
}

// warm waits until n rooms are warm.
func (s *server) warm(n int) {
	s.t.Helper()
	harness.Until(s.t, harness.Bound, "warm rooms", func() bool {
		var st api.Status
		_, b := s.ask(http.MethodGet, "/v1/status", nil)
		return json.Unmarshal(b, &st) == nil && st.Machine.Rooms.Idle == n
	})
}

// behindGateway puts a gateway on the server's socket, and returns another socket for the server.
// tests/cluster runs the tests of this package this way: a gateway must answer as the server does.
func (s *server) behindGateway(url, config string, flags []string) (own string) {
	s.t.Helper()
	s.cluster = "t" + itoa(os.Getpid()) + "-" + itoa(int(time.Now().UnixNano()%1e12))
	file := filepath.Join(s.dir, "gateway.toml")
	config = "listen = [\"unix:" + s.socket() + "\"]\n" + config + "\n[nats]\nnode = \"gateway\"\nurl = \"" + url + "\"\ncluster = \"" + s.cluster + "\"\n"
	check.Must(s.t, os.WriteFile(file, []byte(config), 0o600))
	log := &harness.Log{}
	c := exec.Command(harness.Binary(s.t), append([]string{"gateway", "--config", file}, flags...)...)
	c.Stderr = log
	ended := harness.Serve(s.t, c)
	s.t.Cleanup(func() {
		_ = c.Process.Signal(unix.SIGTERM) // fails only if it has exited
		code := harness.Ended(s.t, c, ended, log)
		check.That(s.t, code == 0, "the gateway has ended with %d: %s", code, log)
		if s.t.Failed() {
			s.t.Logf("the gateway: %s", log)
		}
	})
	return s.socket() + ".node"
}

func TestMain(m *testing.M) { harness.Main(m) }
