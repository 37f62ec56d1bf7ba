package cluster

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// nodeMay is what the user of a node may do, as docs/scale.md has it.
func nodeMay(name string) *server.Permissions {
	return &server.Permissions{
		Publish: &server.SubjectPermission{Allow: []string{"sbxrun.beat.node." + name, "sbxrun.beats", "sbxrun.gateway.>", "$KV.sbxrun-calls.*.*",
			"$JS.API.CONSUMER.INFO.sbxrun-queue.nodes", "$JS.API.CONSUMER.MSG.NEXT.sbxrun-queue.nodes", "$JS.ACK.sbxrun-queue.nodes.>"}},
		Subscribe: &server.SubjectPermission{Allow: []string{"sbxrun.node." + name + ".>", "sbxrun.beat.*.*", "sbxrun.beats"}},
	}
}

var gatewayMay = &server.Permissions{
	Publish:   &server.SubjectPermission{Allow: []string{"sbxrun.node.>", "sbxrun.beat.gateway.*", "sbxrun.beats", "$JS.API.>", "$KV.sbxrun-keys.>", "$KV.sbxrun-calls.>", "sbxrun-queue.*"}},
	Subscribe: &server.SubjectPermission{Allow: []string{"sbxrun.gateway.>", "sbxrun.beat.*.*", "sbxrun.beats", "_INBOX.>"}},
}

// Whoever has stolen the credentials of a node can be that node, and nobody else: it reads nothing of other
// nodes, sends them nothing, and is not heard under their names.
func TestStolenNode(t *testing.T) {
	o := options(t)
	o.Users = []*server.User{
		{Username: "n0", Password: "a", Permissions: nodeMay("n0")}, {Username: "n1", Password: "b", Permissions: nodeMay("n1")},
		{Username: "g", Password: "c", Permissions: gatewayMay},
	}
	s := startNATS(t, o)
	defer s.Shutdown()
	as := func(user string) string { return fmt.Sprintf("nats://%s@127.0.0.1:%d", user, o.Port) }
	c := &cluster{t: t, dir: harness.Dir(t)}
	c.process("serve", "n1", as("n1:b"), "state_dir = \""+filepath.Join(c.dir, "n1")+"\"\n[rooms]\nmin = 0\nmax = 0\n")
	g := &gateway{socket: filepath.Join(c.dir, "g.sock")}
	g.process = c.process("gateway", "g", as("g:c"), "listen = [\"unix:"+g.socket+"\"]\n")
	g.client = unixClient(g.socket)
	c.ready(g, 1)
	if status, text, err := g.keyed(t.Context(), "k", api.Call{Argv: []string{"true"}}); status != http.StatusOK || err != nil {
		t.Fatal(status, text, err)
	}
	call := g.begin(t, "true")
	if x := g.end(t, call.ID); x.Report == nil { // with no more rights than these
		t.Fatalf("%+v", x)
	}
	refused := make(chan string, 16)
	stolen, err := nats.Connect(as("n0:a"), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
	if err != nil {
		t.Fatal(err)
	}
	defer stolen.Close()
	for _, subject := range []string{"sbxrun.node.n1.00000000.x", "sbxrun.beat.node.n1", "sbxrun.beat.gateway.g", "$JS.API.STREAM.NAMES", "$KV.sbxrun-keys.x", "sbxrun-queue.x",
		"$JS.API.STREAM.MSG.GET.KV_sbxrun-calls", "$JS.API.DIRECT.GET.KV_sbxrun-calls", "$JS.API.STREAM.MSG.GET.sbxrun-queue", "$JS.API.STREAM.MSG.DELETE.sbxrun-queue",
		"$JS.API.STREAM.PURGE.sbxrun-queue", "$JS.API.CONSUMER.CREATE.sbxrun-queue", "$JS.API.CONSUMER.CREATE.KV_sbxrun-calls", "$JS.API.CONSUMER.DELETE.sbxrun-queue.nodes"} {
		if err := stolen.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
		denied(t, refused, subject)
	}
	for _, subject := range []string{"sbxrun.>", "sbxrun.node.>", "sbxrun.node.n1.>", "sbxrun.gateway.>", "$KV.>", "sbxrun-queue.>", "_INBOX.>", "sbxrun.node.n1.inbox.>", ">"} {
		if _, err := stolen.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		denied(t, refused, subject)
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

// A file is found from any gateway, also by a call that would have gone to another node.
func TestFiles(t *testing.T) {
	o := options(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	c := newCluster(t, url(o), 3, 2, "[rooms]\nmin = 0\nmax = 0\n")
	res, err := c.gateways[0].client.Post("http://sbxrun/v1/files", "application/octet-stream", strings.NewReader("stored"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	const id = "sha256:9f2f2c5a6f7a3a5e" // only its form is looked at below
	for range 10 {
		a := &api.Answer{}
		_, e, err := c.gateways[1].call(t.Context(), "/v1/run", api.Call{Argv: []string{"cat", "f"}, Files: []api.FileIn{{Path: "f", ID: sum("stored")}}}, a)
		if err != nil || e != nil || *a.Stdout != "stored" {
			t.Fatalf("%+v %v", e, err)
		}
	}
	if status, e, err := c.gateways[1].call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}, Files: []api.FileIn{{Path: "f", ID: id}}}, nil); status/100 != 4 || err != nil || e.Started {
		t.Error(status, e, err)
	}
	if res, err = c.gateways[0].client.Get("http://sbxrun/metrics"); err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text := make([]byte, 1<<16)
	n, _ := res.Body.Read(text)
	if !strings.Contains(string(text[:n]), `sbxrun_node_ready{node="n2"} 1`) {
		t.Errorf("%s", text[:n])
	}
}
