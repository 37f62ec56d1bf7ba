package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cluster"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/workspace"
	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// sleeper is a source whose commands only sleep, so that the cost of a call is HTTP, the adapter and NATS.
type sleeper struct{ *time.Duration }

func (s sleeper) Take(context.Context, string, slot.Policy) (slot.Slot, error) { return s, nil }
func (sleeper) Rooms() (idle, all, left int)                                   { return 0, 0, 0 }
func (sleeper) Kind() slot.Kind                                                { return slot.Warm }
func (sleeper) Ended() <-chan struct{}                                         { return nil }
func (sleeper) Files() (*workspace.Dir, error)                                 { return nil, errors.New("it has no files") }
func (sleeper) Give() (*result.Result, error)                                  { return nil, nil }
func (s sleeper) Start(ctx context.Context, _ slot.Command) (slot.Running, error) {
	return asleep{ctx, *s.Duration, time.Now()}, nil
}

// asleep is a command of sleeper.
type asleep struct {
	context.Context
	long  time.Duration
	since time.Time
}

func (a asleep) Wait() (*result.Result, error) {
	select {
	case <-time.After(a.long):
	case <-a.Done():
		return nil, a.Err()
	}
	return &result.Result{
		Started: true, Cause: result.Exited, Payload: &result.Payload{}, StartedAt: a.since, Duration: time.Since(a.since), Verdict: result.Proven,
	}, nil
}
func (asleep) Signal(syscall.Signal) error      { return nil }
func (asleep) SignalAlone(syscall.Signal) error { return nil }

// fleet has nodes and a gateway in this process, with the same adapter, NATS connections and HTTP servers as
// in production.
type fleet struct {
	socket string
	buses  []*cluster.NATS
	ends   []func()
}

func (f *fleet) end() {
	for _, end := range f.ends {
		end()
	}
}

func newFleet(dir, url string, nodes int) *fleet {
	f := &fleet{socket: filepath.Join(dir, "gateway.sock")}
	log := slog.New(slog.DiscardHandler)
	c := config.Default()
	c.Places, c.Tenant.Concurrency, c.Tenant.Queue, c.Tenant.Requests = *places, 0, 1000, 0
	c.Call.MaxTimeout = values.Duration(time.Minute)
	c.NATS.URL, c.NATS.Cluster = url, fmt.Sprintf("scale%d", nodes)
	for i := range nodes {
		name := "n" + strconv.Itoa(i)
		c.StateDir, c.NATS.Node = filepath.Join(dir, name), name
		s := must(server.New(c, nil, sleeper{sleep}, log, "bench"))
		bus := must(cluster.Connect(&c, cluster.NodeKind, log))
		f.buses = append(f.buses, bus)
		n := must(cluster.NewNode(bus, name, "bench", s, s.Handler(http.NotFoundHandler()), log))
		f.ends = append(f.ends, func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			s.Drain(ctx)
			n.Close(ctx)
		})
	}
	door := must(server.NewMiddleware(c, nil, log))
	bus := must(cluster.Connect(&c, cluster.GatewayKind, log))
	f.buses = append(f.buses, bus)
	g := must(cluster.NewGateway(bus, "g", "bench", door, log))
	l := must(net.Listen("unix", f.socket))
	web := &http.Server{Handler: g.Handler(), ConnContext: server.Peer, ReadHeaderTimeout: time.Minute}
	go func() { _ = web.Serve(server.NewConnections(c.Connections).Of(l)) }() // until it is closed
	f.ends = append(f.ends, func() {
		web.Close()
		g.Close()
		bus.Close()
	})
	return f
}

// messages returns the number of published and delivered messages, and their bytes.
func (f *fleet) messages() (n, size float64) {
	for _, b := range f.buses {
		s := b.Stats()
		n += float64(s.OutMsgs + s.InMsgs)
		size += float64(s.OutBytes + s.InBytes)
	}
	return n, size
}

// throughput makes calls for a time, with one client per slot, and returns the calls per second and this
// process's CPU time per call.
func (f *fleet) throughput(clients int) (perSecond, cpu float64) {
	done := make([]int, clients)
	warmUp := 3 * *sleep // not counted, until the calls are distributed
	from := time.Now().Add(warmUp)
	to := from.Add(*lasts)
	ended := make(chan error)
	go func() {
		ended <- eachClient(clients, f.socket, func(i int, c connection) error {
			for {
				_, err := c.call()
				switch now := time.Now(); {
				case err != nil || now.After(to):
					return err
				case now.After(from):
					done[i]++
				}
			}
		})
	}()
	time.Sleep(time.Until(from))
	used := measure.CPU(unix.RUSAGE_SELF)
	time.Sleep(time.Until(to))
	used = measure.CPU(unix.RUSAGE_SELF) - used
	try(<-ended)
	n := 0
	for _, k := range done {
		n += k
	}
	return float64(n) / lasts.Seconds(), used.Seconds() * 1000 / float64(max(n, 1))
}

// scale measures growing numbers of nodes with sleeping payloads.
func scale(dir, url string) {
	if *profile != "" {
		out := must(os.Create(*profile))
		defer out.Close()
		try(pprof.StartCPUProfile(out))
		defer pprof.StopCPUProfile()
	}
	fmt.Printf("scale: payloads sleep %v, %d places at each node, as many clients as places, one gateway, %v each\n", *sleep, *places, *lasts)
	of := 0.0 // with one node
	for field := range strings.SplitSeq(*counts, ",") {
		n := must(strconv.Atoi(field))
		f := newFleet(must(os.MkdirTemp(dir, "scale-")), url, n)
		until("nodes", func() bool { return f.knows(n) })
		n0, size0 := f.messages()
		const presence = 4 * time.Second // two heartbeats of each
		time.Sleep(presence)
		n1, size1 := f.messages()
		idle, idleSize := (n1-n0)/presence.Seconds(), (size1-size0)/presence.Seconds()
		began := time.Now()
		perSecond, cpu := f.throughput(n * *places)
		n2, size2 := f.messages()
		each := time.Since(began).Seconds() * max(perSecond, 1)
		busy, busySize := (n2-n1)/each-idle/max(perSecond, 1), (size2-size1)/each-idleSize/max(perSecond, 1)
		f.end()
		if of == 0 {
			of = perSecond / float64(n)
		}
		best := float64(n**places) / sleep.Seconds()
		fmt.Printf("  %3d nodes  %7.1f calls/s   %.2f of linear growth   %.2f of the maximum   CPU %.3f ms per call, load %s\n"+
			"             messages in and out: %.0f a second of %.0f bytes when idle, %.1f for each call, of %.0f bytes together\n",
			n, perSecond, perSecond/of/float64(n), perSecond/best, cpu, measure.Read("/proc/loadavg"), idle, idleSize/max(idle, 1), busy, busySize)
	}
	fmt.Println()
}

// knows reports whether the gateway knows a number of nodes.
func (f *fleet) knows(n int) bool {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", f.socket)
	}}}
	res, err := c.Get("http://sbxrun/metrics")
	if err != nil {
		return false
	}
	defer res.Body.Close()
	text := new(strings.Builder)
	if err := res.Write(text); err != nil {
		return false
	}
	return strings.Count(text.String(), "\nsbxrun_node_ready{") == n
}
