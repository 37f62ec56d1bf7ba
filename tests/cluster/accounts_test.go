package cluster

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// passwords are the passwords that the example reads from the environment.
var passwords = map[string]string{"GATEWAY": "of-the-gateway", "NODE_1": "of-node-1", "NODE_2": "of-node-2", "NODE_3": "of-node-3", "NODE_4": "of-node-4"}

// example reads the documented clients/examples/cluster/nats.conf, with our own certificates and on the
// loopback interface.
func example(t *testing.T) (o *server.Options, ca string) {
	t.Helper()
	dir := harness.Certificates(t)
	text := harness.ReadFile(t, "../../clients/examples/cluster/nats.conf")
	file := filepath.Join(dir, "nats.conf")
	check.Must(t, os.WriteFile(file, []byte(strings.NewReplacer("/etc/nats-server", dir, "/var/lib/nats-server", dir+"/store").Replace(string(text))), 0o600))
	t.Setenv("NATS_NAME", "nats1")
	for name, word := range passwords {
		t.Setenv(name, word)
	}
	o, err := server.ProcessConfigFile(file)
	check.Must(t, err)
	check.That(t, o.JetStream && o.TLSConfig != nil && len(o.Routes) == 3 && o.Cluster.Name != "" && o.Cluster.TLSConfig != nil, "the example lacks JetStream, TLS or other servers")
	o.Host, o.Port, o.NoLog, o.NoSigs = "127.0.0.1", freePort(), true, true
	o.Cluster, o.Routes = server.ClusterOpts{}, nil // a single server
	return o, filepath.Join(dir, "ca.pem")
}

// With TLS and the users of the example, calls, keys and heartbeats work. With stolen credentials of a node,
// an attacker can act as that node only: it cannot read messages to other nodes, send them any, or use
// their names. This holds for the newest NATS server and the oldest in docs/guides/cluster.md.
func TestStolenNode(t *testing.T) {
	t.Run("newest", func(t *testing.T) {
		o, ca := example(t)
		startNATS(t, o)
		stolenNode(t, o, ca)
	})
	t.Run("oldest", func(t *testing.T) {
		o, ca := example(t)
		oldestNATS(t, o)
		stolenNode(t, o, ca)
	})
}

