package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// soak is one run of TestServeSoak.
type soak struct {
	*server
	address string
	calls   int // number of calls to be answered

	mu     sync.Mutex
	begun  int
	kinds  map[string]int // calls that have ended, by kind
	of     map[string]int // answers of each tenant
	made   int
	causes map[string]string // cause of each admitted call by request ID; "" if the client has disconnected
	failed int
	marks  []int64 // the server's memory after each tenth of the calls
}

// soakCall is a call, with the check of its answer.
type soakCall struct {
	api.Call
	kind  string
	leave time.Duration // when the client disconnects; 0 for never
	right func(a *api.Answer) bool
}

// tree20 ends with its deadline or its client.
const tree20 = "i=0; while [ $i -lt 19 ]; do setsid sh -c 'trap \"\" TERM; sleep 600' & i=$((i+1)); done; trap '' TERM; wait"

// next returns a random call: a third of them are trees that time out.
func (s *soak) next(r *rand.Rand) soakCall {
	canceled := func(a *api.Answer) bool { return a.Cause == "canceled" || a.Cause == "timeout" }
	n := r.IntN(100)
	switch {
	case n < 33:
		c := sh(tree20)
		c.TimeoutMS = float64(100 + r.IntN(200))
		return soakCall{c, "tree", 0, func(a *api.Answer) bool { return a.TimedOut && a.Cause == "timeout" && a.ExitCode == 124 }}
	case n < 41:
		return soakCall{sh(tree20), "left", time.Duration(r.IntN(200)) * time.Millisecond, canceled}
	case n < 49:
		const each = 4 << 20
		c := sh(fmt.Sprintf("yes | head -c %d", each))
		c.Limits.MaxOutput = 4096
		return soakCall{c, "flood", 0, func(a *api.Answer) bool {
			return a.ExitCode == 0 && a.StdoutBytes != nil && *a.StdoutBytes == each && *a.StdoutTruncated && len(text(a.Stdout)) < 8192
		}}
	case n < 53:
		c := api.Call{Argv: []string{"/fixtures/fork-bomb", "session"}, Env: map[string]string{"FIXTURE_COUNT": "60", "FIXTURE_SECONDS": "60"}, TimeoutMS: 500}
		return soakCall{c, "bomb", 0, func(a *api.Answer) bool { return a.TimedOut && a.ExitCode == 124 }}
	case n < 56:
		c := sh("kill -9 $$")
		return soakCall{c, "killed", 0, func(a *api.Answer) bool { return a.Cause == "signaled" && a.ExitCode == 137 }}
	}
	word := strconv.FormatUint(r.Uint64(), 36)
	c := sh("cat; exit " + strconv.Itoa(n-50))
	c.Stdin = word
	return soakCall{c, "short", 0, func(a *api.Answer) bool { return text(a.Stdout) == word && a.ExitCode == n-50 }}
}

// client makes calls until all clients together have enough answers.
func (s *soak) client(tenant string, r *rand.Rand) {
	client := &http.Client{Timeout: harness.Bound, Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for s.more() {
		c := s.next(r)
		wrong, kind := s.one(client, tenant, c)
		s.mu.Lock()
		s.kinds[kind]++
		switch {
		case wrong != "":
			s.failed++
			check.That(s.t, s.failed >= 10, "%s, %s: %s", tenant, c.kind, wrong)
		case kind == "refused":
			s.begun-- // to be repeated
		default:
			s.of[tenant]++
		}
		s.mu.Unlock()
	}
}

// more reports whether another call should be made.
func (s *soak) more() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun >= s.calls || s.failed >= 10 {
		return false
	}
	if s.begun++; 10*s.begun/s.calls > len(s.marks) {
		s.marks = append(s.marks, (&harness.Target{PID: s.cmd.Process.Pid}).RSS())
	}
	return true
}

// ended records the end of a call.
func (s *soak) ended(id, cause string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.causes[id] = cause
}

