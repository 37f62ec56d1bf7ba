package cluster

import (
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
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// ask sends a request without a body.
func (g *gateway) ask(t *testing.T, method, path string, into any) (status int, text string) {
	t.Helper()
	status, text, err := g.raw(t.Context(), method, path, "")
	if err == nil && into != nil && status/100 == 2 {
		err = json.Unmarshal([]byte(text), into)
	}
	check.Require(t, err == nil, "%v: %.200s", err, text)
	return status, text
}

// send sends a request with JSON, unless the headers have another type.
func (g *gateway) send(ctx context.Context, method, path, body string, headers ...string) (*http.Response, error) {
	q, err := http.NewRequestWithContext(ctx, method, "http://sbxrun"+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		q.Header.Set(headers[i], headers[i+1])
	}
	return g.client.Do(q)
}

// raw sends a request and returns the text of the response.
func (g *gateway) raw(ctx context.Context, method, path, body string, headers ...string) (status int, text string, err error) {
	res, err := g.send(ctx, method, path, body, headers...)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	return res.StatusCode, string(answer), err
}

// begin queues a command.
func (g *gateway) begin(t *testing.T, argv ...string) (s api.CallStatus) {
	t.Helper()
	status, e, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: argv, TimeoutMS: 200_000}, &s)
	check.Require(t, status == http.StatusAccepted && err == nil, "%d %+v %v", status, e, err)
	return s
}

// end waits for the end of a call.
func (g *gateway) end(t *testing.T, id string) (s api.CallStatus) {
	t.Helper()
	harness.Until(t, 2*harness.Bound, "the end of "+id, func() bool {
		status, text := g.ask(t, http.MethodGet, "/v1/calls/"+id+"?wait_ms=5000", &s)
		check.Require(t, status == http.StatusOK || status == http.StatusServiceUnavailable, "%v %v", status, text)
		return s.State == api.Over
	})
	return s
}

func (m *marks) command(word string) []string {
	return []string{"bash", "-c", fmt.Sprintf("echo %s >/dev/tcp/127.0.0.1/%d", word, m.port)}
}

const hostNetwork = "[sandbox]\nnetwork = \"host\"\n"

