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
func stored(dir, url string) error {
	*sleep = time.Millisecond
	f, err := newFleet(dir, url, 1)
	if err != nil {
		return err
	}
	defer f.end()
	if err := until("a node", func() bool { return f.knows(1) }); err != nil {
		return err
	}
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if err := until("the queue", func() bool {
		_, err := js.Stream(ctx, "scale1-queue")
		return err == nil
	}); err != nil {
		return err
	}
	const calls = 200
	fmt.Printf("stored: %d calls with keys, %d detached ones, load %s\n", calls, calls, measure.Read("/proc/loadavg"))
	for _, path := range []string{"/v1/run", "/v1/calls"} {
		c, err := dial(f.socket)
		if err != nil {
			return err
		}
		defer c.Close()
		for i := range calls {
			if _, err := c.Ask(measure.Post(path, aCall, fmt.Sprintf("Idempotency-Key: k%d\r\n", i))); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
	}
	if err := until("the end of the queue", func() bool {
		s, err := js.Stream(ctx, "scale1-queue")
		return err == nil && s.CachedInfo().State.Msgs == 0
	}); err != nil {
		return err
	}
	for _, name := range []string{"KV_scale1-keys", "KV_scale1-calls"} {
		s, err := js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		state := s.CachedInfo().State
		fmt.Printf("  %-16s %4d keys, %5.0f bytes each\n", filepath.Base(name), state.Msgs, float64(state.Bytes)/float64(max(state.Msgs, 1)))
	}
	fmt.Println()
	return nil
}
