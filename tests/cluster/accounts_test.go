package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// passwords are those that the example takes from the environment.
var passwords = map[string]string{"GATEWAY": "of-the-gateway", "NODE_1": "of-node-1", "NODE_2": "of-node-2", "NODE_3": "of-node-3", "NODE_4": "of-node-4"}

// example reads clients/examples/cluster/nats.conf, with certificates of our own and on the loopback
// interface: what is documented is what is tested.
func example(t *testing.T) (o *server.Options, ca string) {
	t.Helper()
	dir := harness.Dir(t)
	certificates(t, dir)
	text, err := os.ReadFile("../../clients/examples/cluster/nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(text), "/etc/nats-server", dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NATS_NAME", "nats1")
	for name, word := range passwords {
		t.Setenv(name, word)
	}
	if o, err = server.ProcessConfigFile(file); err != nil {
		t.Fatal(err)
	}
	if !o.JetStream || o.TLSConfig == nil || len(o.Routes) != 3 || o.Cluster.Name == "" || o.Cluster.TLSConfig == nil {
		t.Errorf("the example lacks JetStream, TLS or other servers")
	}
	o.Host, o.Port, o.StoreDir, o.NoLog, o.NoSigs = "127.0.0.1", freePort(t), filepath.Join(dir, "store"), true, true
	o.Cluster, o.Routes = server.ClusterOpts{}, nil // one server alone
	return o, filepath.Join(dir, "ca.pem")
}