func stolenNode(t *testing.T, o *server.Options, ca string) {
	as := func(user, password string) string {
		return fmt.Sprintf("tls://%s:%s@127.0.0.1:%d", user, passwords[password], o.Port)
	}
	c := &cluster{t: t, dir: harness.Dir(t), nats: "ca = \"" + ca + "\"\n"}
	old, err := nats.Connect(as("gateway", "GATEWAY"), nats.RootCAs(ca))
	check.Must(t, err)
	defer old.Close()
	js, err := jetstream.New(old)
	check.Must(t, err)
	// A bucket of an earlier version, in which every writer could delete everything.
	_, err = js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "sbxrun-calls"})
	check.Must(t, err)
	node := c.process("serve", "node2", as("node2", "NODE_2"), "state_dir = \""+filepath.Join(c.dir, "node2")+"\"\n[rooms]\nmin = 0\nmax = 0\n")
	g := c.gateway("g", as("gateway", "GATEWAY"), "")
	c.ready(g, 1)
	status, text, err := g.keyed(t.Context(), "k", api.Call{Argv: []string{"true"}})
	check.Require(t, status == http.StatusOK && err == nil, "%v %v %v", status, text, err)
	call := g.begin(t, "true")
	x := g.end(t, call.ID)
	check.Require(t, x.Report != nil, "%+v", x) // with only these rights
	status, stored := g.store(t, "of a tenant")
	check.Require(t, status == http.StatusCreated, "%v", status)
	for _, p := range []*process{node, g.process} {
		check.That(t, !strings.Contains(p.log.String(), "iolation"), "%s", p.log)
	}
	refused := make(chan string, 16)
	stolen, err := nats.Connect(as("node1", "NODE_1"), nats.RootCAs(ca), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
	check.Must(t, err)
	defer stolen.Close()
	for _, subject := range []string{"sbxrun.node.node2.00000000.g.x", "sbxrun.gateway.g.00000000.node2.x", "sbxrun.gateway.g.00000000.x", "sbxrun.beat.node.node2", "sbxrun.beat.gateway.g", "sbxrun.beats.node", "$JS.API.STREAM.NAMES", "$KV.sbxrun-keys.x", "sbxrun-queue.x",
		"$JS.API.STREAM.MSG.GET.KV_sbxrun-calls", "$JS.API.DIRECT.GET.KV_sbxrun-calls", "$JS.API.STREAM.MSG.GET.sbxrun-queue", "$JS.API.STREAM.MSG.DELETE.sbxrun-queue",
		"$JS.API.STREAM.PURGE.sbxrun-queue", "$JS.API.CONSUMER.INFO.sbxrun-queue.nodes", "$JS.API.CONSUMER.CREATE.sbxrun-queue", "$JS.API.CONSUMER.CREATE.KV_sbxrun-calls", "$JS.API.CONSUMER.DELETE.sbxrun-queue.nodes",
		"$O.sbxrun-files-x.C.x", "$KV.sbxrun-shares.x", "$JS.API.STREAM.MSG.GET.KV_sbxrun-shares", "$JS.API.CONSUMER.CREATE.OBJ_sbxrun-files-x", "$JS.API.DIRECT.GET.OBJ_sbxrun-files-x"} {
		check.Must(t, stolen.Publish(subject, []byte("x")))
		denied(t, refused, subject)
	}
	for _, subject := range []string{"sbxrun.>", "sbxrun.node.>", "sbxrun.node.node2.>", "sbxrun.gateway.>", "sbxrun.beat.node.*", "$KV.>", "sbxrun-queue.>", "_INBOX.>", "sbxrun.node.node2.inbox.>", ">"} {
		_, err := stolen.SubscribeSync(subject)
		check.Must(t, err)
		denied(t, refused, subject)
	}
	_, err = nats.Connect(fmt.Sprintf("tls://127.0.0.1:%d", o.Port), nats.RootCAs(ca))
	check.That(t, err != nil, "anybody may connect")
	canDo(t, g, js, stolen, call.ID, stored.ID)
}

