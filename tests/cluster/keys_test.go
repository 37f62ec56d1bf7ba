package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// keyed sends a call with an idempotency key.
func (g *gateway) keyed(ctx context.Context, key string, c api.Call) (status int, text string, err error) {
	return g.post(ctx, "/v1/run", key, c)
}

func (g *gateway) post(ctx context.Context, path, key string, c api.Call) (status int, text string, err error) {
	body, _ := json.Marshal(c)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sbxrun"+path, strings.NewReader(string(body)))
	if err != nil {
		return 0, "", err
	}
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("Idempotency-Key", key)
	res, err := g.client.Do(q)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	return res.StatusCode, string(answer), err
}

// Requests with the same key are one call, through any gateway, and its response outlives its node.
func TestKeys(t *testing.T) {
	o := runNATS(t)
	c := newCluster(t, url(o), 3, 2, "[sandbox]\nnetwork = \"host\"\n[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	call := api.Call{Argv: []string{"bash", "-c", fmt.Sprintf("echo once >/dev/tcp/127.0.0.1/%d; sleep 0.2", m.port)}}
	answers := make([]string, 12)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			status, text, err := c.gateways[i%2].keyed(t.Context(), "k", call)
			check.That(t, status == http.StatusOK && err == nil, "%v %v %v", status, text, err)
			var a api.Answer
			check.OK(t, json.Unmarshal([]byte(text), &a))
			answers[i] = a.ID
		})
	}
	all.Wait()
	for _, id := range answers {
		check.That(t, id != "" && id == answers[0], "%q", answers)
	}
	check.Equal(t, m.count("once"), 1, "it ran")
	status, text, err := c.gateways[0].keyed(t.Context(), "k", api.Call{Argv: []string{"true"}})
	check.That(t, status == http.StatusConflict && err == nil, "%v %v %v", status, text, err)
	for i, p := range c.nodes {
		if strings.HasPrefix(answers[0], fmt.Sprintf("n%d.", i)) {
			p.kill()
		}
	}
	status, text, err = c.gateways[1].keyed(t.Context(), "k", call)
	check.That(t, status == http.StatusOK && err == nil && strings.Contains(text, answers[0]), "%v %v %v", status, text, err)
	check.Equal(t, m.count("once"), 1, "it ran")
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
	for range 4 {
		all.Go(func() {
			_, _, _ = g.call(ctx, "/v1/run", api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 200_000}, nil)
		})
		time.Sleep(50 * time.Millisecond) // so that they are distributed
	}
	defer all.Wait()
	defer cancel()
	series := func() string {
		res, err := g.client.Get("http://sbxrun/metrics")
		harness.Must(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		harness.Must(t, err)
		return string(text)
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
	var status api.Status
	res, err := g.client.Get("http://sbxrun/v1/status")
	harness.Must(t, err)
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&status); err != nil || status.Machine == nil || len(status.Machine.Nodes) != 3 || status.Machine.Places != 1 {
		t.Errorf("%+v %v", status, err)
	}
	text := series()
	for _, want := range []string{`sbxrun_node_gone{node="n0",state="lost"} 1`, `sbxrun_node_gone{node="n1",state="left"} 1`, `sbxrun_node_ready{node="n2"} 1`, "sbxrun_cluster_nodes 1"} {
		check.That(t, strings.Contains(text, want+"\n"), "no %s", want)
	}
	out, err := exec.Command(harness.Binary(t), "nodes", "--nats", url(o)).Output()
	check.That(t, err == nil && strings.Count(string(out), "\n") == 5 && strings.Contains(string(out), "lost "), "%v %s", err, out)
	c.nodes[0].start()
	c.nodes[1].start()
	harness.Until(t, harness.Bound, "all nodes again", func() bool {
		is := list()
		return len(got.Nodes) == 3 && is["n0"] == api.StateReady && is["n1"] == api.StateReady
	})
}