// Detached calls wait for a slot, run once, and are visible through every gateway.
func TestQueue(t *testing.T) {
	o := runNATS(t)
	c := newCluster(t, url(o), 2, 2, "places = 2\n"+hostNetwork+"[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	open := make(chan struct{})
	wait := accept(t, func(conn net.Conn) { // until it is closed
		defer conn.Close()
		select {
		case <-open:
		case <-t.Context().Done():
		}
	})
	g, other := c.gateways[0], c.gateways[1]
	status, e, err := g.call(t.Context(), "/v1/calls", api.Call{Language: "none", Code: "x"}, nil)
	check.That(t, status == http.StatusBadRequest && err == nil, "%v %v %v", status, e, err)
	var all []string
	for i := range 24 {
		script := fmt.Sprintf("echo w%d >/dev/tcp/127.0.0.1/%d; echo out%d; read </dev/tcp/127.0.0.1/%d || :", i, m.port, i, wait)
		all = append(all, g.begin(t, "bash", "-c", script).ID)
	}
	last := g.begin(t, m.command("never")...) // cannot have started: 24 are ahead
	var ended api.CallStatus
	status, text := other.ask(t, http.MethodDelete, "/v1/calls/"+last.ID, &ended)
	check.That(t, status == http.StatusOK && ended.State == api.Over && !ended.Started, "%v %v", status, text)
	status, _ = g.ask(t, http.MethodGet, "/v1/calls/"+last.ID, nil)
	check.That(t, status == http.StatusNotFound, "%v", status)
	var list api.Calls
	g.ask(t, http.MethodGet, "/v1/calls", &list)
	check.That(t, len(list.Calls) == len(all), "%d calls are listed", len(list.Calls))
	close(open)
	for i, id := range all {
		x := other.end(t, id)
		check.Require(t, x.Report != nil && x.Report.ExitCode == 0 && x.Started, "%+v", x)
		_, text := other.ask(t, http.MethodGet, "/v1/calls/"+id+"/output?from=2", nil)
		check.That(t, text == fmt.Sprintf("t%d\n", i), "%q", text)
		check.Equal(t, m.ran(t, fmt.Sprintf("w%d", i)), 1, "%d ran", i)
	}
	check.That(t, m.count("never") == 0, "what was deleted has run")
	status, text = g.ask(t, http.MethodDelete, "/v1/calls/"+all[0], nil)
	check.That(t, status == http.StatusOK && strings.Contains(text, all[0]), "%v %v", status, text)
	status, _ = other.ask(t, http.MethodGet, "/v1/calls/"+all[0], nil)
	check.That(t, status == http.StatusNotFound, "%v", status)
	for _, at := range []string{"/v1/calls/" + all[1], "/v1/calls/" + all[1] + "/output"} {
		status, text := g.ask(t, http.MethodPut, at, nil)
		check.That(t, status == http.StatusMethodNotAllowed, "PUT %s: %d %s", at, status, text)
	}
	// Deleting a running call ends it.
	long := g.begin(t, "sh", "-c", "echo begun; sleep 1000")
	_, text = other.ask(t, http.MethodGet, "/v1/calls/"+long.ID+"/output?follow=0", nil)
	check.That(t, text == "" || text == "begun\n", "%v", text)
	harness.Until(t, harness.Bound, "its output", func() bool {
		_, text := other.ask(t, http.MethodGet, "/v1/calls/"+long.ID+"/output", nil)
		return text == "begun\n"
	})
	status, text = g.ask(t, http.MethodDelete, "/v1/calls/"+long.ID, &ended)
	check.That(t, status == http.StatusOK && ended.Report != nil && ended.Report.Cause == "canceled", "%v %v", status, text)
}

// The status of a call lists its collected files, however long the command line and names are. Lists omit both.
func TestQueueCollected(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "[rooms]\nmin = 0\nmax = 0\n")
	g := c.gateways[0]
	call := api.Call{Argv: []string{"sh", "-c", `touch $(seq -f "%0200g" 256)`, "sh", strings.Repeat("x", 100_000)}, Collect: []string{"*"}}
	var x api.CallStatus
	status, e, err := g.call(t.Context(), "/v1/calls", call, &x)
	check.Require(t, status == http.StatusAccepted && err == nil, "%d %+v %v", status, e, err)
	x = g.end(t, x.ID)
	check.That(t, x.Report != nil && len(x.Report.Files) == 256 && x.Report.Files[255].ID != "", "%+v", x)
	listed := func() {
		t.Helper()
		_, text := g.ask(t, http.MethodGet, "/v1/calls", nil)
		check.That(t, len(text) <= api.MaxListed && strings.Contains(text, x.ID), "%d bytes: %.1000s", len(text), text)
	}
	listed()
	c.nodes[0].kill() // another node lists nothing of it
	c.nodes[0].start()
	harness.Until(t, harness.Bound, "the node", func() bool {
		status, _ := g.ask(t, http.MethodGet, "/v1/calls", nil)
		return status == http.StatusOK
	})
	listed()
}

// A call that the queue has lost ends as not started, and may be tried again with the same key.
func TestQueueLoses(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "places = 1\n"+hostNetwork+"[rooms]\nmin = 0\nmax = 0\n[tenant]\nqueue = 2\n")
	m := newMarks(t)
	g := c.gateways[0]
	long := g.begin(t, "bash", "-c", m.command("long")[2]+"; sleep 1000")
	harness.Until(t, harness.Bound, "the command", func() bool { return m.count("long") == 1 })
	keyed := func() (s api.CallStatus) {
		status, text, err := g.post(t.Context(), "/v1/calls", "k", api.Call{Argv: m.command("lost")})
		check.Require(t, err == nil && status == http.StatusAccepted && json.Unmarshal([]byte(text), &s) == nil, "%v %v %v", status, text, err)
		return s
	}
	lost := keyed()
	js := jetStream(t, o)
	queue, err := js.Stream(t.Context(), "sbxrun-queue")
	check.Must(t, err)
	check.Must(t, queue.Purge(t.Context()))
	x := g.end(t, lost.ID)
	check.That(t, !x.Started && x.Failure != nil && x.Failure.Code == api.Busy, "%+v", x)
	x = keyed()
	check.That(t, x.ID == lost.ID && x.State == api.Queued, "%+v", x)
	kept := g.begin(t, m.command("kept")...)
	status, e, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: []string{"true"}}, nil)
	check.That(t, err == nil && status == http.StatusTooManyRequests && !e.Started, "a third call in the queue: %d %+v %v", status, e, err)
	err = queue.DeleteConsumer(t.Context(), "nodes")
	check.Must(t, err) // a gateway creates it again
	status, text := g.ask(t, http.MethodDelete, "/v1/calls/"+long.ID, nil)
	check.That(t, status == http.StatusOK, "%v %v", status, text)
	x = g.end(t, kept.ID)
	check.That(t, x.Report != nil && x.Report.ExitCode == 0 && m.ran(t, "kept") == 1, "%+v", x)
	x = g.end(t, lost.ID)
	check.That(t, x.Report != nil && m.ran(t, "lost") == 1, "%+v", x)
}

