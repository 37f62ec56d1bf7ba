package proxy

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/network"
)

// TestLongReport: whatever a sandbox asks for, the report of it fits into a message.
func TestLongReport(t *testing.T) {
	t.Parallel()
	theirs, ours := controls(t)
	for _, odd := range []string{"<", `"`, `\`, "\x00", "\xff", "\u2028", "x"} {
		var c counters
		for i := range network.MaxHosts + 10 {
			to := target{host: fmt.Sprintf("a%0252d", i), port: math.MaxUint16}
			c.refuse(to, "the server name of TLS is another: "+strings.Repeat(odd, maxBegin))
			for _, n := range c.hosts {
				for _, v := range []interface{ Store(int64) }{&n.connections, &n.refused, &n.sent, &n.received} {
					v.Store(math.MaxInt64)
				}
			}
		}
		if err := network.Send(theirs, network.Message{Report: c.report()}); err != nil {
			t.Errorf("%q: %v", odd, err)
			continue
		}
		m, _, err := network.Receive(ours)
		if err != nil || len(m.Report.Hosts) != network.MaxHosts+1 {
			t.Errorf("%q: %v, %+v", odd, err, m.Report)
			continue
		}
		if why := m.Report.Hosts[1].Reason; !strings.HasSuffix(why, "...") || len(why) > 300 {
			t.Errorf("%q: that it goes on is not said: %s", odd, why)
		}
	}
}
