package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// A tenant's concurrency and rate hold for all nodes together. A record for each tenant says how many calls
// each node may run of it, and their sum is never more than the tenant may. A node asks for more when it
// needs more, gives back what it does not need within seconds, and lets calls in by what it has without
// asking anybody. It asks a gateway, which changes the record, and takes a lost node out of it. A node
// that cannot ask starts nothing for tenants that have bounds.

// quotaRecord is the record of a tenant.
type quotaRecord struct {
	Held   map[string]allotment `json:"held"`   // by node
	Wanted map[string]time.Time `json:"wanted"` // when each was last refused
	Tokens float64              `json:"tokens"` // of the rate
	At     time.Time            `json:"at"`     // when there were as many
}

// allotment is what a node has.
type allotment struct {
	Calls int    `json:"calls"` // that it may run
	Seq   uint64 `json:"turn"`  // of its last question
}

// quotaMessage is what a node asks a gateway for; and what that grants.
type quotaMessage struct {
	Turn   uint64 `json:"turn"`   // of the question: one that comes late changes nothing
	Calls  int    `json:"calls"`  // in all
	Tokens int    `json:"tokens"` // more
	Others int    `json:"others"` // nodes that want some
}

// quotaPath is what a node asks a gateway at.
const quotaPath = "/shares"

const wantedFor = 3 * time.Second

// maxQuotaRecord is how many bytes a record may have. It has some 60 to 80 for each node that has calls or wants
// some, and that is no more nodes than calls of the tenant may run.
const maxQuotaRecord = 256 << 10

// grant changes the record as a node has asked, as far as the ceilings allow; if the node has asked anew
// since, not at all.
func (h *quotaRecord) grant(at string, a quotaMessage, c tenants.Ceilings, now time.Time, lost func(node string) bool) quotaMessage {
	if h.Held == nil {
		h.Held, h.Wanted, h.Tokens, h.At = map[string]allotment{}, map[string]time.Time{}, max(1, c.Rate), now
	}
	if a.Turn < h.Held[at].Seq {
		return quotaMessage{}
	}
	left := c.Concurrency
	for node, has := range h.Held {
		if lost(node) {
			delete(h.Held, node)
		} else if node != at {
			left -= has.Calls
		}
	}
	if c.Concurrency == 0 { // no bound: the node has not heard of it yet
		left = a.Calls
	}
	given := quotaMessage{Turn: a.Turn, Calls: max(0, min(a.Calls, left))}
	if delete(h.Held, at); given.Calls > 0 {
		h.Held[at] = allotment{given.Calls, a.Turn}
	}
	maps.DeleteFunc(h.Wanted, func(node string, last time.Time) bool {
		return now.Sub(last) > wantedFor || node == at && given.Calls == a.Calls
	})
	// A record that changes with each refusal would be written all the time, and each writer has to win it.
	last, is := h.Wanted[at]
	if given.Calls < a.Calls && now.Sub(last) > wantedFor/3 && (is || len(h.Wanted) < c.Concurrency) {
		h.Wanted[at] = now
	}
	for node := range h.Wanted {
		if node != at {
			given.Others++
		}
	}
	tokens, since := h.Tokens, h.At
	if now.After(since) { // by the clock of this gateway
		tokens, since = min(max(1, c.Rate), tokens+now.Sub(since).Seconds()*c.Rate), now
	}
	if c.Rate == 0 { // as above
		given.Tokens = a.Tokens
	} else if given.Tokens = min(a.Tokens, int(tokens)); given.Tokens > 0 {
		h.Tokens, h.At = tokens-float64(given.Tokens), since
	}
	return given
}

// grantQuota answers a node that asks.
func (g *Gateway) grantQuota(w http.ResponseWriter, r *http.Request) {
	const most = 4096
	text, err := io.ReadAll(io.LimitReader(r.Body, most))
	var a quotaMessage
	at := r.RemoteAddr // by whose name NATS has let nobody else send
	if err != nil || json.Unmarshal(text, &a) != nil || !strings.HasPrefix(at, NodeKind+".") {
		api.NewError(api.Usage, "that is nothing to ask for", "").Write(w)
		return
	}
	given, err := g.grant(r.Context(), server.IdentityOf(r.Context()).Tenant, at, a)
	if err != nil {
		g.failed(w, r, jetStreamError("the record of the tenant cannot be changed", err))
		return
	}
	writeJSON(w, http.StatusOK, given)
}

