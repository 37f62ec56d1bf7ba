package pool

import (
	"context"
	"testing"

	"github.com/sbxrun/sbxrun/internal/limits"
)

// Rooms that can have no limits, as where systemd would have to move this process for them, are not taken
// for a command with limits, and stay.
func TestTakeWithLimits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is built
	p := &Pool{sizes: Sizes{Max: 1}, ctx: ctx, idle: []*Room{{}}, rooms: 1}
	for _, l := range []limits.Request{{Memory: 1 << 30}, {FSize: 1000}} {
		if r := p.take("a", l); r != nil || len(p.idle) != 1 {
			t.Errorf("%+v: %v, %d idle", l, r, len(p.idle))
		}
	}
}
