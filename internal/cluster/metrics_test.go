package cluster

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Of two instances of a name the one counts that was heard last, whatever their instances are called.
func TestNewest(t *testing.T) {
	t.Parallel()
	now := time.Now()
	got := newest([]api.Node{{Name: "n", Instance: "1", Heard: now}, {Name: "n", Instance: "2", Heard: now.Add(-time.Second)}, {Name: "o", Instance: "3"}})
	if len(got) != 2 || got["n"].Instance != "1" || got["o"].Instance != "3" {
		t.Errorf("%+v", got)
	}
}
