package cluster

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Memory for a response is reserved as it is read. When no more is available, reading stops.
func TestHeld(t *testing.T) {
	full, sum := errors.New("full"), int64(0)
	text, err := io.ReadAll(held{strings.NewReader(strings.Repeat("x", 1<<20)), func(n int64) error {
		if sum += n; sum > copies*100_000 {
			return full
		}
		return nil
	}})
	check.That(t, errors.Is(err, full) && len(text) < 300_000, "%d bytes, %v", len(text), err)
}

type watcher struct{ updates chan jetstream.KeyValueEntry }

func (w watcher) Updates() <-chan jetstream.KeyValueEntry { return w.updates }
func (watcher) Stop() error                               { return nil }

// The goroutine of a watcher, which closes the channel at last, does not wait forever for the receiver of an update.
func TestStop(t *testing.T) {
	w, ended := watcher{make(chan jetstream.KeyValueEntry)}, make(chan struct{})
	go func() {
		for range 3 {
			w.updates <- nil
		}
		close(w.updates)
		close(ended)
	}()
	stop(w)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("it still waits")
	}
}
