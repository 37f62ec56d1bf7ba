package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The tests of the server and its clients pass through a gateway, too.
func TestInterface(t *testing.T) {
	o := runNATS(t)
	run := os.Getenv("SBXRUN_TESTS_RUN")
	if run == "" {
		run = "Client|MCPTools|MCPSession|MCPLeaves|ProcessStdin|SessionFiles|Streams|SlowReader"
	}
	c := exec.Command("go", "test", "-v", "-count=1", "-timeout=30m", "-run", run, "./tests/serve")
	c.Dir = "../.."
	c.Env = append(os.Environ(), "SBXRUN_BIN="+harness.Binary(t), "SBXRUN_TESTS_NATS="+url(o))
	out, err := c.CombinedOutput()
	check.Require(t, err == nil, "%v\n%s", err, out)
	for word := range strings.SplitSeq(run, "|") {
		check.That(t, regexp.MustCompile(`(?m)^--- PASS: .*`+word).Match(out), "no test of %q has passed: %s", word, out)
	}
	if bytes.Contains(out, []byte("--- SKIP")) {
		harness.Skip(t, string(out))
	}
}

// A client that has closed its half of the connection counts as gone, as on a server, and gets no response.
func TestHalfClosed(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "places = 1\n[rooms]\nmin = 0\nmax = 0\n")
	g := c.gateways[0]
	g.end(t, g.begin(t, "true").ID)
	running := g.begin(t, "sleep", "1000")
	harness.Until(t, harness.Bound, "the command", func() bool { return len(commands(c.nodes[0])) > 0 })
	waits := g.begin(t, "true")
	defer g.ask(t, http.MethodDelete, "/v1/calls/"+running.ID, nil)
	for _, request := range []string{
		"GET /v1/calls/" + running.ID + "?wait_ms=60000 HTTP/1.1\r\nHost: sbxrun\r\n\r\n",
		"GET /v1/calls/" + waits.ID + "?wait_ms=60000 HTTP/1.1\r\nHost: sbxrun\r\n\r\n",
	} {
		conn, err := net.Dial("unix", g.socket)
		check.Must(t, err)
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(harness.Bound))
		_, err = io.WriteString(conn, request)
		check.Must(t, err)
		_ = conn.(*net.UnixConn).CloseWrite()
		b, err := io.ReadAll(conn)
		check.That(t, len(b) == 0 && err == nil, "%q is answered with %q, %v", request, b, err)
	}
}

// A client that does not read blocks the writing command, without filling memory. Then it reads everything in
// order, even if the NATS server in between is lost.
func TestSlowClient(t *testing.T) {
	options, urls := threeNATS(t)
	var servers []*server.Server
	for _, o := range options {
		servers = append(servers, startNATS(t, o))
	}
	c := newCluster(t, urls, 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 0\n[nats]\nreplicas = 3\n")
	g := c.gateways[0]
	status, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
	check.Require(t, err == nil && status == http.StatusOK, "%v %v %v", status, e, err)
	rss := func(p *process) int64 {
		target, err := harness.Open(p.cmd.Process.Pid)
		check.Must(t, err)
		defer target.Close()
		return target.RSS()
	}
	before := map[*process]int64{g.process: rss(g.process), c.nodes[0]: rss(c.nodes[0])}

	const first, lines, width = 1_000_000_000_000_00, 4 << 20, 16 // 64 MiB
	call := api.Call{Argv: []string{"seq", fmt.Sprint(first), fmt.Sprint(first + lines - 1)}, TimeoutMS: 200_000}
	call.Limits.MaxOutput = lines * width
	r, err := g.send(t.Context(), http.MethodPost, "/v1/run?stream=1", string(harness.JSON(t, call)), "Accept", "application/x-ndjson")
	check.Must(t, err)
	defer r.Body.Close()
	stuck := 0
	harness.Until(t, harness.Bound, "the command to wait for its reader", func() bool {
		stuck++
		for _, pid := range harness.Descendants(c.nodes[0].cmd.Process.Pid) {
			if p, ok := harness.ReadProc(pid); ok && p.Comm == "seq" && p.State == "S" {
				return stuck > 20
			}
		}
		stuck = 0
		return false
	})
	for p, was := range before {
		const most = 16 << 20
		if grown := rss(p) - was; grown > most {
			t.Errorf("%s has grown by %d bytes", p.args, grown)
		} else {
			t.Logf("%s has grown by %d KiB", p.args[0], grown>>10)
		}
	}
	lost := 0
	for i, s := range servers {
		if s.NumClients() > servers[lost].NumClients() {
			lost = i
		}
	}
	servers[lost].Shutdown()

	in := bufio.NewScanner(r.Body)
	in.Buffer(nil, 1<<20)
	n, rest := 0, []byte(nil)
	var report *api.Answer
	for in.Scan() {
		var e api.Event
		check.Must(t, json.Unmarshal(in.Bytes(), &e))
		report = e.Report
		rest = append(rest, e.Text...)
		for len(rest) >= width {
			want := fmt.Sprintf("%d\n", first+n)
			check.Require(t, string(rest[:width]) == want, "%q, want %q", rest[:width], want)
			n, rest = n+1, rest[width:]
		}
	}
	err = in.Err()
	check.That(t, err == nil && n == lines && len(rest) == 0 && report != nil && report.Cause == "exited", "%d lines, %+v, %v", n, report, err)
}