// canDo uses a node's credentials for everything that docs/guides/cluster.md mentions, and tries more.
func canDo(t *testing.T, g *gateway, js jetstream.JetStream, stolen *nats.Conn, call, file string) {
	const instance = "node.node1.00000000"
	inbox, err := stolen.SubscribeSync("sbxrun.node.node1.inbox.*")
	check.Must(t, err)
	get, err := stolen.SubscribeSync("sbxrun." + instance + ".*.*")
	check.Must(t, err)
	ask := func(m *nats.Msg) string {
		m.Reply = "sbxrun.node.node1.inbox.x"
		check.Must(t, stolen.PublishMsg(m))
		a, err := inbox.NextMsg(harness.Bound)
		check.Require(t, err == nil, "%v %v", m.Subject, err)
		return string(a.Data)
	}
	tenant := fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "uid-%d", os.Getuid())))[:32]
	// It may create records, but not delete others.
	for _, rollup := range []string{"all", "sub", ""} {
		m := &nats.Msg{Subject: "$KV.sbxrun-calls." + tenant + ".q-of-nobody", Data: []byte("{}"), Header: nats.Header{}}
		if rollup != "" {
			m.Header.Set("Nats-Rollup", rollup)
		}
		text := ask(m)
		check.That(t, strings.Contains(text, "rollup not permitted") == (rollup != ""), "%q: %s", rollup, text)
	}
	// JetStream responds to any reply subject, even if the node may not publish there. Such a response must
	// not become a request to JetStream or a record.
	for _, at := range []string{"$JS.API.STREAM.PURGE.KV_sbxrun-calls", "$JS.API.STREAM.DELETE.KV_sbxrun-calls", "$JS.API.STREAM.DELETE.sbxrun-queue", "$KV.sbxrun-shares." + tenant, "sbxrun-queue.x"} {
		err := stolen.PublishRequest("$KV.sbxrun-calls.x.y", at, nil)
		check.Must(t, err) // with text in the response
		err = stolen.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.sbxrun-queue.nodes", at, []byte(`{"batch":1,"no_wait":true}`))
		check.Must(t, err) // with an empty response
	}
	ask(&nats.Msg{Subject: "$KV.sbxrun-calls.x.y"}) // now both have a response
	queue, err := js.Stream(t.Context(), "sbxrun-queue")
	check.That(t, err == nil && queue.CachedInfo().State.Msgs == 0, "%+v %v", queue, err)
	record, err := js.KeyValue(t.Context(), "sbxrun-shares")
	check.Must(t, err)
	entry, err := record.Get(t.Context(), tenant)
	check.That(t, err == nil && strings.Contains(string(entry.Value()), `"held":`), "%v", err)
	x := g.end(t, call)
	check.That(t, x.Report != nil, "%+v", x)
	tell := func(places, running int) {
		text := fmt.Sprintf(`{"kind":"node","name":"node1","instance":"00000000","places":%d,"running":%d}`, places, running)
		check.Must(t, stolen.Publish("sbxrun.beat.node.node1", []byte(text)))
	}
	// It can get a tenant's file if it knows the hash.
	beats, err := stolen.SubscribeSync("sbxrun.beat.gateway.*")
	check.Must(t, err)
	tell(1, 1000)
	beat, err := beats.NextMsg(harness.Bound)
	var to struct{ Instance string }
	check.Require(t, err == nil && json.Unmarshal(beat.Data, &to) == nil, "%v", err)
	until := func(text string) {
		t.Helper()
		for all := ""; !strings.Contains(all, text); {
			m, err := get.NextMsg(harness.Bound)
			check.Require(t, err == nil, "%v: %q", err, all)
			all += string(m.Data)
		}
	}
	request := func(id, path string) {
		frame := append([]byte{1}, make([]byte, 24)...) // opens, at offset 0
		frame[22] = 2                                   // accepts 128 KiB
		frame = fmt.Appendf(frame, "GET %s HTTP/1.1\r\nHost: g\r\nSbxrun-Tenant: uid-%d\r\n\r\n", path, os.Getuid())
		check.Must(t, stolen.PublishRequest("sbxrun.gateway.g."+to.Instance+".node1."+id, "sbxrun."+instance+".g."+id, frame))
	}
	request("1", "/v1/files/"+file)
	until("of a tenant")
	request("2", "/v1/calls/"+call)
	until("404 Not Found")
	// It can take calls from the queue. It returns this one.
	check.Must(t, stolen.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.sbxrun-queue.nodes", "sbxrun.node.node1.inbox.x", []byte(`{"batch":1,"expires":60000000000}`)))
	var begun []string
	for i := -1; i < 0; { // the real node takes some
		begun = append(begun, g.begin(t, "true").ID)
		m, err := inbox.NextMsg(100 * time.Millisecond)
		if err != nil {
			continue
		}
		i = slices.IndexFunc(begun, func(id string) bool { return strings.Contains(string(m.Data), id) })
		check.Require(t, i >= 0, "got %v %q", m.Header, m.Data)
		check.Must(t, m.Respond([]byte("-NAK")))
		x = g.end(t, begun[i])
	}
	check.That(t, x.Report != nil, "%+v", x)
	// By announcing slots, it gets requests.
	harness.Until(t, harness.Bound, "the gateway to use its heartbeat", func() bool {
		tell(1_000_000, 0)
		_, text := g.ask(t, http.MethodGet, "/metrics", nil)
		return strings.Contains(text, `sbxrun_node_places{node="node1"} 1e+06`)
	})
	ctx, cancel := context.WithCancel(t.Context())
	var answered sync.WaitGroup
	for range 3 { // the first may reach a node that does nothing
		answered.Go(func() {
			_, _, _ = g.call(ctx, "/v1/run", api.Call{Argv: []string{"sh", "-c", "sleep 100; echo a secret"}, TimeoutMS: 200_000}, nil)
		})
	}
	until("a secret")
	cancel()
	answered.Wait()
}