// A call whose node is killed is lost, and does not run elsewhere. Earlier ends stay.
func TestQueueNodeKilledAfter(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 2, 1, hostNetwork+"[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	g := c.gateways[0]
	over := g.begin(t, m.command("over")...)
	g.end(t, over.ID)
	x := g.begin(t, "bash", "-c", m.command("begun")[2]+"; sleep 1000")
	harness.Until(t, harness.Bound, "the command", func() bool { return m.count("begun") == 1 })
	for _, p := range c.nodes {
		p.kill()
		p.start()
	}
	x = g.end(t, x.ID)
	check.That(t, x.Started && x.Failure != nil && x.Failure.Code == api.Lost, "%+v", x)
	over = g.end(t, over.ID)
	check.That(t, over.Report != nil && over.Report.ExitCode == 0, "%+v", over)
	status, text := g.ask(t, http.MethodGet, "/v1/calls/"+over.ID+"/output", nil)
	check.That(t, status == http.StatusGone, "%v %v", status, text)
	// The queue does not deliver an acknowledged call to another node.
	left := consumer(t, jetStream(t, o))
	check.That(t, left.NumAckPending+int(left.NumPending) == 0, "%+v", left)
	check.That(t, m.ran(t, "begun") == 1 && m.ran(t, "over") == 1, "they ran %d and %d times", m.count("begun"), m.count("over"))
}

// If a node is killed before it starts a call that it has received, another node starts it.
func TestQueueNodeKilledBefore(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := &cluster{t: t, dir: harness.Dir(t)}
	node := func(name string, places int) *process {
		return c.process("serve", name, url(o), fmt.Sprintf("places = %d\nstate_dir = %q\n%s[rooms]\nmin = 0\nmax = 0\n", places, filepath.Join(c.dir, name), hostNetwork))
	}
	g := c.gateway("g", url(o), "")
	doomed := node("n0", 8)
	c.ready(g, 1)
	m := newMarks(t)
	// Keep this node busy, so that the gateway lets the other one check requests.
	g.begin(t, "sleep", "1000")
	harness.Until(t, harness.Bound, "the command", func() bool { return strings.Contains(strings.Join(commands(doomed), "\n"), "sleep 1000") })
	node("n1", 100_000)
	harness.Until(t, harness.Bound, "both nodes, and what they do", func() bool {
		_, text := g.ask(t, http.MethodGet, "/metrics", nil)
		return strings.Contains(text, `sbxrun_node_ready{node="n1"} 1`) && strings.Contains(text, `sbxrun_node_running{node="n0"} 1`)
	})
	js := jetStream(t, o)
	pending := func() int { return consumer(t, js).NumAckPending }
	words := 0
	var ids []string
	for try := 0; ; try++ {
		harness.Until(t, harness.Bound, "both nodes to ask for calls", func() bool { return consumer(t, js).NumWaiting >= 2 })
		check.Must(t, unix.Kill(doomed.cmd.Process.Pid, unix.SIGSTOP))
		for range 4 {
			ids = append(ids, g.begin(t, m.command(fmt.Sprintf("w%d", words))...).ID)
			words++
		}
		ran := func() (n int) {
			for i := range words {
				n += m.count(fmt.Sprintf("w%d", i))
			}
			return n
		}
		harness.Until(t, harness.Bound, "all but what the stopped node has", func() bool { return ran()+pending() == words && ran() >= words-1 })
		if pending() == 1 && ran() == words-1 {
			break // it has received one
		}
		check.Require(t, try != 10, "the stopped node gets none")
		check.Must(t, unix.Kill(doomed.cmd.Process.Pid, unix.SIGCONT))
	}
	doomed.kill()
	for i, id := range ids {
		x := g.end(t, id)
		check.That(t, x.Report != nil && x.Report.ExitCode == 0, "%+v", x)
		check.Equal(t, m.ran(t, fmt.Sprintf("w%d", i)), 1, "call %d ran", i)
	}
}

