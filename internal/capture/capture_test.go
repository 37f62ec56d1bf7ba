package capture

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Take returns the cause of its context, and leaves nothing in the store.
func TestTakeEnds(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o600))
	layer, err := os.Open(dir)
	check.Must(t, err)
	defer layer.Close()
	store, err := snapshots.Open(filepath.Join(t.TempDir(), "snapshots"))
	check.Must(t, err)
	defer store.Close()
	from := Source{Overlays: []*room.Overlay{{Dest: "/work", Source: dir, Since: time.Now(), Layer: layer}}}
	ended := errors.New("ended")
	for _, cause := range []error{ended, nil} {
		ctx, cancel := context.WithCancelCause(t.Context())
		if cause != nil {
			cancel(cause)
		}
		m, err := snapshots.NewManifest("", 0)
		check.Must(t, err)
		m.Workdir = "/work"
		err = Take(ctx, store, m, from, 1<<20)
		cancel(nil)
		all, wrong := store.List()
		check.That(t, err == cause && len(wrong) == 0 && len(all) == map[bool]int{false: 1}[cause != nil], "%v, %d snapshots, %v; want %v", err, len(all), wrong, cause)
	}
}
