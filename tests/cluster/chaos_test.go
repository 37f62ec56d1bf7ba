package cluster

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// threeNATS returns the options of a cluster of three NATS servers.
func threeNATS(t *testing.T) (all []*server.Options, urls string) {
	t.Helper()
	var routes, list []string
	for range 3 {
		o := options(t)
		o.ServerName = fmt.Sprint("s", len(all))
		o.Cluster = server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: freePort()}
		all = append(all, o)
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", o.Cluster.Port))
		list = append(list, url(o))
	}
	for _, o := range all {
		o.Routes = server.RoutesFromStr(strings.Join(routes, ","))
	}
	return all, strings.Join(list, ",")
}

// accept calls each for every connection to a port, until the end of the test.
func accept(t *testing.T, each func(net.Conn)) (port int) {
	t.Helper()
	l := harness.Listen(t)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go each(c)
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// marks counts the messages that calls send, by their word.
type marks struct {
	port int
	mu   sync.Mutex
	seen map[string]int
}

func newMarks(t *testing.T) *marks {
	t.Helper()
	m := &marks{seen: map[string]int{}}
	m.port = accept(t, func(c net.Conn) {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(harness.Bound))
		word, _ := bufio.NewReader(c).ReadString('\n')
		m.mu.Lock()
		defer m.mu.Unlock()
		m.seen[strings.TrimSpace(word)]++
	})
	return m
}

func (m *marks) count(word string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen[word]
}

// ran waits until a word was seen, which the call's end does not wait for, and returns how often.
func (m *marks) ran(t *testing.T, word string) int {
	t.Helper()
	harness.Until(t, harness.Bound, "the message of "+word, func() bool { return m.count(word) > 0 })
	return m.count(word)
}

// call sends a call and returns its response or error; neither if the connection broke.
func (g *gateway) call(ctx context.Context, path string, body any, into any) (status int, e *api.Error, err error) {
	return g.do(ctx, http.MethodPost, path, body, into)
}

// do sends a request with a JSON body.
func (g *gateway) do(ctx context.Context, method, path string, body, into any, headers ...string) (status int, e *api.Error, err error) {
	var text []byte
	if body != nil {
		text, _ = json.Marshal(body)
	}
	status, answer, err := g.raw(ctx, method, path, string(text), headers...)
	switch {
	case err != nil:
		return 0, nil, err
	case status/100 != 2:
		e = &api.Error{}
		return status, e, json.Unmarshal([]byte(answer), e)
	case into == nil:
		return status, nil, nil
	}
	return status, nil, json.Unmarshal([]byte(answer), into)
}

// detached queues a call and waits for its end. All gateways report the same end.
func (c *cluster) detached(ctx context.Context, g *gateway, call api.Call, into *api.Answer) (status int, e *api.Error, err error) {
	var s api.CallStatus
	if status, e, err = g.call(ctx, "/v1/calls", call, &s); err != nil || e != nil {
		return status, e, err
	}
	var ends []api.CallStatus
	for len(ends) < 2 {
		var now api.CallStatus
		path := "/v1/calls/" + s.ID + "?wait_ms=5000"
		code, e, err := c.gateways[rand.IntN(len(c.gateways))].do(ctx, http.MethodGet, path, nil, &now)
		switch {
		case ctx.Err() != nil:
			return 0, nil, ctx.Err()
		case err == nil && code == http.StatusOK && now.State == api.Over:
			ends = append(ends, now)
		case err == nil && code != http.StatusOK && code != http.StatusServiceUnavailable && code != http.StatusBadGateway:
			c.t.Errorf("%s: %d %+v", s.ID, code, e)
			return code, e, nil
		default:
			time.Sleep(20 * time.Millisecond) // a gateway or node is unreachable
		}
	}
	s = ends[0]
	check.That(c.t, s.Started == ends[1].Started && (s.Report == nil) == (ends[1].Report == nil) && (s.Failure == nil) == (ends[1].Failure == nil),
		"%s has two ends: %+v and %+v", s.ID, s, ends[1])
	if s.Report != nil {
		*into = *s.Report
		return http.StatusOK, nil, nil
	}
	return http.StatusOK, &api.Error{Failure: *s.Failure, Started: s.Started}, nil
}