// certificates writes a CA, and a certificate of it for 127.0.0.1.
func certificates(t *testing.T, dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	text, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*pem.Block{"ca.pem": {Type: "CERTIFICATE", Bytes: text}, "server.pem": {Type: "CERTIFICATE", Bytes: text}, "server.key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// With the users of the example everything goes on by TLS as without: calls, keys, presence. Whoever
// has stolen the credentials of a node can be that node, and nobody else: it reads nothing of other
// nodes, sends them nothing, and is not heard under their names.
func TestStolenNode(t *testing.T) {
	o, ca := example(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	as := func(user, password string) string {
		return fmt.Sprintf("tls://%s:%s@127.0.0.1:%d", user, passwords[password], o.Port)
	}
	c := &cluster{t: t, dir: harness.Dir(t), nats: "ca = \"" + ca + "\"\n"}
	node := c.process("serve", "node2", as("node2", "NODE_2"), "state_dir = \""+filepath.Join(c.dir, "node2")+"\"\n[rooms]\nmin = 0\nmax = 0\n")
	g := &gateway{socket: filepath.Join(c.dir, "g.sock")}
	g.process = c.process("gateway", "g", as("gateway", "GATEWAY"), "listen = [\"unix:"+g.socket+"\"]\n")
	g.client = unixClient(g.socket)
	c.ready(g, 1)
	if status, text, err := g.keyed(t.Context(), "k", api.Call{Argv: []string{"true"}}); status != http.StatusOK || err != nil {
		t.Fatal(status, text, err)
	}
	call := g.begin(t, "true")
	if x := g.end(t, call.ID); x.Report == nil { // with no more rights than these
		t.Fatalf("%+v", x)
	}
	for _, p := range []*process{node, g.process} {
		if strings.Contains(p.log.String(), "iolation") {
			t.Errorf("%s", p.log)
		}
	}
	refused := make(chan string, 16)
	stolen, err := nats.Connect(as("node1", "NODE_1"), nats.RootCAs(ca), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
	if err != nil {
		t.Fatal(err)
	}
	defer stolen.Close()
	for _, subject := range []string{"sbxrun.node.node2.00000000.g.x", "sbxrun.gateway.g.00000000.node2.x", "sbxrun.gateway.g.00000000.x", "sbxrun.beat.node.node2", "sbxrun.beat.gateway.g", "sbxrun.beats.node", "$JS.API.STREAM.NAMES", "$KV.sbxrun-keys.x", "sbxrun-queue.x",
		"$JS.API.STREAM.MSG.GET.KV_sbxrun-calls", "$JS.API.DIRECT.GET.KV_sbxrun-calls", "$JS.API.STREAM.MSG.GET.sbxrun-queue", "$JS.API.STREAM.MSG.DELETE.sbxrun-queue",
		"$JS.API.STREAM.PURGE.sbxrun-queue", "$JS.API.CONSUMER.CREATE.sbxrun-queue", "$JS.API.CONSUMER.CREATE.KV_sbxrun-calls", "$JS.API.CONSUMER.DELETE.sbxrun-queue.nodes",
		"$O.sbxrun-files-x.C.x", "$KV.sbxrun-shares.x", "$JS.API.STREAM.MSG.GET.KV_sbxrun-shares", "$JS.API.CONSUMER.CREATE.OBJ_sbxrun-files-x", "$JS.API.DIRECT.GET.OBJ_sbxrun-files-x"} {
		if err := stolen.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
		denied(t, refused, subject)
	}
	for _, subject := range []string{"sbxrun.>", "sbxrun.node.>", "sbxrun.node.node2.>", "sbxrun.gateway.>", "sbxrun.beat.node.*", "$KV.>", "sbxrun-queue.>", "_INBOX.>", "sbxrun.node.node2.inbox.>", ">"} {
		if _, err := stolen.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		denied(t, refused, subject)
	}
	if _, err := nats.Connect(fmt.Sprintf("tls://127.0.0.1:%d", o.Port), nats.RootCAs(ca)); err == nil {
		t.Error("anybody may connect")
	}
}

func denied(t *testing.T, refused <-chan string, subject string) {
	t.Helper()
	select {
	case text := <-refused:
		if !strings.Contains(text, subject) || !strings.Contains(strings.ToLower(text), "permissions violation") {
			t.Errorf("%s: %s", subject, text)
		}
	case <-time.After(harness.Bound):
		t.Errorf("%s is allowed", subject)
	}
}

// A file is found from any gateway and by any node, also if the one that it was put through is lost; so is
// one that a call has collected, while its node is there. A tenant has its quota over all gateways.
func TestFiles(t *testing.T) {
	o := options(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	c := newCluster(t, url(o), 3, 2, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nfiles = \"4M\"\n")
	put := func(g *gateway, text string) (int, string) {
		res, err := g.client.Post("http://sbxrun/v1/files", "application/octet-stream", strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var x api.Stored
		_ = json.NewDecoder(res.Body).Decode(&x) // an error has other members
		return res.StatusCode, x.ID
	}
	large := strings.Repeat("0123456789abcdef", 1<<16) // more than a message
	for _, text := range []string{"stored", large, "stored", ""} {
		if status, id := put(c.gateways[0], text); status != http.StatusCreated || id != sum(text) {
			t.Fatal(status, id)
		}
	}
	c.gateways[0].kill()
	g := c.gateways[1]
	run := func(id string) (api.Answer, *api.Error) {
		var a api.Answer
		_, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"sh", "-c", "cat f | tee out"}, Files: []api.FileIn{{Path: "f", ID: id}}, Collect: []string{"out"}}, &a)
		if err != nil {
			t.Fatal(err)
		}
		return a, e
	}
	nodes := map[string]bool{}
	for range 12 {
		a, e := run(sum(large))
		if e != nil || *a.Stdout != large {
			t.Fatalf("%+v", e)
		}
		nodes[a.ID[:2]] = true
		if a, e = run(sum("stored")); e != nil || *a.Stdout != "stored" {
			t.Fatalf("%+v", e)
		}
	}
	if len(nodes) < 2 {
		t.Errorf("it ran on %v alone", nodes)
	}
	var queued api.CallStatus
	if _, e, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: []string{"cat", "f"}, Files: []api.FileIn{{Path: "f", ID: sum("stored")}}}, &queued); e != nil || err != nil {
		t.Fatal(e, err)
	}
	if x := g.end(t, queued.ID); x.Report == nil || x.Report.ExitCode != 0 {
		t.Errorf("%+v", x)
	}
	if status, text := g.ask(t, http.MethodGet, "/v1/files/"+sum(large), nil); status != http.StatusOK || text != large {
		t.Error(status, len(text))
	}
	// What a call has made is on its node.
	var a api.Answer
	if _, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"sh", "-c", "echo made >out"}, Collect: []string{"out"}}, &a); e != nil || err != nil {
		t.Fatal(e, err)
	}
	for range 8 {
		if b, e := run(a.Files[0].ID); e != nil || *b.Stdout != "made\n" {
			t.Fatalf("%+v", e)
		}
	}
	for _, id := range []string{sum("another"), "sha256:9f2f", "part-x", "x"} {
		if status, text := g.ask(t, http.MethodGet, "/v1/files/"+id, nil); status != http.StatusNotFound {
			t.Error(id, status, text)
		}
		if _, e := run(id); e == nil || e.Started || e.Failure.Code != api.NoSuchFile {
			t.Errorf("%s: %+v", id, e)
		}
	}
	if status, _ := put(g, strings.Repeat("x", 5<<20)); status != http.StatusInsufficientStorage {
		t.Error(status)
	}
	if status, id := put(g, "still room"); status != http.StatusCreated || id != sum("still room") {
		t.Error(status, id) // what did not fit takes none
	}
	res, err := g.client.Get("http://sbxrun/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text := make([]byte, 1<<16)
	n, _ := res.Body.Read(text)
	if !strings.Contains(string(text[:n]), `sbxrun_node_ready{node="n2"} 1`) {
		t.Errorf("%s", text[:n])
	}
}
