package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
)

// Kinds of those that take part.
const (
	NodeKind    = "node"
	GatewayKind = "gateway"
)

// Subjects, below the name of the cluster. Those of one node or gateway have its name, so that NATS can be told who may use them.
const (
	heartbeats    = "beat."  // KIND.NAME
	askHeartbeats = "beats." // KIND: has all of a kind send theirs
)

// Subject is where the connections of one instance are.
func subject(kind, name, instance string) string {
	return kind + "." + name + "." + instance
}

// nameIn returns the name in a subject of an instance.
func nameIn(subject string) string {
	_, rest, _ := strings.Cut(subject, ".")
	name, _, _ := strings.Cut(rest, ".")
	return name
}

// Heartbeat is what each node and each gateway tells of itself, every two seconds.
type Heartbeat struct {
	Kind     string `json:"kind"`
	Name     string `json:"name"`
	Instance string `json:"instance" doc:"Changes at each start"`
	Version  string `json:"version"`
	Draining bool   `json:"draining"`
	Gone     bool   `json:"gone,omitempty"` // the last beat
	api.Load
	Missing []api.Node `json:"missing,omitempty"` // of a gateway: nodes that are gone
}

func (b *Heartbeat) subject() string { return subject(b.Kind, b.Name, b.Instance) }

// Times of beats.
const (
	heartbeatInterval = 2 * time.Second
	lostAfter         = 3 * heartbeatInterval
	rememberGone      = 10 * time.Minute // of a node that is gone
)

// maxInstances is how many there may be of a name at once: whoever has its credentials may tell of any number.
const maxInstances = 8

// maxGone is how many nodes that are gone a beat tells of: a message of NATS has a megabyte.
const maxGone = 256

// Members are those that are heard.
type Members struct {
	bus   Bus
	self  func() Heartbeat
	kinds []string // that are heard
	kick  chan struct{}
	out   sync.Mutex // beats go out one after the other
	left  bool       // the last one has
	mu    sync.Mutex
	all   map[string]*member
	gone  map[string]api.Node // nodes, by name
	since time.Time           // when this side was connected, without a break; zero if it is not
	made  uint64              // the bus's count of connections, then
	last  time.Time           // the last look
}

type member struct {
	Heartbeat
	lastSeen time.Time
	count    uint64 // of beats
}

func newMembers(bus Bus) *Members {
	return &Members{bus: bus, kick: make(chan struct{}, 1), all: map[string]*member{}, gone: map[string]api.Node{}}
}

// Join takes part until ctx is done, as one of a kind, and tells what self returns. It hears those of
// some kinds: what nodes tell reaches gateways alone, or with their number the messages would grow as
// its square.
func Join(ctx context.Context, bus Bus, kind string, self func() Heartbeat, kinds ...string) (*Members, error) {
	m := newMembers(bus)
	m.self, m.kinds = self, kinds
	for _, k := range kinds {
		if err := bus.Subscribe(heartbeats+k+".*", m.receive); err != nil {
			return nil, err
		}
	}
	err := bus.Subscribe(askHeartbeats+kind, func(string, string, []byte, bool) { m.Announce() })
	if err != nil {
		return nil, err
	}
	go m.run(ctx)
	return m, nil
}

// Announce has a beat sent at once.
func (m *Members) Announce() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

func (m *Members) run(ctx context.Context) {
	look := time.NewTicker(tick)
	defer look.Stop()
	m.check(time.Now())
	for {
		m.send(m.self())
		next := time.After(heartbeatInterval - time.Duration(rand.Int64N(int64(heartbeatInterval/8)))) // not all at once
		for waits := true; waits; m.check(time.Now()) {
			select {
			case <-ctx.Done():
				return
			case <-m.kick:
				waits = false
			case <-next:
				waits = false
			case <-look.C:
			}
		}
	}
}

// Leave sends the last beat.
func (m *Members) Leave() {
	b := m.self()
	b.Gone = true
	m.send(b)
}

func (m *Members) send(b Heartbeat) {
	m.out.Lock()
	defer m.out.Unlock()
	if m.left {
		return
	}
	m.left = b.Gone
	if b.Kind == GatewayKind {
		b.Missing = m.missing()
	}
	text, err := json.Marshal(b)
	if err != nil {
		panic(err) // of our own type
	}
	_ = m.bus.Publish(heartbeats+b.Kind+"."+b.Name, "", text) // the next one comes soon
}

