package main

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// stored measures the storage of JetStream for calls with idempotency keys and for detached calls.
func stored(dir, url string) {
	*sleep = time.Millisecond
	f := newFleet(dir, url, 1)
	defer f.end()
	until("a node", func() bool { return f.knows(1) })
	nc := must(nats.Connect(url))
	defer nc.Close()
	js := must(jetstream.New(nc))
	until("the queue", func() bool {
		_, err := js.Stream(ctx, "scale1-queue")
		return err == nil
	})
	const calls = 200
	fmt.Printf("stored: %d calls with keys, %d detached ones, load %s\n", calls, calls, measure.Read("/proc/loadavg"))
	for _, path := range []string{"/v1/run", "/v1/calls"} {
		c := must(dial(f.socket))
		defer c.Close()
		for i := range calls {
			must(c.Ask(measure.Post(path, aCall, fmt.Sprintf("Idempotency-Key: k%d\r\n", i))))
		}
	}
	until("the end of the queue", func() bool {
		s, err := js.Stream(ctx, "scale1-queue")
		return err == nil && s.CachedInfo().State.Msgs == 0
	})
	for _, name := range []string{"KV_scale1-keys", "KV_scale1-calls"} {
		state := must(js.Stream(ctx, name)).CachedInfo().State
		fmt.Printf("  %-16s %4d keys, %5.0f bytes each\n", filepath.Base(name), state.Msgs, float64(state.Bytes)/float64(max(state.Msgs, 1)))
	}
	fmt.Println()
}