// outcome is the end of one attempt.
type outcome int

const (
	ran outcome = iota
	refused
	unknown
)

// Whatever dies, a call has one result, runs at most once, and leaves no processes.
func TestChaos(t *testing.T) {
	options, urls := threeNATS(t)
	doomed := natsProcess(t, options[0]) // the others are shut down regularly
	servers := []*server.Server{nil, startNATS(t, options[1]), startNATS(t, options[2])}
	c := newCluster(t, urls, 4, 2, "[sandbox]\nnetwork = \"host\"\n[rooms]\nmin = 1\nmax = 4\n[tenant]\nconcurrency = 32\nqueue = 1000\n[nats]\nreplicas = 3\n")
	m := newMarks(t)
	calls := 60 * harness.Soak(t)
	clients := min(100, 20+calls/100)

	var mu sync.Mutex
	outcomes := map[string]outcome{}
	tally := map[string]int{}
	next := make(chan int)
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for n := range next {
				for try := 0; ; try++ {
					word := fmt.Sprintf("w%d-%d", n, try)
					g := c.gateways[rand.IntN(len(c.gateways))]
					script := fmt.Sprintf("echo %s >/dev/tcp/127.0.0.1/%d; sleep 0.%02d", word, m.port, rand.IntN(20))
					a := &api.Answer{}
					ctx, cancel := context.WithTimeout(t.Context(), 2*harness.Bound)
					call, status, how, text := api.Call{Argv: []string{"bash", "-c", script}, TimeoutMS: 20_000}, 0, unknown, ""
					var e *api.Error
					var err error
					if n%2 == 0 {
						status, e, err = g.call(ctx, "/v1/run", call, a)
					} else {
						status, e, err = c.detached(ctx, g, call, a)
					}
					late := ctx.Err() != nil
					cancel()
					switch {
					case err != nil && strings.Contains(err.Error(), "connect:"):
						how, text = refused, "gateway away"
					case err != nil:
						text = "connection broke"
						check.That(t, !late, "%s: no answer", word)
					case e == nil:
						how, text = ran, "ran"
						if a.ExitCode != 0 {
							how, text = unknown, "ended by "+string(a.Cause)
						}
					case !e.Started:
						how, text = refused, fmt.Sprint(status, " ", e.Failure.Code)
					default:
						text = fmt.Sprint(status, " ", e.Failure.Code)
					}
					mu.Lock()
					outcomes[word] = how
					tally[text]++
					mu.Unlock()
					if how != refused {
						break
					}
					time.Sleep(50 * time.Millisecond) // as Retry-After says
				}
			}
		})
	}
	stop := make(chan struct{})
	deaths := 0
	over := make(chan struct{})
	go func() {
		defer close(over)
		// With a limit: on a slow machine the next death may come before the cluster has recovered.
		for ; deaths < calls/6; deaths++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(300+rand.IntN(700)) * time.Millisecond):
			}
			switch rand.IntN(4) {
			case 0:
				i, away := rand.IntN(len(servers)), time.Duration(rand.IntN(500))*time.Millisecond
				if i == 0 {
					doomed.kill()
					time.Sleep(away)
					doomed.start()
				} else {
					servers[i].Shutdown()
					time.Sleep(away)
					servers[i] = startNATS(t, options[i])
				}
			case 1:
				g := c.gateways[rand.IntN(len(c.gateways))]
				g.kill()
				g.start()
			default:
				p := c.nodes[rand.IntN(len(c.nodes))]
				p.kill()
				p.start()
			}
		}
	}()
	began := time.Now()
	go func() {
		for n := range calls {
			next <- n
		}
		close(next)
		all.Wait()
		close(stop)
	}()
	for _, ended := range []chan struct{}{stop, over} {
		select {
		case <-ended:
		case <-time.After(10 * harness.Bound):
			mu.Lock()
			defer mu.Unlock()
			t.Fatalf("no end: %v", tally)
		}
	}
	t.Logf("%d calls in %v, %d deaths: %v", calls, time.Since(began).Round(time.Second), deaths, tally)
	for word, how := range outcomes {
		if how == ran {
			check.Equal(t, m.ran(t, word), 1, "%s ran", word)
			continue
		}
		n := m.count(word)
		check.That(t, n <= 1 && (how != refused || n == 0), "%s ran %d times, refused: %v", word, n, how == refused)
	}
	// Each death ends the calls in progress on a part of the cluster, and a slow machine has more deaths.
	lost := calls - tally["ran"]
	check.That(t, lost <= (deaths+2)*clients/3 && lost != calls, "only %d have run: %v", tally["ran"], tally)
}