// store uploads a file. All requests have the same ID, which a client may use for related requests.
func (g *gateway) store(t *testing.T, text string) (status int, x api.Stored) {
	t.Helper()
	status, answer, err := g.raw(t.Context(), http.MethodPost, "/v1/files", text, "Content-Type", "application/octet-stream", "X-Request-Id", "one-of-several")
	check.Must(t, err)
	_ = json.Unmarshal([]byte(answer), &x) // an error has other fields
	return status, x
}

func denied(t *testing.T, refused <-chan string, subject string) {
	t.Helper()
	select {
	case text := <-refused:
		check.That(t, strings.Contains(text, subject) && strings.Contains(strings.ToLower(text), "permissions violation"), "%s: %s", subject, text)
	case <-time.After(harness.Bound):
		t.Errorf("%s is allowed", subject)
	}
}

// A tenant without a quota for files cannot store any at a gateway: 0 does not mean unlimited.
func TestNoFiles(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	g := newCluster(t, url(o), 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nfiles = \"0\"\n").gateways[0]
	status, x := g.store(t, "stored")
	check.That(t, status == http.StatusInsufficientStorage, "%d %+v", status, x)
}

// Files that clients do not read use a limited amount of a gateway's memory.
func TestFilesMemory(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	g := newCluster(t, url(o), 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nbuffers = \"10M\"\n").gateways[0]
	const size = 4 << 20
	status, x := g.store(t, strings.Repeat("x", size))
	check.Require(t, status == http.StatusCreated, "%d %+v", status, x)
	var unread []io.Closer
	for i := range 4 {
		res, err := g.send(t.Context(), http.MethodGet, "/v1/files/"+x.ID, "")
		check.Require(t, err == nil, "%v", err)
		unread = append(unread, res.Body)
		check.That(t, (res.StatusCode == http.StatusOK) == (i < 2), "%d: %d", i, res.StatusCode)
	}
	for _, body := range unread {
		body.Close()
	}
	harness.Until(t, harness.Bound, "the memory", func() bool {
		status, text := g.ask(t, http.MethodGet, "/v1/files/"+x.ID, nil)
		return status == http.StatusOK && len(text) == size
	})
}

