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

// A tenant's concurrency and rate limits hold for all nodes together. A record per tenant distributes its calls among
// nodes, and their sum never exceeds the limit. A node admits calls within its allotment on its own, requests more
// when it needs more, and returns what it does not need within seconds. It sends requests to a gateway, which changes
// the record, and removes lost nodes from it. A node that reaches no gateway starts nothing for tenants with limits.

// quotaRecord is the record of a tenant.
type quotaRecord struct {
	Held   map[string]allotment `json:"held"`   // by node
	Wanted map[string]time.Time `json:"wanted"` // last refusal, by node
	Tokens float64              `json:"tokens"` // of the rate limit
	At     time.Time            `json:"at"`     // time of Tokens
}

// allotment is the share of a node.
type allotment struct {
	Calls int    `json:"calls"` // maximum at a time
	Seq   uint64 `json:"turn"`  // of its last request
}

// quotaMessage is a request of a node, and the grant of a gateway.
type quotaMessage struct {
	Seq    uint64 `json:"turn"`   // sequence number; a late request changes nothing
	Calls  int    `json:"calls"`  // total
	Tokens int    `json:"tokens"` // additional
	Others int    `json:"others"` // other nodes that want more
}

// quotaPath is the path for requests of nodes.
const quotaPath = "/shares"

const wantedFor = 3 * time.Second

// maxQuotaRecord is the maximum size of a record. It has 60 to 80 bytes for each node that has calls or
// wants some, and no more nodes than the tenant's concurrency.
const maxQuotaRecord = 256 << 10