// The sessions of a killed node are gone within eight seconds; others continue. The sessions of a
// disconnected node are gone until it reconnects, and their calls have been canceled by then. The requests
// of a killed gateway end as fast, and their session stays.
func TestNodeLost(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	const config = "[rooms]\nmin = 0\nmax = 0\n"
	c := newCluster(t, url(o), 2, 3, config)
	r := newRelay(t, o.Port)
	c.nodes = append(c.nodes, c.process("serve", "n2", fmt.Sprintf("nats://127.0.0.1:%d", r.port), fmt.Sprintf("state_dir = %q\n%s", filepath.Join(c.dir, "n2"), config)))
	c.ready(c.gateways[0], 3)
	byNode := map[string]string{}
	harness.Until(t, harness.Bound, "a session on each node", func() bool {
		var x api.Session
		_, e, err := c.gateways[0].call(t.Context(), "/v1/sessions", struct{}{}, &x)
		check.Require(t, err == nil && e == nil, "%v %v", e, err)
		byNode[x.ID[:2]] = x.ID
		return len(byNode) == 3
	})
	lost := make(chan *api.Error, 2)
	for _, name := range []string{"n0", "n2"} {
		go func() {
			_, e, _ := c.gateways[1].call(t.Context(), "/v1/sessions/"+byNode[name]+"/exec", api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 200_000}, nil)
			lost <- e
		}()
	}
	last := len(c.gateways) - 1
	orphaned := make(chan struct{})
	go func() {
		defer close(orphaned)
		_, _, _ = c.gateways[last].call(t.Context(), "/v1/sessions/"+byNode["n1"]+"/exec", api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 200_000}, nil)
	}()
	sleeps := func(p *process) bool { return p.runs("sleep 1000") > 0 }
	harness.Until(t, harness.Bound, "the commands", func() bool { return sleeps(c.nodes[0]) && sleeps(c.nodes[1]) && sleeps(c.nodes[2]) })
	try := func(g *gateway, name string) int {
		status, e, err := g.call(t.Context(), "/v1/sessions/"+byNode[name]+"/exec", api.Call{Argv: []string{"true"}}, nil)
		check.Require(t, err == nil, "%v %v", e, err)
		return status
	}
	r.cut()
	c.gateways[last].kill()
	c.nodes[0].kill()
	began := time.Now()
	for _, g := range c.gateways[:last] {
		for _, name := range []string{"n0", "n2"} {
			for {
				status := try(g, name)
				if status == http.StatusGone {
					break
				}
				check.Require(t, (status == http.StatusServiceUnavailable || status == http.StatusBadGateway) && time.Since(began) <= 8*time.Second+harness.Slack,
					"status %d after %v", status, time.Since(began))
				time.Sleep(20 * time.Millisecond)
			}
		}
		t.Logf("410 after %v", time.Since(began).Round(10*time.Millisecond))
		harness.Until(t, 8*time.Second+harness.Slack-time.Since(began), "the end of what the killed gateway has asked for", func() bool { return !sleeps(c.nodes[1]) })
		check.Equal(t, try(g, "n1"), http.StatusOK)
	}
	for range 2 {
		select {
		case e := <-lost:
			check.That(t, e != nil && e.Failure.Code == api.Lost && e.Started, "%+v", e)
		case <-time.After(harness.Bound):
			t.Error("the caller waits for ever")
		}
	}
	<-orphaned
	r.mend()
	harness.Until(t, harness.Bound, "the session again", func() bool { return try(c.gateways[0], "n2") == http.StatusOK })
	harness.Until(t, harness.Bound, "the end of what was canceled", func() bool { return !sleeps(c.nodes[2]) })
}

