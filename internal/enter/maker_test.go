package enter_test

import (
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// maker starts a Maker in an idle room, with a fresh /tmp.
func maker(t *testing.T, sb *room.Room) *enter.Maker {
	t.Helper()
	e := entry(sb, "")
	e.Fresh = []enter.Tmpfs{{Dest: "/tmp", Mode: 0o1777, Size: 1 << 20}}
	m, err := e.Make(t.Context(), sb.Room)
	t.Cleanup(func() {
		check.OK(t, m.Close())
		unharmed(t, sb)
	})
	check.Must(t, err)
	return m
}

func call(t *testing.T, m *enter.Maker, e *enter.Entry, o supervise.Options) (result.Result, string) {
	t.Helper()
	s := open(t)
	o.ProofTimeout, o.Stdout, o.Stderr = harness.Bound, s.stdio[1], s.stdio[2]
	c := supervise.Command{Options: o, Place: supervise.Place{Entry: e, Maker: m}}
	r := *c.Run(t.Context())
	s.w.Close()
	check.That(t, r.Verdict == result.Proven, "%+v", r)
	return r, <-s.text
}

func TestMaker(t *testing.T) {
	sb := idle(t)
	m := maker(t, sb)
	for range 20 {
		r, text := call(t, m, shell(sb, "ls -A /tmp; set -- /proc/[0-9]*; echo $#; ls /proc/self/fd | wc -l; echo x >/tmp/x; exit 7"), supervise.Options{})
		check.That(t, r.Cause == result.Exited && r.Payload.Code() == 7 && text == "2\n4\n", "%+v, %q", r, text)
	}
	r, _ := call(t, m, shell(sb, "trap '' TERM; sleep 1000 & setsid sleep 1000 & sleep 1000"), supervise.Options{Timeout: 200 * time.Millisecond})
	check.That(t, r.Cause == result.Timeout, "%+v", r)
	r, _ = call(t, m, shell(sb, "setsid sleep 1000 & exit 0"), supervise.Options{})
	check.That(t, r.Cause == result.Exited && r.Strays == 1, "%+v", r)
	r, _ = call(t, m, shell(sb, "kill -9 $$"), supervise.Options{})
	check.That(t, r.Cause == result.Signaled, "%+v", r)
	r, _ = call(t, m, entry(sb, "nothing-there"), supervise.Options{})
	check.That(t, r.Cause == result.StartFailed && r.Err.Code == "not-found", "%+v", r)
	large := entry(sb, "sh", "-c", "echo ${#A}; echo ${#0}", strings.Repeat("x", 100_000))
	for _, name := range []string{"A", "B", "C", "D", "E"} {
		large.Env = append(large.Env, name+"="+strings.Repeat("y", 120_000))
	}
	r, text := call(t, m, large, supervise.Options{})
	check.That(t, text == "120000\n100000\n", "%+v, %q", r, text)
}
