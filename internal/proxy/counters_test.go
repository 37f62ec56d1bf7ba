package proxy

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Every report fits into a message, whatever the sandbox requests.
func TestLongReport(t *testing.T) {
	t.Parallel()
	theirs, ours := controls(t)
	for _, odd := range []string{"<", `"`, `\`, "\x00", "\xff", "\u2028", "x"} {
		var c counters
		for i := range network.MaxHosts + 10 {
			for _, permitted := range []bool{false, true} {
				to := target{host: fmt.Sprintf("%t%0*d", permitted, 248, i), port: math.MaxUint16}
				if permitted {
					c.of(ofHost, to.String())
				}
				c.refuse(to, "the TLS server name differs: "+strings.Repeat(odd, maxBegin))
			}
		}
		for i := range network.MaxLines - 2*network.MaxHosts - 1 {
			why := unix.ENOBUFS.Error()
			c.of(ofPort, "published port "+strconv.Itoa(math.MaxUint16-i)).reason.Store(&why)
		}
		for _, n := range c.hosts {
			for _, v := range []interface{ Store(int64) }{&n.connections, &n.refused, &n.sent, &n.received} {
				v.Store(math.MaxInt64)
			}
		}
		if err := network.Send(theirs, network.Message{Report: c.report()}); err != nil {
			t.Errorf("%q: %v", odd, err)
			continue
		}
		m, _, err := network.Receive(ours)
		if err != nil || len(m.Report.Hosts) != network.MaxLines {
			t.Errorf("%q: %v, %+v", odd, err, m.Report)
			continue
		}
		why := m.Report.Hosts[1].Reason
		check.That(t, strings.HasSuffix(why, "...") && len(why) <= 300, "%q: that it goes on is not said: %s", odd, why)
	}
}

// Neither refused nor permitted hosts displace the others in the report, and ports are always in it.
func TestNamed(t *testing.T) {
	t.Parallel()
	for _, refusedFirst := range []bool{true, false} {
		var c counters
		fill := func(refused bool) {
			for i := range 10 * network.MaxHosts {
				to := target{host: fmt.Sprintf("h%d-%t.example.org", i, refused), port: 443}
				if refused {
					c.refuse(to, "not listed")
				} else {
					c.of(ofHost, to.String()).connections.Add(1)
				}
			}
		}
		fill(refusedFirst)
		fill(!refusedFirst)
		c.of(ofPort, "unix socket 1").connections.Add(1)
		got := map[string]int{}
		for _, h := range c.report().Hosts {
			_, kind, _ := strings.Cut(h.Host, "-")
			got[kind]++
		}
		want := map[string]int{"true.example.org:443": network.MaxHosts, "false.example.org:443": network.MaxHosts, "": 2}
		check.NoDiff(t, cmp.Diff(want, got), "refused first: %v", refusedFirst)
	}
}