// relay forwards a connection between a node and NATS.
type relay struct {
	port int
	mu   sync.Mutex
	is   chan struct{} // closed while bytes pass
}

func newRelay(t *testing.T, to int) *relay {
	t.Helper()
	r := &relay{}
	r.mend()
	r.port = accept(t, func(in net.Conn) {
		out, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", to))
		if err != nil {
			in.Close()
			return
		}
		go r.pass(in, out)
		r.pass(out, in)
	})
	return r
}

// pass copies until either end is closed. While the relay is cut, it holds the data back.
func (r *relay) pass(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		r.mu.Lock()
		is := r.is
		r.mu.Unlock()
		<-is
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.is = make(chan struct{})
}

func (r *relay) mend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.is == nil {
		r.is = make(chan struct{})
	}
	close(r.is)
}

// While all nodes are restarted in turn, calls get a response or are refused before they start.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 3, 1, "[rooms]\nmin = 1\nmax = 4\n")
	stop := make(chan struct{})
	var mu sync.Mutex
	tally := map[string]int{}
	var all sync.WaitGroup
	ran := func() int {
		mu.Lock()
		defer mu.Unlock()
		return tally["200"]
	}
	for range 6 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				a := &api.Answer{}
				status, e, err := c.gateways[0].call(t.Context(), "/v1/run", api.Call{Argv: []string{"sleep", "0.05"}}, a)
				text := fmt.Sprint(status)
				switch {
				case err != nil:
					t.Error(err)
				case e != nil:
					text += " " + string(e.Failure.Code)
					check.That(t, status == http.StatusServiceUnavailable && !e.Started, "%d %+v", status, e)
				case a.ExitCode != 0:
					t.Errorf("ended by %s", a.Cause)
				}
				mu.Lock()
				tally[text]++
				mu.Unlock()
			}
		})
	}
	for _, p := range c.nodes {
		p.end()
		p.start()
		harness.Until(t, harness.Bound, "the node", func() bool { return strings.Count(p.log.String(), `"msg":"node"`) == 2 })
		before := ran()
		harness.Until(t, harness.Bound, "more calls", func() bool { return ran() >= before+20 })
	}
	close(stop)
	all.Wait()
	t.Logf("%v", tally)
}

// Without a majority of NATS servers, calls that need JetStream are refused before they start, and others work.
func TestMajority(t *testing.T) {
	t.Parallel()
	options, urls := threeNATS(t)
	servers := make([]*server.Server, len(options))
	for i, o := range options {
		servers[i] = startNATS(t, o)
	}
	const config = "[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = %d\n[nats]\nreplicas = 3\n"
	c := newCluster(t, urls, 2, 0, fmt.Sprintf(config, 0))
	limited := fmt.Sprintf(config, 1) // for the tenant
	g, bounded := c.gateway("g", urls, limited), c.listener("serve", "bounded", urls, limited)
	c.ready(g, 2)
	keyed := func(key string) (int, string) {
		status, text, err := g.keyed(t.Context(), key, api.Call{Argv: []string{"true"}})
		check.OK(t, err)
		return status, text
	}
	harness.Until(t, harness.Bound, "JetStream", func() bool {
		status, _ := keyed("first")
		share, _, _ := bounded.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		return status == http.StatusOK && share == http.StatusOK
	})
	for _, s := range servers[:2] {
		s.Shutdown()
	}
	harness.Until(t, harness.Bound, "calls by the server that is left", func() bool {
		status, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		check.Require(t, err == nil && (e == nil || !e.Started || e.Failure.Code == api.Lost), "%v %v %v", status, e, err)
		return status == http.StatusOK
	})
	var all sync.WaitGroup // each waits for a response
	all.Go(func() {
		status, text := keyed("second")
		check.That(t, status == http.StatusServiceUnavailable && strings.Contains(text, `"started":false`), "%v %v", status, text)
	})
	all.Go(func() {
		status, e, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: []string{"true"}}, nil)
		check.That(t, err == nil && status == http.StatusServiceUnavailable && !e.Started, "%v %v %v", status, e, err)
	})
	all.Go(func() {
		status, _ := g.store(t, "a file")
		check.That(t, status == http.StatusServiceUnavailable, "%v", status)
	})
	harness.Until(t, harness.Bound, "a call of a tenant with a ceiling to be refused", func() bool { // its allotment may admit one
		status, e, err := bounded.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		check.Require(t, err == nil && (e == nil || status == http.StatusServiceUnavailable && !e.Started), "%v %v %v", status, e, err)
		return status == http.StatusServiceUnavailable
	})
	all.Wait()
	for i := range 2 {
		servers[i] = startNATS(t, options[i])
	}
	harness.Until(t, harness.Bound, "JetStream again", func() bool {
		status, _ := keyed("third")
		return status == http.StatusOK
	})
}