// A node does not start a call whose record has changed before the node claims it.
func TestQueueClaimed(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "places = 1\n"+hostNetwork+"[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	g, node := c.gateways[0], c.nodes[0]
	g.end(t, g.begin(t, "true").ID)
	js := jetStream(t, o)
	records, err := js.KeyValue(t.Context(), "sbxrun-calls")
	check.Must(t, err)
	keys, err := records.Keys(t.Context())
	check.Must(t, err)
	tenant, _, _ := strings.Cut(keys[0], ".")
	harness.Until(t, harness.Bound, "the node to ask for a call", func() bool { return consumer(t, js).NumWaiting == 1 })
	check.Must(t, unix.Kill(node.cmd.Process.Pid, unix.SIGSTOP))
	harness.Until(t, harness.Bound, "the node to stop", func() bool { return harness.Stopped(node.cmd.Process.Pid) })
	// As a gateway does, which would wait for the node's check.
	for _, word := range []string{"changed", "same"} {
		record := fmt.Sprintf(`{"id":"q-%s","came":%q}`, word, time.Now().UTC().Format(time.RFC3339Nano))
		key := tenant + ".q-" + word
		revision, err := records.Create(t.Context(), key, []byte(record))
		check.Must(t, err)
		body := harness.JSON(t, api.Call{Argv: m.command(word)})
		message := fmt.Sprintf(`{"record":%s,"key":%q,"revision":%d,"tenant":"uid-%d","request_id":"r","body":%s}`, record, key, revision, os.Getuid(), body)
		_, err = js.Publish(t.Context(), "sbxrun-queue."+tenant, []byte(message))
		check.Must(t, err)
	}
	harness.Until(t, harness.Bound, "the stopped node to have one", func() bool {
		left := consumer(t, js)
		return left.NumAckPending == 1 && left.NumPending == 1
	})
	_, err = records.PutString(t.Context(), tenant+".q-changed", `{"id":"q-changed","gone":true}`)
	check.Must(t, err)
	check.Must(t, unix.Kill(node.cmd.Process.Pid, unix.SIGCONT))
	harness.Until(t, harness.Bound, "the call that is as it was", func() bool { return m.count("same") == 1 })
	harness.Until(t, harness.Bound, "the other one once more", func() bool { return consumer(t, js).Delivered.Consumer >= 5 }) // three calls
	check.That(t, m.count("changed") == 0 && m.count("same") == 1, "they ran %d and %d times", m.count("changed"), m.count("same"))
}

// Answers about ended calls that clients do not read use a limited amount of memory.
func TestQueueMemory(t *testing.T) {
	t.Parallel()
	const records, each, long = 100, 7 << 10, 400 << 10
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nbuffers = \"8M\"\n")
	g := c.gateways[0]
	end := g.end(t, g.begin(t, "true").ID)
	js := jetStream(t, o)
	kv, err := js.KeyValue(t.Context(), "sbxrun-calls")
	check.Must(t, err)
	keys, err := kv.Keys(t.Context())
	check.Must(t, err)
	tenant, _, _ := strings.Cut(keys[0], ".")
	put := func(id string, size int) {
		end.ID, end.Report.Argv = id, []string{strings.Repeat("x", size)}
		text, err := json.Marshal(map[string]any{"id": id, "came": end.Came, "at": "n", "end": end})
		check.Must(t, err)
		_, err = kv.Create(t.Context(), tenant+"."+id, text)
		check.Must(t, err)
	}
	for i := range records {
		put(fmt.Sprintf("q-%d", i), each)
	}
	put("q-long", long)
	for _, path := range []string{"/v1/calls", "/v1/calls/q-long"} {
		refused := 0
		var unread []io.Closer
		for range 8 {
			res, err := g.send(t.Context(), http.MethodGet, path, "")
			check.Require(t, err == nil, "%v", err)
			unread = append(unread, res.Body)
			if res.StatusCode == http.StatusTooManyRequests {
				refused++
			} else {
				check.Equal(t, res.StatusCode, http.StatusOK, "%s", path)
			}
		}
		check.That(t, refused > 0 && refused < 8, "%s: %d are refused", path, refused)
		for _, body := range unread {
			body.Close()
		}
		harness.Until(t, harness.Bound, "the memory", func() bool {
			status, _ := g.ask(t, http.MethodGet, path, nil)
			return status == http.StatusOK
		})
	}
}

