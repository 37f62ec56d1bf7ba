package tenants

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

func code(err error) api.Code {
	var e *api.Error
	if !errors.As(err, &e) {
		return ""
	}
	return e.Failure.Code
}

// waits returns when n calls of a tenant are waiting.
func waits(t *testing.T, g *Scheduler, name string, n int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); g.Uses()[name].Waiting != n; time.Sleep(time.Millisecond) {
		check.Require(t, !time.Now().After(end), "%d wait, want %d", g.Uses()[name].Waiting, n)
	}
}

// enter waits for admission.
func enter(ctx context.Context, g *Scheduler, name string, c Ceilings) (leave func(), err error) {
	turn, err := g.Join(name, c)
	if err != nil {
		return nil, err
	}
	if err := turn.Wait(ctx); err != nil {
		turn.Leave()
		return nil, err
	}
	return turn.Leave, nil
}

// A tenant that comes late takes turns with one that has many calls waiting.
func TestTurns(t *testing.T) {
	g := NewScheduler(1)
	ceilings := Ceilings{Queue: 10}
	hold, err := enter(t.Context(), g, "many", ceilings)
	check.Must(t, err)
	var mu sync.Mutex
	var order []string
	var calls sync.WaitGroup
	come := func(name string, n int) {
		for i := range n {
			calls.Go(func() {
				leave, err := enter(t.Context(), g, name, ceilings)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
				leave()
			})
			waits(t, g, name, i+1)
		}
	}
	come("many", 4)
	come("few", 2)
	hold()
	calls.Wait()
	want := []string{"many", "few", "many", "few", "many", "many"}
	check.That(t, slices.Equal(order, want), "%v, want %v", order, want)
	check.Equal(t, g.Uses()["many"], (Use{}))
}

func TestCeilings(t *testing.T) {
	g := NewScheduler(2)
	one := Ceilings{Concurrency: 1}
	leave, err := enter(t.Context(), g, "a", one)
	check.Must(t, err)
	_, err = enter(t.Context(), g, "a", one)
	check.That(t, code(err) == api.Quota, "a second call of a: %v", err)
	other, err := enter(t.Context(), g, "b", one)
	check.Must(t, err)
	_, err = enter(t.Context(), g, "c", one)
	check.That(t, code(err) == api.Busy, "a third call: %v", err)
	leave()
	leave() // does nothing
	_, err = enter(t.Context(), g, "c", one)
	check.OK(t, err)
	_, err = enter(t.Context(), g, "d", one)
	check.That(t, code(err) == api.Busy, "a place was given up twice: %v", err)
	other()
}

// The tenant with the fewest places is next, so long calls count for as long as they run.
func TestLongCalls(t *testing.T) {
	g := NewScheduler(4)
	c := Ceilings{Queue: 10}
	var long []func()
	for range 4 {
		leave, err := enter(t.Context(), g, "long", c)
		check.Must(t, err)
		long = append(long, leave)
	}
	var waiting []*Ticket
	for _, name := range []string{"long", "long", "short", "short"} {
		turn, err := g.Join(name, c)
		check.Must(t, err)
		waiting = append(waiting, turn)
	}
	long[0]()
	long[1]()
	for i, want := range []bool{false, false, true, true} {
		check.Equal(t, isIn(waiting[i]), want, "call %d", i)
	}
}

// Tenants that always have calls waiting hold the places for equally long, however many calls they make and
// however long these run. The time is simulated.
func TestShares(t *testing.T) {
	const places, ticks = 6, 2000
	g := NewScheduler(places)
	r := rand.New(rand.NewPCG(1, 2))
	tenants := []struct {
		name     string
		calls    int // running and waiting
		duration func() int
	}{
		{"many", 16, func() int { return 1 + r.IntN(10) }},
		{"short", 7, func() int { return 1 }},
		{"long", 7, func() int { return 50 + r.IntN(100) }},
	}
	all := make([][]*Ticket, len(tenants))
	ends := map[*Ticket]int{}
	held := make([]int, len(tenants))
	for now := range ticks {
		for i, of := range tenants {
			all[i] = slices.DeleteFunc(all[i], func(u *Ticket) bool {
				if end, runs := ends[u]; !runs || end > now {
					return false
				}
				u.Leave()
				delete(ends, u)
				return true
			})
			for len(all[i]) < of.calls {
				u, err := g.Join(of.name, Ceilings{Queue: of.calls})
				check.Must(t, err)
				all[i] = append(all[i], u)
			}
		}
		for i, of := range tenants {
			for _, u := range all[i] {
				if _, runs := ends[u]; !runs && isIn(u) {
					ends[u] = now + of.duration()
				}
			}
			held[i] += g.Use(of.name).Running
		}
	}
	for i, of := range tenants {
		share := float64(held[i]*len(tenants)) / (places * ticks)
		check.That(t, share > 0.9, "%s held %.2f of its share", of.name, share)
	}
}

