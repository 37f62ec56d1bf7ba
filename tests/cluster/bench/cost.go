package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// warmRooms is the configuration for measurements with real sandboxes.
const warmRooms = "[rooms]\nmin = 4\nmax = 8\ncalls = 0\n[tenant]\nconcurrency = 0\nqueue = 1000\n"

// serve starts a node or a gateway and returns its socket.
func serve(dir, command, name, url, config string) (socket string, _ *process) {
	socket = filepath.Join(dir, name+".sock")
	text := fmt.Sprintf("listen = [%q]\nstate_dir = %q\n%s\n", "unix:"+socket, filepath.Join(dir, name), config)
	if url != "" {
		text += fmt.Sprintf("[nats]\nurl = %q\nnode = %q\ncluster = %q\n", url, name, filepath.Base(dir))
	}
	file := filepath.Join(dir, name+".toml")
	try(os.WriteFile(file, []byte(text), 0o600))
	return socket, start(*binary+"d", command, "--config", file)
}

// connection is a persistent connection to a node or a gateway.
type connection struct{ *measure.Connection }

func dial(socket string) (connection, error) {
	c, err := measure.Dial(ctx, "unix", socket)
	return connection{c}, err
}

// aCall runs /bin/true.
var aCall = measure.Object{"argv": []string{"/bin/true"}}

var callOf = measure.Post("/v1/run", aCall, "")

// call runs /bin/true and reports whether the sandbox was warm.
func (c connection) call() (warm bool, err error) {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return false, err
	}
	body, err := c.Ask(callOf)
	if err == nil && !bytes.Contains(body, []byte(`"exit_code":0`)) {
		err = fmt.Errorf("the answer was %.300s", body)
	}
	return bytes.Contains(body, []byte(`"room":"warm"`)), err
}

// heated waits until sequential calls find warm sandboxes.
func heated(socket string) {
	row := 0
	until("a warm room at "+socket, func() bool {
		c, err := dial(socket)
		if err != nil {
			return false
		}
		defer c.Close()
		warm, err := c.call()
		if row++; err != nil || !warm {
			row = 0
		}
		return row >= 32
	})
}

// cost compares warm calls through the node's own socket with calls through a gateway and NATS, in turn.
func cost(dir, url string) {
	own, node := serve(dir, "serve", "cost", url, warmRooms)
	defer node.end()
	via, gateway := serve(dir, "gateway", "cost-gateway", url, "")
	defer gateway.end()
	var conns [2]connection
	for i, socket := range []string{own, via} {
		heated(socket)
		conns[i] = must(dial(socket))
		defer conns[i].Close()
	}
	var took [2]measure.Sample
	var more measure.Sample
	for range *calls {
		var pair [2]float64
		for i, c := range conns {
			began := time.Now()
			must(c.call())
			pair[i] = measure.MS(time.Since(began))
			took[i] = append(took[i], pair[i])
		}
		more = append(more, pair[1]-pair[0])
	}
	fmt.Printf("cost: /bin/true in a warm room, one client, %d pairs, load %s\n", *calls, measure.Read("/proc/loadavg"))
	for i, name := range []string{"the node's own socket", "a gateway and NATS"} {
		fmt.Printf("  %-22s p50 %.3f ms   p90 %.3f ms   p99 %.3f ms\n", name, took[i].Quantile(.5), took[i].Quantile(.9), took[i].Quantile(.99))
	}
	fmt.Printf("  p50 is %.3f ms higher; of the pairs' differences the median is %.3f ms\n\n", took[1].Quantile(.5)-took[0].Quantile(.5), more.Quantile(.5))
}

// rate makes a number of calls with several clients and returns the calls per second.
func rate(socket string, n int) float64 {
	var made atomic.Int64
	began := time.Now()
	try(eachClient(*clients, socket, func(_ int, c connection) (err error) {
		for made.Add(1) <= int64(n) && err == nil {
			_, err = c.call()
		}
		return err
	}))
	return float64(n) / time.Since(began).Seconds()
}

// eachClient runs a function for a number of concurrent clients, each with its own connection.
func eachClient(n int, socket string, do func(i int, c connection) error) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		all.Go(func() {
			c, err := dial(socket)
			if err != nil {
				errs[i] = err
				return
			}
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			errs[i] = do(i, c)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// share compares one server with four nodes behind a gateway, all on this machine.
func share(dir, url string) {
	one, server := serve(dir, "serve", "one", "", warmRooms)
	defer server.end()
	heated(one)
	const nodes = 4
	for i := range nodes {
		socket, p := serve(dir, "serve", fmt.Sprintf("share%d", i), url, warmRooms)
		defer p.end()
		heated(socket)
	}
	via, gateway := serve(dir, "gateway", "share-gateway", url, "")
	defer gateway.end()
	heated(via)
	var rates [2]measure.Sample
	var ratios measure.Sample
	for round := range *rounds + 1 {
		var pair [2]float64
		for k := range 2 {
			i := (k + round) % 2
			pair[i] = rate([]string{one, via}[i], max(*calls / *rounds, *clients))
		}
		if round == 0 {
			continue // not counted
		}
		rates[0], rates[1], ratios = append(rates[0], pair[0]), append(rates[1], pair[1]), append(ratios, pair[1]/pair[0])
	}
	fmt.Printf("share: /bin/true in warm rooms, %d clients, %d rounds of %d calls each, load %s\n", *clients, *rounds, *calls / *rounds, measure.Read("/proc/loadavg"))
	fmt.Printf("  one server             %6.0f calls/s\n  four nodes, a gateway  %6.0f calls/s\n  of the rounds' ratios the median is %.2f\n\n", rates[0].Quantile(.5), rates[1].Quantile(.5), ratios.Quantile(.5))
}
