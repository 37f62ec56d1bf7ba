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

// Kinds of members.
const (
	NodeKind    = "node"
	GatewayKind = "gateway"
)

// Subjects, below the name of the cluster. Those of a node or gateway contain its name, for access rules in NATS.
const (
	heartbeats    = "beat."  // KIND.NAME
	askHeartbeats = "beats." // KIND: asks all members of a kind for a heartbeat
)

// subject returns the subject of the connections of an instance.
func subject(kind, name, instance string) string {
	return kind + "." + name + "." + instance
}

// nameIn returns the name in the subject of an instance.
func nameIn(subject string) string {
	_, rest, _ := strings.Cut(subject, ".")
	name, _, _ := strings.Cut(rest, ".")
	return name
}

// Heartbeat is the message that each node and gateway sends every two seconds.
type Heartbeat struct {
	Kind     string `json:"kind"`
	Name     string `json:"name"`
	Instance string `json:"instance" doc:"Changes at each start"`
	Version  string `json:"version"`
	Draining bool   `json:"draining"`
	Gone     bool   `json:"gone,omitempty"` // the last heartbeat
	api.Load
	Missing []api.Node `json:"missing,omitempty"` // nodes that a gateway has lost
}

func (b *Heartbeat) subject() string { return subject(b.Kind, b.Name, b.Instance) }

// Intervals of heartbeats.
const (
	heartbeatInterval = 2 * time.Second
	lostAfter         = 3 * heartbeatInterval
	rememberGone      = 10 * time.Minute // how long to list a node that is gone
)

// maxInstances bounds the instances of a name, because a holder of its credentials can announce any number.
const maxInstances = 8

// maxGone bounds the missing nodes in a heartbeat: a NATS message has at most a megabyte.
const maxGone = 256

// Members tracks the other members by their heartbeats.
type Members struct {
	bus   Bus
	self  func() Heartbeat
	kinds []string // to track
	kick  chan struct{}
	out   sync.Mutex // serializes sending
	left  bool       // the last heartbeat was sent
	mu    sync.Mutex
	all   map[string]*member
	gone  map[string]api.Node // nodes, by name
	since time.Time           // start of the current connection to NATS; zero without one
	made  uint64              // the bus's number of reconnects at that time
	last  time.Time           // of the last check
}

type member struct {
	Heartbeat
	lastSeen time.Time
	count    uint64 // of heartbeats
}

func newMembers(bus Bus) *Members {
	return &Members{bus: bus, kick: make(chan struct{}, 1), all: map[string]*member{}, gone: map[string]api.Node{}}
}

// Join makes this process a member of a kind until ctx is done, with the heartbeats that self returns. It tracks
// members of some kinds only: if all nodes tracked each other, the number of messages would grow with the square of
// their number.
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

// Announce sends a heartbeat at once.
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
		next := time.After(heartbeatInterval - time.Duration(rand.Int64N(int64(heartbeatInterval/8)))) // not all members at the same time
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

// Leave sends the last heartbeat.
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
		panic(err) // impossible for this type
	}
	_ = m.bus.Publish(heartbeats+b.Kind+"."+b.Name, "", text) // if it fails, the next one follows soon
}

func (m *Members) receive(subject, _ string, data []byte, _ bool) {
	var b Heartbeat
	// NATS controls who may publish under a name, so the name must match the subject.
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

// check drops lost members.
func (m *Members) check(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	late := now.Sub(m.last) > heartbeatInterval // this process, or its machine, was stopped
	m.last = now
	if !m.bus.Connected() {
		m.since = time.Time{}
		return
	}
	// A disconnection may be too short to notice, and follow a long silence.
	if made := m.bus.Reconnects(); m.since.IsZero() || late || made != m.made {
		m.since, m.made = now, made
		for _, x := range m.all { // which could not reach us
			x.lastSeen = now
		}
		for _, k := range m.kinds {
			_ = m.bus.Publish(askHeartbeats+k, "", nil) // if it fails, they arrive later
		}
		m.Announce() // and we could not reach them
	}
	for id, x := range m.all {
		if now.Sub(x.lastSeen) > lostAfter {
			m.drop(id, api.StateLost)
		}
	}
	maps.DeleteFunc(m.gone, func(_ string, n api.Node) bool { return now.Sub(n.Heard) > rememberGone })
}

// drop removes an instance. It remembers a node for a while, unless another instance is there.
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
		m.Announce() // for those who query gateways
	}
}

// instances returns the number of instances with a name.
func (m *Members) instances(kind, name string) (n int) {
	for _, x := range m.all {
		if x.Kind == kind && x.Name == name {
			n++
		}
	}
	return n
}

// missing returns the nodes that are gone, the most recent ones if there are many.
func (m *Members) missing() []api.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.SortedFunc(maps.Values(m.gone), func(a, b api.Node) int { return b.Heard.Compare(a.Heard) })
	return all[:min(len(all), maxGone)]
}

// node describes a member.
func (x *member) node() api.Node {
	n := api.Node{Name: x.Name, Instance: x.Instance, Version: x.Version, State: api.StateReady, Heard: x.lastSeen.UTC().Round(time.Millisecond), Load: x.Load}
	if x.Draining {
		n.State = api.StateDraining
	}
	return n
}

// Connected reports whether this process is connected to NATS.
func (m *Members) Connected() bool { return m.bus.Connected() }

// Settled reports whether every member had time to send a heartbeat since this process connected.
func (m *Members) Settled() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bus.Connected() && !m.since.IsZero() && time.Since(m.since) > heartbeatInterval+heartbeatInterval/4
}

// Alive reports whether an instance may be there. It returns true while this process is not connected, or
// has only just connected.
func (m *Members) Alive(at string) bool { return !m.Settled() || m.Has(at) }

// Has reports whether an instance has sent heartbeats.
func (m *Members) Has(at string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[at] != nil
}

// of returns the members of some kinds, in no order.
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

// Of returns the members of one kind, sorted by name.
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

// NewInstance returns a random ID for this start of a process.
func NewInstance() string { return fmt.Sprintf("%08x", rand.Uint32()) }

// Prefix returns the prefix of the IDs of an instance's sessions and calls.
func Prefix(name, instance string) string { return name + "." + instance + "." }

// home returns the subject of the node that assigned an ID.
func home(id string) (at string, ok bool) {
	parts := strings.Split(id, ".")
	if len(parts) != 3 || !config.ValidName(parts[0]) || !validInstance(parts[1]) {
		return "", false
	}
	return subject(NodeKind, parts[0], parts[1]), true
}