// All gateways and nodes find a file, even if the gateway of its upload is lost, and the collected files of
// a call as long as its node is there. A tenant's quota holds for all gateways together.
func TestFiles(t *testing.T) {
	o := runNATS(t)
	c := newCluster(t, url(o), 3, 2, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nfiles = \"4M\"\n")
	put := func(g *gateway, text string) (int, string) {
		status, x := g.store(t, text)
		return status, x.ID
	}
	large := strings.Repeat("0123456789abcdef", 1<<16) // larger than a message
	for _, text := range []string{"stored", large, "stored", ""} {
		status, id := put(c.gateways[0], text)
		check.Require(t, status == http.StatusCreated && id == sum(text), "%v %v", status, id)
	}
	c.gateways[0].kill()
	g := c.gateways[1]
	run := func(id string) (api.Answer, *api.Error) {
		var a api.Answer
		_, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"sh", "-c", "cat f | tee out"}, Files: []api.FileIn{{Path: "f", ID: id}}, Collect: []string{"out"}}, &a)
		check.Must(t, err)
		return a, e
	}
	nodes := map[string]bool{}
	for range 12 {
		a, e := run(sum(large))
		check.Require(t, e == nil && *a.Stdout == large, "%+v", e)
		nodes[a.ID[:2]] = true
		a, e = run(sum("stored"))
		check.Require(t, e == nil && *a.Stdout == "stored", "%+v", e)
	}
	check.That(t, len(nodes) >= 2, "it only ran on %v", nodes)
	var queued api.CallStatus
	_, e, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: []string{"cat", "f"}, Files: []api.FileIn{{Path: "f", ID: sum("stored")}}}, &queued)
	check.Require(t, e == nil && err == nil, "%v %v", e, err)
	x := g.end(t, queued.ID)
	check.That(t, x.Report != nil && x.Report.ExitCode == 0, "%+v", x)
	status, text := g.ask(t, http.MethodGet, "/v1/files/"+sum(large), nil)
	check.That(t, status == http.StatusOK && text == large, "%v %v", status, len(text))
	// An invalid ID is not found, as on a node.
	status, text = g.ask(t, http.MethodGet, "/v1/files/sha256:..%2f..%2fsecret", nil)
	check.That(t, status == http.StatusNotFound, "%v %v", status, text)
	_, e = run("../secret")
	check.That(t, e != nil && e.Failure.Code == api.NoSuchFile, "%+v", e)
	// The files of a call are on its node.
	var a api.Answer
	_, e, err = g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"sh", "-c", "echo made >out"}, Collect: []string{"out"}}, &a)
	check.Require(t, e == nil && err == nil, "%v %v", e, err)
	for range 8 {
		b, e := run(a.Files[0].ID)
		check.Require(t, e == nil && *b.Stdout == "made\n", "%+v", e)
	}
	for _, id := range []string{sum("another"), "sha256:9f2f", "part-x", "x"} {
		status, text := g.ask(t, http.MethodGet, "/v1/files/"+id, nil)
		check.That(t, status == http.StatusNotFound, "%v %v %v", id, status, text)
		_, e := run(id)
		check.That(t, e != nil && !e.Started && e.Failure.Code == api.NoSuchFile, "%s: %+v", id, e)
	}
	c.gateways[0].start()
	c.ready(c.gateways[0], 3)
	status, _ = put(c.gateways[0], strings.Repeat("x", 2<<20))
	check.That(t, status == http.StatusCreated, "%v", status)
	status, _ = put(g, strings.Repeat("y", 2<<20))
	check.That(t, status == http.StatusInsufficientStorage, "%v", status)
	status, id := put(g, "still room")
	check.That(t, status == http.StatusCreated && id == sum("still room"), "%v %v", status, id) // a rejected upload uses no room
	// An incomplete upload leaves nothing behind.
	half, err := net.Dial("unix", g.socket)
	check.Must(t, err)
	defer half.Close()
	const room = 900 << 10 // of the last MiB
	_, _ = fmt.Fprintf(half, "POST /v1/files HTTP/1.1\r\nHost: sbxrun\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", room, strings.Repeat("h", room))
	_ = half.(*net.UnixConn).CloseWrite()
	_ = half.SetDeadline(time.Now().Add(harness.Bound))
	broken, err := http.ReadResponse(bufio.NewReader(half), nil)
	check.That(t, err == nil && broken.StatusCode == http.StatusBadRequest, "%v %v", broken, err)
	status, text = g.ask(t, http.MethodGet, "/v1/files/"+sum(strings.Repeat("h", room)), nil)
	check.That(t, status == http.StatusNotFound, "%v %v", status, len(text))
	status, _ = put(g, strings.Repeat("w", room))
	check.That(t, status == http.StatusCreated, "%v", status)
	_, text = g.ask(t, http.MethodGet, "/metrics", nil)
	check.That(t, strings.Contains(text, `sbxrun_node_ready{node="n2"} 1`), "%s", text)
}