func (m *Members) receive(subject, _ string, data []byte, _ bool) {
	var b Heartbeat
	// Who may publish under a name is NATS's to say, so the name has to be that of the subject.
	if json.Unmarshal(data, &b) != nil || subject != heartbeats+b.Kind+"."+b.Name || !config.ValidName(b.Name) || !validInstance(b.Instance) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.Gone {
		m.drop(b.subject(), api.StateLeft)
		return
	}
	count := uint64(1)
	if old := m.all[b.subject()]; old != nil {
		count = old.count + 1
	} else if m.instances(b.Kind, b.Name) == maxInstances {
		return // until one of them is lost
	}
	delete(m.gone, b.Name)
	m.all[b.subject()] = &member{b, time.Now(), count}
}

// check draws the conclusions that time allows.
func (m *Members) check(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	late := now.Sub(m.last) > heartbeatInterval // this process was stopped, or its machine
	m.last = now
	if !m.bus.Connected() {
		m.since = time.Time{}
		return
	}
	// A break may be too short to be seen, and yet come after a long silence.
	if made := m.bus.Reconnects(); m.since.IsZero() || late || made != m.made {
		m.since, m.made = now, made
		for _, x := range m.all { // that could not be heard
			x.lastSeen = now
		}
		for _, k := range m.kinds {
			_ = m.bus.Publish(askHeartbeats+k, "", nil) // they come by themselves, later
		}
		m.Announce() // nor was this side heard
	}
	for id, x := range m.all {
		if now.Sub(x.lastSeen) > lostAfter {
			m.drop(id, api.StateLost)
		}
	}
	maps.DeleteFunc(m.gone, func(_ string, n api.Node) bool { return now.Sub(n.Heard) > rememberGone })
}

// drop takes out who is gone. A node is remembered for a while, unless it has been started again.
func (m *Members) drop(id string, how api.NodeState) {
	x := m.all[id]
	if x == nil {
		return
	}
	delete(m.all, id)
	if x.Kind == NodeKind && m.instances(x.Kind, x.Name) == 0 {
		n := x.node()
		n.State, n.Load = how, api.Load{}
		m.gone[x.Name] = n
		m.Announce() // those who ask a gateway hear of it
	}
}

// instances is how many are heard of a name.
func (m *Members) instances(kind, name string) (n int) {
	for _, x := range m.all {
		if x.Kind == kind && x.Name == name {
			n++
		}
	}
	return n
}

// missing returns the nodes that are gone, the last ones if there are many.
func (m *Members) missing() []api.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.SortedFunc(maps.Values(m.gone), func(a, b api.Node) int { return b.Heard.Compare(a.Heard) })
	return all[:min(len(all), maxGone)]
}

// node describes who has sent a beat.
func (x *member) node() api.Node {
	n := api.Node{Name: x.Name, Instance: x.Instance, Version: x.Version, State: api.StateReady, Heard: x.lastSeen.UTC().Round(time.Millisecond), Load: x.Load}
	if x.Draining {
		n.State = api.StateDraining
	}
	return n
}

// Connected reports whether anything can be heard.
func (m *Members) Connected() bool { return m.bus.Connected() }

// Settled reports whether all that are there must have been heard.
func (m *Members) Settled() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bus.Connected() && !m.since.IsZero() && time.Since(m.since) > heartbeatInterval+heartbeatInterval/4
}

// Alive reports whether an instance is there, as far as is known: who is not connected, or has just been,
// knows of none that is gone.
func (m *Members) Alive(at string) bool { return !m.Settled() || m.Has(at) }

// Has reports whether an instance is there.
func (m *Members) Has(at string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[at] != nil
}

// of returns who is there, of some kinds, in no order.
func (m *Members) of(kinds ...string) []member {
	m.mu.Lock()
	defer m.mu.Unlock()
	found := make([]member, 0, len(m.all))
	for _, x := range m.all {
		if slices.Contains(kinds, x.Kind) {
			found = append(found, *x)
		}
	}
	return found
}

// Of returns who is there, of one kind, by name.
func (m *Members) Of(kind string) (found []Heartbeat) {
	for _, x := range m.of(kind) {
		found = append(found, x.Heartbeat)
	}
	slices.SortFunc(found, func(a, b Heartbeat) int { return strings.Compare(a.subject(), b.subject()) })
	return found
}

const instanceSize = 8

func validInstance(s string) bool {
	return len(s) == instanceSize && strings.Trim(s, "0123456789abcdef") == ""
}

// NewInstance is a word for this start of a process.
func NewInstance() string { return fmt.Sprintf("%08x", rand.Uint32()) }

// An id of a session or a call begins with the instance of the node that has it.

// Prefix begins the ids that an instance gives.
func Prefix(name, instance string) string { return name + "." + instance + "." }

// home returns the subject of the node that has given an id; ok is false for an id of no node.
func home(id string) (at string, ok bool) {
	parts := strings.Split(id, ".")
	if len(parts) != 3 || !config.ValidName(parts[0]) || !validInstance(parts[1]) {
		return "", false
	}
	return subject(NodeKind, parts[0], parts[1]), true
}