// grant updates the record for a request, within the ceilings. It ignores a request that is older than the
// node's last one.
func (h *quotaRecord) grant(at string, a quotaMessage, c tenants.Ceilings, now time.Time, lost func(node string) bool) quotaMessage {
	if h.Held == nil {
		h.Held, h.Wanted, h.Tokens, h.At = map[string]allotment{}, map[string]time.Time{}, max(1, c.Rate), now
	}
	if a.Seq < h.Held[at].Seq {
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
	if c.Concurrency == 0 { // the limit was removed, but the node does not know yet
		left = a.Calls
	}
	given := quotaMessage{Seq: a.Seq, Calls: max(0, min(a.Calls, left))}
	if delete(h.Held, at); given.Calls > 0 {
		h.Held[at] = allotment{given.Calls, a.Seq}
	}
	maps.DeleteFunc(h.Wanted, func(node string, last time.Time) bool {
		return now.Sub(last) > wantedFor || node == at && given.Calls == a.Calls
	})
	// Not with each refusal, because every change needs a write without a conflict.
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

// grantQuota handles a request of a node.
func (g *Gateway) grantQuota(w http.ResponseWriter, r *http.Request) {
	const most = 4096
	text, err := io.ReadAll(io.LimitReader(r.Body, most))
	var a quotaMessage
	at := r.RemoteAddr // NATS lets no one else send under this name
	if err != nil || json.Unmarshal(text, &a) != nil || !strings.HasPrefix(at, NodeKind+".") {
		api.NewError(api.Usage, "invalid quota request", "").Write(w)
		return
	}
	given, err := g.grant(r.Context(), server.IdentityOf(r.Context()).Tenant, at, a)
	if err != nil {
		g.failed(w, r, jetStreamError("cannot change the tenant's quota record", err))
		return
	}
	writeJSON(w, http.StatusOK, given)
}

func (g *Gateway) grant(ctx context.Context, tenant, at string, a quotaMessage) (given quotaMessage, err error) {
	ctx, cancel := context.WithTimeout(ctx, jetStreamTimeout)
	defer cancel()
	ceilings := g.middleware.Settings().Of(tenant).Ceilings()
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

// quotas are a node's allotments by tenant.
type quotas struct {
	s         *server.Server
	scheduler *tenants.Scheduler
	link      *Transport
	members   *Members

	mu  sync.Mutex
	all map[string]*quota
}

type quota struct {
	mu       sync.Mutex
	ceilings tenants.Ceilings
	have     int       // calls that may run here
	sure     bool      // whether the record agrees
	peak     int       // running and waiting calls since the last settle
	others   int       // other nodes that want more
	refused  time.Time // last refusal of more calls
	tokens   int       // of the rate limit
	until    time.Time // expiry of tokens
	asked    int       // calls
	seq      uint64    // of that request
	askedAt  time.Time // first transmission of that request
	err      error     // of the last failed request
	failed   time.Time // time of err
}

// join admits a call within the node's allotment, or requests more first.
func (x *quotas) join(ctx context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error) {
	if c.Concurrency == 0 && c.Rate == 0 {
		return x.scheduler.Join(tenant, c)
	}
	x.mu.Lock()
	s := x.all[tenant]
	if s == nil {
		s = &quota{}
		x.all[tenant] = s
	}
	x.mu.Unlock()
	came := time.Now()
	s.mu.Lock() // until the scheduler counts the call, so that settle does not return its slot
	defer s.mu.Unlock()
	if s.failed.After(came) {
		return nil, s.err // the request that it waited for has failed
	}
	now := time.Now()
	use := x.scheduler.Use(tenant)
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
	return x.scheduler.Join(tenant, c)
}

// ask requests an allotment from the gateways.
func (x *quotas) ask(ctx context.Context, tenant string, s *quota, calls, tokens int) error {
	ctx, cancel := context.WithTimeout(server.As(context.WithoutCancel(ctx), tenant, ""), jetStreamTimeout) // other calls wait for it, too
	defer cancel()
	if calls != s.asked {
		s.asked, s.askedAt = calls, time.Now()
		s.seq++ // a repeated request must not change a grant
	}
	text, err := json.Marshal(quotaMessage{Seq: s.seq, Calls: calls, Tokens: tokens})
	if err != nil {
		return err
	}
	s.sure = false
	gateways := x.members.Of(GatewayKind)
	for len(gateways) == 0 && x.members.Connected() && !x.members.Settled() && ctx.Err() == nil { // the answers to askHeartbeats are on their way
		time.Sleep(tick / 10)
		gateways = x.members.Of(GatewayKind)
	}
	why, hint := "no gateway responds", "try again in a moment"
	if len(gateways) == 0 {
		why, hint = "there is no gateway", "start `sbxrun gateway`, or set the tenant's concurrency and rate to 0"
	}
	for _, gateway := range gateways {
		given, err := x.askOne(ctx, gateway.subject(), text)
		if e, ok := errors.AsType[*api.Error](err); ok {
			why = e.Failure.Message
		}
		if err != nil || given.Seq != s.seq {
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
			x.scheduler.SetConcurrency(tenant, s.have)
		}
		return nil
	}
	s.err, s.failed = api.NewError(api.Busy, "cannot request the tenant's quota, which all nodes share: "+why, hint), time.Now()
	return s.err
}

// askOne sends a request to one gateway. Its timeout leaves time for another one.
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

// run returns unneeded allotments until ctx is done.
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
		if s.have > 0 || s.asked > 0 { // after a reload: waiting calls would wait forever
			x.scheduler.SetConcurrency(tenant, math.MaxInt)
			_ = x.ask(ctx, tenant, s, 0, 0) // repeated by the next settle
		}
		return
	}
	use := x.scheduler.Use(tenant)
	need := use.Running + use.Waiting
	calls := max(need, s.peak)
	if s.peak = need; s.others > 0 { // share equally
		calls = min(calls, s.ceilings.Concurrency/(1+s.others))
	}
	calls = min(s.ceilings.Concurrency, max(calls, use.Running))
	// A node without calls is not in the record, but an earlier request may still arrive and add it. So repeat the
	// request for longer than one can be in flight.
	if calls > 0 || s.have > 0 || !s.sure || time.Since(s.askedAt) < lostAfter {
		// Stop using returned slots before others get them.
		x.scheduler.SetConcurrency(tenant, min(calls, s.have))
		_ = x.ask(ctx, tenant, s, calls, 0) // if it fails, the next call repeats it
	}
}