// While NATS is unreachable, only new requests fail; then everything continues.
func TestNATSAway(t *testing.T) {
	t.Parallel()
	o := options(t)
	s := startNATS(t, o)
	c := newCluster(t, url(o), 2, 1, "places = 4\n"+hostNetwork+"[rooms]\nmin = 0\nmax = 0\n")
	seconds, err := strconv.Atoi(cmp.Or(os.Getenv("SBXRUN_CLUSTER_AWAY"), "10"))
	check.Must(t, err)
	away := time.Duration(seconds) * time.Second
	g := c.gateways[0]
	var session api.Session
	_, e, err := g.call(t.Context(), "/v1/sessions", struct{}{}, &session)
	check.Require(t, err == nil && e == nil, "%v %v", e, err)
	type end struct {
		a   api.Answer
		e   *api.Error
		err error
	}
	ends := make(chan end, 2)
	for _, path := range []string{"/v1/run", "/v1/sessions/" + session.ID + "/exec"} {
		go func() {
			var x end
			_, x.e, x.err = g.call(t.Context(), path, api.Call{Argv: []string{"sh", "-c", "sleep 3; seq 100000"}, TimeoutMS: 100_000}, &x.a)
			ends <- x
		}()
	}
	harness.Until(t, harness.Bound, "the commands", func() bool { return c.nodes[0].runs("sleep 3 ")+c.nodes[1].runs("sleep 3 ") >= 2 }) // not sh, whose line has them, too
	// Some of these run when NATS disappears, and some wait.
	m := newMarks(t)
	var detached []string
	for i := range 12 {
		detached = append(detached, g.begin(t, "bash", "-c", m.command(fmt.Sprintf("d%d", i))[2]+"; sleep 3").ID)
	}
	s.Shutdown()
	// The last requests may have been delivered, and wait for NATS.
	harness.Until(t, harness.Bound, "the gateway to know", func() bool {
		status, _ := g.ask(t, http.MethodGet, "/readyz", nil)
		return status == http.StatusServiceUnavailable
	})
	began := time.Now()
	for time.Since(began) < away {
		status, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		if err != nil || status != http.StatusServiceUnavailable || e.Started {
			t.Errorf("%d %+v %v", status, e, err)
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	startNATS(t, o)
	for range 2 {
		select {
		case x := <-ends:
			check.That(t, x.err == nil && x.e == nil && x.a.ExitCode == 0 && len(*x.a.Stdout) == 588895, "%+v %v", x.e, x.err)
		case <-time.After(harness.Bound):
			t.Fatal("no answer")
		}
	}
	t.Logf("answers %v after NATS came back", time.Since(began)-away)
	for i, id := range detached {
		x := g.end(t, id)
		check.That(t, x.Report != nil && x.Report.ExitCode == 0, "%+v", x)
		check.Equal(t, m.ran(t, fmt.Sprintf("d%d", i)), 1, "call %d ran", i)
	}
	harness.Until(t, harness.Bound, "the session", func() bool {
		status, _, err := g.call(t.Context(), "/v1/sessions/"+session.ID+"/exec", api.Call{Argv: []string{"true"}}, nil)
		check.Require(t, err == nil && (status == http.StatusOK || status == http.StatusServiceUnavailable), "%v %v", status, err)
		return status == http.StatusOK
	})
}

// If NATS restarts without its store, queued calls are lost, and everything else continues.
func TestNATSEmpty(t *testing.T) {
	t.Parallel()
	o := options(t)
	s := startNATS(t, o)
	c := newCluster(t, url(o), 1, 1, "places = 4\n[rooms]\nmin = 0\nmax = 0\n")
	g := c.gateways[0]
	works := func(key string) {
		t.Helper()
		harness.Until(t, harness.Bound, "calls "+key, func() bool {
			status, _, err := g.keyed(t.Context(), key, api.Call{Argv: []string{"true"}})
			check.Require(t, err == nil && (status == http.StatusOK || status == http.StatusServiceUnavailable), "%v %v", status, err)
			return status == http.StatusOK
		})
		var queued, x api.CallStatus
		harness.Until(t, harness.Bound, "the queue "+key, func() bool {
			status, _, err := g.call(t.Context(), "/v1/calls", api.Call{Argv: []string{"true"}}, &queued)
			check.Require(t, err == nil && (status == http.StatusAccepted || status == http.StatusServiceUnavailable), "%v %v", status, err)
			return status == http.StatusAccepted
		})
		x = g.end(t, queued.ID)
		check.That(t, x.Report != nil && x.Report.ExitCode == 0, "%s: %+v", key, x)
	}
	works("before")
	s.Shutdown()
	o.StoreDir = t.TempDir()
	startNATS(t, o)
	works("after")
}

// A NATS server that hangs with open connections causes no loss: its clients send heartbeats through another
// server before they count as lost.
func TestNATSSilent(t *testing.T) {
	t.Parallel()
	options, _ := threeNATS(t)
	silent := natsProcess(t, options[0])
	for _, o := range options[1:] {
		startNATS(t, o)
	}
	// All nodes are connected to the server that will hang, and learn about the others from it.
	c := newCluster(t, url(options[0]), 3, 0, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 0\n")
	g := c.gateway("g", url(options[1]), "[tenant]\nconcurrency = 0\n")
	c.ready(g, 3)
	var ids []string
	for range 3 {
		var x api.Session
		_, e, err := g.call(t.Context(), "/v1/sessions", struct{}{}, &x)
		check.Require(t, err == nil && e == nil, "%v %v", e, err)
		ids = append(ids, x.ID)
	}
	const away = 2 * 6 * time.Second // twice the time until a member is lost
	var calls sync.WaitGroup
	for _, id := range ids {
		calls.Go(func() {
			var a api.Answer
			_, e, err := g.call(t.Context(), "/v1/sessions/"+id+"/exec", api.Call{Argv: []string{"sleep", fmt.Sprint(away.Seconds())}, TimeoutMS: 200_000}, &a)
			check.That(t, err == nil && e == nil && a.ExitCode == 0, "%s: %+v %v %+v", id, e, err, a)
		})
	}
	harness.Until(t, harness.Bound, "the commands", func() bool {
		return c.nodes[0].runs("sleep 12")+c.nodes[1].runs("sleep 12")+c.nodes[2].runs("sleep 12") >= 3
	})
	check.Must(t, silent.cmd.Process.Signal(unix.SIGSTOP))
	calls.Wait()
	check.Must(t, silent.cmd.Process.Signal(unix.SIGCONT))
}

// runs counts the descendants with a text in their command lines.
func (p *process) runs(text string) int { return strings.Count(strings.Join(commands(p), "\n"), text) }

// commands returns the command lines of a process's descendants.
func commands(p *process) (all []string) {
	for _, pid := range harness.Descendants(p.cmd.Process.Pid) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have exited
		all = append(all, strings.ReplaceAll(string(line), "\x00", " "))
	}
	return all
}