func (g *Gateway) grant(ctx context.Context, tenant, at string, a quotaMessage) (given quotaMessage, err error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	ceilings := g.door.Settings().Of(tenant).Ceilings()
	for {
		var h quotaRecord
		revision, err := g.bus.quotas.get(ctx, tenantKey(tenant), &h)
		if err != nil {
			return given, err
		}
		before, err := json.Marshal(h)
		if err != nil {
			return given, err
		}
		given = h.grant(at, a, ceilings, time.Now(), func(node string) bool { return !g.members.Alive(node) })
		if after, err := json.Marshal(h); err != nil || string(after) == string(before) {
			return given, err
		}
		if _, err = g.bus.quotas.put(ctx, tenantKey(tenant), &h, revision); !conflict(err) {
			return given, err
		}
	}
}

// quotas are what a node may run of each tenant.
type quotas struct {
	s       *server.Server
	gate    *tenants.Scheduler // of it
	link    *Transport
	members *Members

	mu  sync.Mutex
	all map[string]*quota
}

type quota struct {
	mu       sync.Mutex
	ceilings tenants.Ceilings
	have     int       // calls that may run here
	sure     bool      // that the record says so
	peak     int       // calls that ran or waited, since the last look
	others   int       // nodes that want some
	refused  time.Time // when more was last refused
	tokens   int       // of the rate
	until    time.Time // when they are no longer
	asked    int       // calls
	turn     uint64    // of that question
	turned   time.Time // when it was first asked
	err      error     // of the last one
	failed   time.Time // when it came
}

// join lets a call in by what the node has of its tenant, or asks for more.
func (x *quotas) join(ctx context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error) {
	if c.Concurrency == 0 && c.Rate == 0 {
		return x.gate.Join(tenant, c)
	}
	x.mu.Lock()
	s := x.all[tenant]
	if s == nil {
		s = &quota{}
		x.all[tenant] = s
	}
	x.mu.Unlock()
	came := time.Now()
	s.mu.Lock() // until the call is counted at the gate: no more than it counts is given back
	defer s.mu.Unlock()
	if s.failed.After(came) {
		return nil, s.err // the question that it has waited for was its own
	}
	now := time.Now()
	use := x.gate.Use(tenant)
	need := use.Running + use.Waiting + 1
	s.ceilings, s.peak = c, max(s.peak, need)
	const patience = 100 * time.Millisecond
	calls, tokens := s.have, 0
	if c.Concurrency > 0 && (!s.sure || s.have < min(need, c.Concurrency) && now.Sub(s.refused) > patience) {
		calls = min(c.Concurrency, max(s.have, need+c.Concurrency/8))
	}
	if c.Rate > 0 && (s.tokens < 1 || now.After(s.until)) {
		tokens = max(1, int(c.Rate/8))
	}
	if calls != s.have || tokens > 0 || !s.sure {
		if err := x.ask(ctx, tenant, s, calls, tokens); err != nil {
			return nil, err
		}
	}
	if c.Rate > 0 {
		if s.tokens < 1 {
			return nil, api.NewError(api.Quota, "the tenant's rate limit is exceeded", "send fewer calls per second")
		}
		s.tokens--
		c.Rate = 0
	}
	if c.Concurrency > 0 {
		if s.have == 0 {
			return nil, api.NewError(api.Quota, "the tenant has reached its limit of running and waiting calls, on other nodes", "wait for a call's end")
		}
		c.Concurrency = s.have
	}
	return x.gate.Join(tenant, c)
}