// isIn reports whether a call has been admitted.
func isIn(u *Ticket) bool {
	select {
	case <-u.in:
		return true
	default:
		return false
	}
}

// The reserved places are for tenants that hold none, whether their call is new or waiting.
func TestReserve(t *testing.T) {
	g := NewScheduler(32)
	c := Ceilings{Queue: 1}
	var many []*Ticket
	for range 30 {
		turn, err := g.Join("many", c)
		check.Must(t, err)
		many = append(many, turn)
	}
	waits, err := g.Join("many", c)
	check.Must(t, err)
	var others []*Ticket
	for _, name := range []string{"a", "b", "c"} {
		turn, err := g.Join(name, c)
		check.Must(t, err)
		others = append(others, turn)
	}
	check.That(t, !isIn(waits) && isIn(others[0]) && isIn(others[1]) && !isIn(others[2]),
		"%v %v %v %v", isIn(waits), isIn(others[0]), isIn(others[1]), isIn(others[2]))
	others[0].Leave()
	check.That(t, !isIn(waits) && isIn(others[2]), "a reserved place became free: %v %v", isIn(waits), isIn(others[2]))
	for _, u := range []*Ticket{many[0], many[1], many[2]} {
		u.Leave()
	}
	check.That(t, isIn(waits), "places that are not reserved are free")
}

// A tenant at its own ceiling does not keep others from free places.
func TestBoundKeepsNobody(t *testing.T) {
	g := NewScheduler(2)
	one := Ceilings{Concurrency: 1, Queue: 1}
	leave, _ := enter(t.Context(), g, "a", one)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { _, err := enter(ctx, g, "a", one); ended <- err }()
	waits(t, g, "a", 1)
	other, err := enter(t.Context(), g, "b", one)
	check.Must(t, err)
	other()
	cancel()
	err = <-ended
	check.That(t, errors.Is(err, context.Canceled), "%v", err)
	leave()
	check.Equal(t, g.Uses()["a"], (Use{}))
}

func TestRate(t *testing.T) {
	g := NewScheduler(10)
	slow := Ceilings{Rate: 0.001}
	_, err := enter(t.Context(), g, "a", slow)
	check.Must(t, err)
	_, err = enter(t.Context(), g, "a", slow)
	check.That(t, code(err) == api.Quota, "%v", err)
	_, err = enter(t.Context(), g, "b", slow)
	check.That(t, err == nil, "another tenant: %v", err)
}

// Only idle tenants, and their rates, are forgotten.
func TestForget(t *testing.T) {
	g := NewScheduler(1)
	leave, err := enter(t.Context(), g, "runs", Ceilings{})
	check.Must(t, err)
	turn, err := g.Join("waits", Ceilings{Queue: 1})
	check.Must(t, err)
	for i := range maxIdleTenants {
		_, err := g.Join(fmt.Sprint(i), Ceilings{})
		check.Require(t, code(err) == api.Busy && len(g.tenants) <= maxIdleTenants, "%d, with %d tenants: %v", i, len(g.tenants), err)
	}
	runs, waits := g.Use("runs"), g.Use("waits")
	check.That(t, runs.Running == 1 && waits.Waiting == 1, "%+v, %+v", runs, waits)
	leave()
	check.Must(t, turn.Wait(t.Context()))
	turn.Leave()
}

// The counts are consistent after many concurrent joins, leaves and cancellations.
func TestManyAtOnce(t *testing.T) {
	g := NewScheduler(3)
	c := Ceilings{Concurrency: 2, Queue: 100}
	var all sync.WaitGroup
	for i := range 300 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7)*time.Millisecond)
			defer cancel()
			if leave, err := enter(ctx, g, fmt.Sprint(i%4), c); err == nil {
				time.Sleep(time.Millisecond)
				leave()
			}
		})
	}
	all.Wait()
	for name, u := range g.Uses() {
		check.That(t, u == (Use{}), "%s: %+v", name, u)
	}
	check.That(t, g.places == 3 && len(g.turns) == 0, "%d places, %d in turn", g.places, len(g.turns))
}
