package cluster

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Of two instances with a name, the one with the last heartbeat counts.
func TestNewest(t *testing.T) {
	t.Parallel()
	now := time.Now()
	got := newest([]api.Node{{Name: "n", Instance: "1", Heard: now}, {Name: "n", Instance: "2", Heard: now.Add(-time.Second)}, {Name: "o", Instance: "3"}})
	check.That(t, len(got) == 2 && got["n"].Instance == "1" && got["o"].Instance == "3", "%+v", got)
}