// The same holds for stored answers to requests with keys.
func TestKeysMemory(t *testing.T) {
	t.Parallel()
	const size, many = 185 << 10, 60
	g := newCluster(t, url(runNATS(t)), 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nbuffers = \"8M\"\n").gateways[0]
	body := fmt.Sprintf(`{"argv":["head","-c","%d","/dev/zero"]}`, size) // longer as base64
	status, text, err := g.raw(t.Context(), http.MethodPost, "/v1/run", body, "Idempotency-Key", "k")
	check.Require(t, status == http.StatusOK && err == nil, "%d %.200s %v", status, text, err)
	refused := 0
	var unread []io.Closer
	for range many {
		res, err := g.send(t.Context(), http.MethodPost, "/v1/run", body, "Idempotency-Key", "k")
		check.Require(t, err == nil, "%v", err)
		unread = append(unread, res.Body)
		switch replayed := res.Header.Get("Idempotency-Replayed") == "true"; {
		case res.StatusCode == http.StatusTooManyRequests:
			refused++
		case res.StatusCode != http.StatusOK || !replayed:
			t.Errorf("%d, replayed: %v", res.StatusCode, replayed)
		}
	}
	check.That(t, refused > 0 && refused < many, "%d are refused", refused)
	for _, body := range unread {
		body.Close()
	}
}

func jetStream(t *testing.T, o *server.Options) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url(o))
	check.Must(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	check.Must(t, err)
	return js
}

// consumer returns the state of the queue's consumer.
func consumer(t *testing.T, js jetstream.JetStream) *jetstream.ConsumerInfo {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Bound)
	defer cancel()
	queue, err := js.Consumer(ctx, "sbxrun-queue", "nodes")
	check.Must(t, err)
	return queue.CachedInfo()
}

// keyed sends a call with an idempotency key.
func (g *gateway) keyed(ctx context.Context, key string, c api.Call) (status int, text string, err error) {
	return g.post(ctx, "/v1/run", key, c)
}

func (g *gateway) post(ctx context.Context, path, key string, c api.Call) (status int, text string, err error) {
	body, _ := json.Marshal(c)
	return g.raw(ctx, http.MethodPost, path, string(body), "Idempotency-Key", key)
}

// Requests with the same key are one call, through any gateway, even after its node or the first gateway was killed.
func TestKeys(t *testing.T) {
	o := runNATS(t)
	c := newCluster(t, url(o), 3, 2, hostNetwork+"[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	for _, tt := range []struct {
		path, word string
		status     int
	}{{"/v1/run", "once", http.StatusOK}, {"/v1/calls", "queued", http.StatusAccepted}} {
		call := api.Call{Argv: []string{"bash", "-c", m.command(tt.word)[2] + "; sleep 0.2"}}
		post := func(g *gateway) (id string) {
			status, text, err := g.post(t.Context(), tt.path, tt.word, call)
			check.That(t, status == tt.status && err == nil, "%s: %v %v %v", tt.path, status, text, err)
			var a struct{ ID string }
			check.OK(t, json.Unmarshal([]byte(text), &a))
			return a.ID
		}
		ids := make([]string, 12)
		var all sync.WaitGroup
		for i := range ids {
			all.Go(func() { ids[i] = post(c.gateways[i%2]) })
		}
		all.Wait()
		check.That(t, ids[0] != "" && len(slices.Compact(slices.Clone(ids))) == 1, "%s: %q", tt.path, ids)
		status, text, err := c.gateways[0].post(t.Context(), tt.path, tt.word, api.Call{Argv: []string{"true"}})
		check.That(t, status == http.StatusConflict && err == nil, "%s: %v %v %v", tt.path, status, text, err)
		if tt.path == "/v1/calls" {
			c.gateways[0].kill()
		}
		for i, p := range c.nodes {
			if strings.HasPrefix(ids[0], fmt.Sprintf("n%d.", i)) {
				p.kill()
			}
		}
		check.Equal(t, post(c.gateways[1]), ids[0], "%s", tt.path)
		if tt.path == "/v1/calls" {
			x := c.gateways[1].end(t, ids[0])
			check.That(t, x.Report != nil && x.Report.ExitCode == 0, "%+v", x)
		}
		check.Equal(t, m.ran(t, tt.word), 1, "%s: it ran", tt.path)
	}
}