// ask asks the gateways for a share.
func (x *quotas) ask(ctx context.Context, tenant string, s *quota, calls, tokens int) error {
	ctx, cancel := context.WithTimeout(server.As(context.WithoutCancel(ctx), tenant, ""), jetStreamTimeout) // others wait for it, too
	defer cancel()
	if calls != s.asked {
		s.asked, s.turned = calls, time.Now()
		s.turn++ // the same question once more changes nothing that was granted
	}
	text, err := json.Marshal(quotaMessage{Turn: s.turn, Calls: calls, Tokens: tokens})
	if err != nil {
		return err
	}
	s.sure = false
	gateways := x.members.Of(GatewayKind)
	for len(gateways) == 0 && x.members.Connected() && !x.members.Settled() && ctx.Err() == nil { // it has been asked who is there
		time.Sleep(tick / 10)
		gateways = x.members.Of(GatewayKind)
	}
	why, hint := "no gateway answers", "try again in a moment"
	if len(gateways) == 0 {
		why, hint = "there is no gateway", "start `sbxrun gateway`; or have the tenant's concurrency = 0 and rate = 0 in the configuration"
	}
	for _, gateway := range gateways {
		given, err := x.askOne(ctx, gateway.subject(), text)
		if e, ok := errors.AsType[*api.Error](err); ok {
			why = e.Failure.Message
		}
		if err != nil || given.Turn != s.turn {
			continue
		}
		now := time.Now()
		if given.Calls < calls {
			s.refused = now
		}
		s.have, s.others, s.sure = given.Calls, given.Others, true
		if tokens > 0 {
			s.tokens, s.until = given.Tokens, now.Add(time.Second)
		}
		if s.ceilings.Concurrency > 0 {
			x.gate.SetConcurrency(tenant, s.have)
		}
		return nil
	}
	s.err, s.failed = api.NewError(api.Busy, "the tenant's ceilings hold for all nodes together, and its share cannot be asked for: "+why, hint), time.Now()
	return s.err
}

// askOne asks one gateway, and not for so long that there is no time for another one.
func (x *quotas) askOne(ctx context.Context, at string, text []byte) (given quotaMessage, err error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout/3)
	defer cancel()
	r := (&http.Request{Method: http.MethodPost, URL: &url.URL{Path: quotaPath}, Header: http.Header{}}).WithContext(ctx)
	res, err := x.link.do(forwardRequest(r, text), at)
	if err != nil {
		return given, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		e := &api.Error{}
		return given, errors.Join(json.NewDecoder(res.Body).Decode(e), e)
	}
	return given, json.NewDecoder(res.Body).Decode(&given)
}

// run gives back what is not needed, until ctx is done.
func (x *quotas) run(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		x.mu.Lock()
		names := slices.Collect(maps.Keys(x.all))
		x.mu.Unlock()
		for _, tenant := range names {
			x.settle(ctx, tenant)
		}
	}
}

func (x *quotas) settle(ctx context.Context, tenant string) {
	x.mu.Lock()
	s := x.all[tenant]
	x.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ceilings = x.s.Settings().Of(tenant).Ceilings()
	if s.ceilings.Concurrency == 0 {
		if s.have > 0 || s.asked > 0 { // before a reload: what waits by that share would wait for ever
			x.gate.SetConcurrency(tenant, math.MaxInt)
			_ = x.ask(ctx, tenant, s, 0, 0) // as below
		}
		return
	}
	use := x.gate.Use(tenant)
	need := use.Running + use.Waiting
	calls := max(need, s.peak)
	if s.peak = need; s.others > 0 { // each has its turn
		calls = min(calls, s.ceilings.Concurrency/(1+s.others))
	}
	calls = min(s.ceilings.Concurrency, max(calls, use.Running))
	// Who has none is not in the record, and a question from before may yet come and put it there: so it is
	// asked for longer than one can be on its way.
	if calls > 0 || s.have > 0 || !s.sure || time.Since(s.turned) < lostAfter {
		// What is given back must not be used any more when others get it.
		x.gate.SetConcurrency(tenant, min(calls, s.have))
		_ = x.ask(ctx, tenant, s, calls, 0) // if nobody answers, the next call asks
	}
}
