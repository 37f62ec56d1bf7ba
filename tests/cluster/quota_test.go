package cluster

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// crowd counts the calls that run at the same time. A call reports its start, and waits at its end until it
// is no longer counted.
type crowd struct {
	port      int
	mu        sync.Mutex
	now, most int
	all       int
}

func newCrowd(t *testing.T) *crowd {
	t.Helper()
	c := &crowd{}
	c.port = accept(t, c.one)
	return c
}

func (c *crowd) one(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	if line, _ := in.ReadString('\n'); line != "begin\n" {
		return
	}
	c.mu.Lock()
	c.all++
	c.now++
	c.most = max(c.most, c.now)
	c.mu.Unlock()
	_, _ = in.ReadString('\n') // fails if it was killed
	c.mu.Lock()
	c.now--
	c.mu.Unlock()
	_, _ = conn.Write([]byte("counted\n"))
}

func (c *crowd) counts() (all, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all, c.most
}

func (c *crowd) call() api.Call {
	return api.Call{Argv: []string{"bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/127.0.0.1/%d; echo begin >&3; sleep 0.1; echo end >&3; read <&3", c.port)}, TimeoutMS: 60_000}
}

// A tenant's concurrency holds for all nodes together, for all gateways and kinds of calls, even when a node
// and a gateway are killed; and the tenant can use all of it.
func TestConcurrency(t *testing.T) {
	o := runNATS(t)
	const bound = 5
	c := newCluster(t, url(o), 4, 2, fmt.Sprintf("places = 16\n%s[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = %d\nqueue = 100\n", hostNetwork, bound))
	people := newCrowd(t)
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	tally := map[string]int{}
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			for ctx.Err() == nil {
				var a api.Answer
				var status int
				var e *api.Error
				g := c.gateways[i%2]
				if i%3 == 0 {
					status, e, _ = g.call(ctx, "/v1/calls", people.call(), nil)
				} else {
					status, e, _ = g.call(ctx, "/v1/run", people.call(), &a)
				}
				text := fmt.Sprint(status)
				if e != nil {
					text += " " + string(e.Failure.Code)
				}
				mu.Lock()
				tally[text]++
				mu.Unlock()
				if status/100 != 2 || i%3 == 0 {
					time.Sleep(50 * time.Millisecond)
				}
			}
		})
	}
	reach := func(n int) {
		before, _ := people.counts()
		harness.Until(t, 2*harness.Bound, fmt.Sprint(n, " more calls"), func() bool { all, _ := people.counts(); return all >= before+n })
	}
	reach(60)
	c.nodes[0].kill()
	c.nodes[0].start()
	reach(60)
	c.gateways[0].kill()
	c.gateways[0].start()
	c.nodes[1].end()
	c.nodes[1].start()
	reach(60)
	stop()
	all.Wait()
	n, most := people.counts()
	t.Logf("%d calls, %d at once at most: %v", n, most, tally)
	check.That(t, most == bound, "%d ran at once", most)
}

// When a reload removes a tenant's limit, no call waits for an allotment that no one requests any more. A
// gateway that reloads first grants what nodes request.
func TestNoMoreCeiling(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := newCluster(t, url(o), 1, 1, "places = 2\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 2\nqueue = 100\n")
	g, n := c.gateways[0], c.nodes[0]
	run := func(argv ...string) (int, *api.Error) {
		status, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: argv}, nil)
		check.OK(t, err)
		return status, e
	}
	harness.Until(t, harness.Bound, "a call", func() bool { status, _ := run("true"); return status == http.StatusOK })
	for _, p := range []*process{g.process, n} {
		file := p.args[len(p.args)-1]
		text := harness.ReadFile(t, file)
		check.Must(t, os.WriteFile(file, bytes.Replace(text, []byte("concurrency = 2"), []byte("concurrency = 0"), 1), 0o600))
		_ = p.cmd.Process.Signal(unix.SIGHUP) // it is running
		harness.Until(t, harness.Bound, "the reload", func() bool { return strings.Contains(p.log.String(), "reloaded") })
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				status, e := run("sleep", "1.5")
				check.That(t, status == http.StatusOK, "%s: %d %+v", file, status, e)
			})
		}
		all.Wait()
	}
}