// The command nodes, the status of a gateway and its metrics list nodes, lost nodes and gateways.
func TestNodes(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 3, 1, "places = 1\n[rooms]\nmin = 0\nmax = 0\n")
	g := c.gateways[0]
	var got struct {
		Nodes    []api.Node
		Gateways []api.Node
	}
	list := func() map[string]api.NodeState {
		out, err := exec.Command(harness.Binary(t), "nodes", "--nats", url(o), "--json").Output()
		check.Require(t, err == nil && json.Unmarshal(out, &got) == nil && len(got.Gateways) == 1, "%v %s", err, out)
		states := map[string]api.NodeState{}
		for _, n := range got.Nodes {
			states[n.Name] = n.State
		}
		return states
	}
	harness.Until(t, harness.Bound, "three nodes", func() bool { return len(list()) == 3 })

	// One call runs on each node, and another one waits.
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	series := func() string {
		_, text := g.ask(t, http.MethodGet, "/metrics", nil)
		return text
	}
	for i := range 4 {
		all.Go(func() {
			_, _, _ = g.call(ctx, "/v1/run", api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 200_000}, nil)
		})
		// The next one goes to a node that is free, as far as the gateway knows.
		harness.Until(t, harness.Bound, "the gateway to know of it", func() bool {
			return strings.Contains(series(), "\nsbxrun_cluster_busy_ratio "+[]string{"0.33", "0.66", "1\n", "1.33"}[i])
		})
	}
	harness.Until(t, harness.Bound, "three calls that run and one that waits", func() bool {
		text := series()
		return strings.Contains(text, "\nsbxrun_cluster_busy_ratio 1.33") && strings.Contains(text, "\nsbxrun_cluster_waiting 1\n") &&
			strings.Contains(text, "\nsbxrun_cluster_nodes 3\n") && !strings.Contains(text, "\nsbxrun_cluster_oldest_waiting_seconds 0\n")
	})
	g.begin(t, "true") // finds no free slot
	harness.Until(t, harness.Bound, "a call in the queue", func() bool { return strings.Contains(series(), "\nsbxrun_cluster_waiting 2\n") })
	list()
	waiting := 0
	for _, n := range got.Nodes {
		waiting += n.Waiting
		check.That(t, n.Running == 1 && n.Places == 1 && (n.Waiting > 0) == (n.Oldest > 0), "%+v", n)
	}
	check.That(t, waiting == 1, "%d wait", waiting)

	c.nodes[0].kill()
	cancel()
	c.nodes[1].end()
	harness.Until(t, harness.Bound, "a node that is lost and one that has left", func() bool {
		is := list()
		return is["n0"] == api.StateLost && is["n1"] == api.StateLeft && is["n2"] == api.StateReady
	})
	for _, want := range []string{`sbxrun_node_gone{node="n0",state="lost"} 1`, `sbxrun_node_gone{node="n1",state="left"} 1`, `sbxrun_node_ready{node="n2"} 1`, "sbxrun_cluster_nodes 1"} {
		harness.Until(t, harness.Bound, want, func() bool { return strings.Contains(series(), want+"\n") })
	}
	var status api.Status
	g.ask(t, http.MethodGet, "/v1/status", &status)
	check.That(t, status.Machine != nil && len(status.Machine.Nodes) == 3 && status.Machine.Places == 1, "%+v", status)
	out, err := exec.Command(harness.Binary(t), "nodes", "--nats", url(o)).Output()
	check.That(t, err == nil && strings.Count(string(out), "\n") == 5 && strings.Contains(string(out), "lost "), "%v %s", err, out)
	c.nodes[0].start()
	c.nodes[1].start()
	harness.Until(t, harness.Bound, "all nodes again", func() bool {
		is := list()
		return len(got.Nodes) == 3 && is["n0"] == api.StateReady && is["n1"] == api.StateReady
	})
}