// logged compares the server's log with what its clients have seen: each call ended once, and
// exactly those of clients that disconnected were canceled. The server has exited, so its log is complete.
func (s *soak) logged() {
	s.t.Helper()
	its := map[string][]string{}
	for line := range strings.Lines(s.log.String()) {
		var entry struct{ Msg, Request, Cause string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "call" {
			its[entry.Request] = append(its[entry.Request], entry.Cause)
		}
	}
	left, canceled := 0, 0
	for id, cause := range s.causes {
		got := its[id]
		if cause == "" {
			left, canceled = left+1, canceled+len(got)
			check.That(s.t, len(got) <= 1 && (len(got) != 1 || got[0] == "canceled"), "%s: its client has left, and the log has %v", id, got) // with none, nothing was started
		} else if !slices.Equal(got, []string{cause}) {
			s.t.Errorf("%s: its client was told of %q, and the log has %v", id, cause, got)
		}
	}
	s.t.Logf("%d clients have left, and %d calls were canceled", left, canceled)
	check.That(s.t, left <= 100 || canceled != 0, "no call was canceled")
}

// one makes a call, and returns what is wrong with its answer, and its kind.
func (s *soak) one(client *http.Client, tenant string, c soakCall) (wrong, kind string) {
	s.mu.Lock()
	s.made++
	id := fmt.Sprintf("%s-%d", c.kind, s.made)
	s.mu.Unlock()
	ctx := context.Background()
	if c.leave > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.leave)
		defer cancel()
	}
	status, answer, h, err := exchange(ctx, client, http.MethodPost, "http://"+s.address+"/v1/run", c.Call, append(bearer(tenant), "X-Request-Id", id)...)
	if err != nil && ctx.Err() != nil {
		s.ended(id, "")
		return "", c.kind // it has disconnected
	}
	if err != nil {
		return err.Error(), c.kind
	}
	switch status {
	case http.StatusOK:
		var a api.Answer
		if err := json.Unmarshal(answer, &a); err != nil {
			return err.Error(), c.kind
		}
		s.ended(id, string(a.Cause))
		if a.Teardown.Verdict != "proven" || len(a.Teardown.Survivors) > 0 || !c.right(&a) {
			return string(answer), c.kind
		}
		return "", c.kind
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		var e api.Error
		after, _ := strconv.Atoi(h.Get("Retry-After"))
		if err := json.Unmarshal(answer, &e); err != nil || e.Started || after <= 0 {
			return fmt.Sprintf("refused with %+v, %v", e, err), "refused"
		}
		time.Sleep(time.Duration(after) * time.Second) // Retry-After
		return "", "refused"
	}
	return fmt.Sprintf("status %d: %.300s", status, answer), c.kind
}

// below counts processes and tasks below the server.
func (s *soak) below() (processes, tasks int) {
	for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
		list, _ := os.ReadDir(filepath.Join("/proc", itoa(pid), "task")) // it may have exited
		processes++
		tasks += len(list)
	}
	return processes, tasks
}

// descriptors returns the number of the server's descriptors.
func (s *soak) descriptors() int {
	list := harness.ReadDir(s.t, filepath.Join("/proc", itoa(s.cmd.Process.Pid), "fd"))
	return len(list)
}

// 24 clients of three tenants, one with four times as many clients as the others, keep a server full with trees that
// time out, disconnecting clients, floods and fork bombs. Every call is answered once or rejected with started:false,
// nothing is left of any, and no tenant is left behind. SBXRUN_SOAK times 40 calls.
func TestServeSoak(t *testing.T) {
	const rooms = 6
	s := &soak{calls: 40 * harness.Soak(t), kinds: map[string]int{}, of: map[string]int{}, causes: map[string]string{}}
	s.server, s.address = overTCP(t, fmt.Sprintf(`places = %d
[rooms]
min = %[1]d
max = %[1]d
calls = 0
[sandbox]
mounts = ["%s:/fixtures"]
[tenant]
concurrency = %[1]d
queue = 8
`, rooms, harness.FixturesDir(t)), "many", "few", "some")
	s.warm(rooms)
	processes, tasks := s.below()
	// A warm room that no call has used gets three more once it has prepared an init, which a busy machine may delay.
	descriptors, same := 0, 0
	harness.Until(t, harness.Bound, "descriptors to stay as they are", func() bool {
		now := s.descriptors()
		if same++; now != descriptors {
			descriptors, same = now, 0
		}
		return same == 20
	})
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("SBXRUN_SOAK_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		check.Must(t, err)
		seed = n
	}
	load, _ := os.ReadFile("/proc/loadavg") // only logged
	t.Logf("SBXRUN_SOAK_SEED=%d, %d calls, load %s", seed, s.calls, load)
	begun := time.Now()
	var all sync.WaitGroup
	n := uint64(0)
	for tenant, clients := range map[string]int{"many": 16, "few": 4, "some": 4} {
		for range clients {
			n++
			r := rand.New(rand.NewPCG(seed, n))
			all.Go(func() { s.client(tenant, r) })
		}
	}
	all.Wait()
	took := time.Since(begun)
	load, _ = os.ReadFile("/proc/loadavg")
	t.Logf("%d calls in %v: %v; answers of each tenant: %v; the server's memory each tenth: %v bytes; load %s", s.calls, took, s.kinds, s.of, s.marks, load)
	for _, tenant := range []string{"many", "few", "some"} {
		check.That(t, s.of[tenant] >= s.calls/20, "%s got %d answers of %d", tenant, s.of[tenant], s.calls) // equal shares of time, not of calls
	}
	check.That(t, len(s.kinds) >= 6 && s.kinds["refused"] != 0, "not everything has happened: %v", s.kinds)
	harness.Until(t, harness.Bound, fmt.Sprintf("no more than %d processes with %d tasks below the server", processes, tasks), func() bool {
		now, more := s.below()
		return now <= processes && more <= tasks
	})
	most := descriptors + 3*rooms
	harness.Until(t, harness.Bound, fmt.Sprintf("at most %d descriptors", most), func() bool { return s.descriptors() <= most })
	if k := len(s.marks); k > 5 {
		early, late := slices.Max(s.marks[:k/2]), slices.Max(s.marks[k/2:])
		check.That(t, late <= early+early/4+(8<<20), "the server's memory grows: %v", s.marks)
	}
	s.end()
	s.logged()
}