// Quota requests of nodes do not count as requests of the tenant, all of which may be calls that wait for them.
func TestRequests(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	g := newCluster(t, url(o), 1, 1, "[rooms]\nmin = 0\nmax = 0\n[tenant]\nrequests = 1\n").gateways[0]
	_, x := g.store(t, "stored")
	check.Require(t, x.ID == sum("stored"), "%+v", x)
	var a api.Answer
	call := api.Call{Argv: []string{"cat", "f"}, Files: []api.FileIn{{Path: "f", ID: sum("stored")}}}
	status, e, err := g.call(t.Context(), "/v1/run", call, &a)
	check.That(t, status == http.StatusOK && err == nil && *a.Stdout == "stored", "%d %+v %v", status, e, err)
}

// A tenant's rate holds for all nodes together.
func TestRate(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	const rate = 4
	c := newCluster(t, url(o), 4, 2, hostNetwork+"[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 0\nrate = 4.0\n")
	m := newMarks(t)
	began := time.Now()
	ran := 0
	for i := 0; time.Since(began) < 5*time.Second || ran < 2*rate; i++ {
		status, e, err := c.gateways[i%2].call(t.Context(), "/v1/run", api.Call{Argv: m.command("x")}, nil)
		switch {
		case err != nil:
			t.Fatal(err)
		case status == http.StatusOK:
			ran++
		case status != http.StatusTooManyRequests || e.Started || !strings.Contains(e.Failure.Message, "rate"):
			t.Fatalf("%d %+v", status, e)
		}
		check.Require(t, time.Since(began) <= harness.Bound, "nothing runs")
	}
	took := time.Since(began).Seconds()
	harness.Until(t, harness.Bound, "the messages of all calls", func() bool { return m.count("x") >= ran })
	t.Logf("%d in %.1f s", ran, took)
	most := rate + rate*took
	check.That(t, float64(ran) <= most && m.count("x") == ran, "%d ran, at most %.0f may", m.count("x"), most)
}

// Busy nodes refuse before anything starts, after the gateway has tried several; a free node takes the call.
// Here NATS requires client certificates.
func TestBusy(t *testing.T) {
	t.Parallel()
	o := options(t)
	dir := harness.Certificates(t)
	ca := filepath.Join(dir, "ca.pem")
	var err error
	o.TLSConfig, err = server.GenTLSConfig(&server.TLSConfigOpts{CertFile: filepath.Join(dir, "server.pem"), KeyFile: filepath.Join(dir, "server.key"), CaFile: ca, Verify: true})
	check.Must(t, err)
	startNATS(t, o)
	_, err = nats.Connect(url(o), nats.RootCAs(ca))
	check.That(t, err != nil, "NATS asks for no certificate")
	c := newCluster(t, url(o), 2, 1, "places = 1\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nqueue = 0\n"+
		fmt.Sprintf("[nats]\nca = %q\ncert = %q\nkey = %q\n", ca, filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key")))
	g := c.gateways[0]
	first, free := context.WithCancel(t.Context())
	second, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	defer free()
	sleeps := func(p *process) int { return p.runs("sleep 1000") }
	for i, ctx := range []context.Context{first, second} { // the second call finds one node busy, whichever it tries first
		all.Go(func() {
			for ctx.Err() == nil { // a node that does not know the gateway refuses
				_, _, _ = g.call(ctx, "/v1/run", api.Call{Argv: []string{"sleep", "1000"}, TimeoutMS: 200_000}, nil)
			}
		})
		harness.Until(t, harness.Bound, "the command", func() bool { return min(1, sleeps(c.nodes[0]))+min(1, sleeps(c.nodes[1])) == i+1 })
	}
	run := func() (int, *api.Error) {
		status, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		check.Must(t, err)
		return status, e
	}
	status, e := run()
	check.That(t, status == http.StatusServiceUnavailable && !e.Started && e.Failure.Code == api.Busy, "%d %+v", status, e)
	free()
	harness.Until(t, harness.Bound, "a call on the node that is free", func() bool {
		status, e := run()
		check.Require(t, status == http.StatusOK || status == http.StatusServiceUnavailable && !e.Started, "%d %+v", status, e)
		return status == http.StatusOK
	})
	check.That(t, sleeps(c.nodes[0])+sleeps(c.nodes[1]) != 0, "no node is full any more")
}
