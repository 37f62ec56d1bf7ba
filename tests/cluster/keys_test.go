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

	"github.com/sbxrun/sbxrun/internal/api"
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

// The same key is one call, by whichever gateway it comes, and the answer outlives its node.
func TestKeys(t *testing.T) {
	o := options(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	c := newCluster(t, url(o), 3, 2, "[sandbox]\nnetwork = \"host\"\n[rooms]\nmin = 0\nmax = 0\n")
	m := newMarks(t)
	call := api.Call{Argv: []string{"bash", "-c", fmt.Sprintf("echo once >/dev/tcp/127.0.0.1/%d; sleep 0.2", m.port)}}
	answers := make([]string, 12)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			status, text, err := c.gateways[i%2].keyed(t.Context(), "k", call)
			if status != http.StatusOK || err != nil {
				t.Error(status, text, err)
			}
			var a api.Answer
			if err := json.Unmarshal([]byte(text), &a); err != nil {
				t.Error(err)
			}
			answers[i] = a.ID
		})
	}
	all.Wait()
	for _, id := range answers {
		if id == "" || id != answers[0] {
			t.Errorf("%q", answers)
		}
	}
	if n := m.count("once"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
	if status, text, err := c.gateways[0].keyed(t.Context(), "k", api.Call{Argv: []string{"true"}}); status != http.StatusConflict || err != nil {
		t.Error(status, text, err)
	}
	for i, p := range c.nodes {
		if strings.HasPrefix(answers[0], fmt.Sprintf("n%d.", i)) {
			p.kill()
		}
	}
	if status, text, err := c.gateways[1].keyed(t.Context(), "k", call); status != http.StatusOK || err != nil || !strings.Contains(text, answers[0]) {
		t.Error(status, text, err)
	}
	if n := m.count("once"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
}

// The nodes that are there, and the gateways, as a command tells it.
func TestNodesCommand(t *testing.T) {
	o := options(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	newCluster(t, url(o), 2, 1, "places = 7\n[rooms]\nmin = 0\nmax = 0\n")
	out, err := exec.Command(harness.Binary(t), "nodes", "--nats", url(o), "--json").Output()
	var got struct {
		Nodes []struct {
			Name     string
			Places   int
			Draining bool
		}
		Gateways []struct{ Name string }
	}
	if err != nil || json.Unmarshal(out, &got) != nil || len(got.Nodes) != 2 || got.Nodes[1].Name != "n1" || got.Nodes[0].Places != 7 || len(got.Gateways) != 1 {
		t.Errorf("%v %s", err, out)
	}
	out, err = exec.Command(harness.Binary(t), "nodes", "--nats", url(o)).Output()
	if err != nil || strings.Count(string(out), "\n") != 4 || !strings.Contains(string(out), "n0") {
		t.Errorf("%v %s", err, out)
	}
}
