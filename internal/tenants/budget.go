package tenants

import (
	"fmt"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Budget is so much of something that tenants share: bytes in memory or on disk, connections.
// What is to be used is taken before, so that nothing begins for which there may be no room.
type Budget struct {
	what  string // as errors name it
	total int64  // of all tenants; 0 is no bound

	mu   sync.Mutex
	used map[string]int64
	sum  int64
}

// NewBudget has total of what; 0 is no bound.
func NewBudget(what string, total int64) *Budget {
	return &Budget{what: what, total: total, used: map[string]int64{}}
}

// Lease is a part of a budget. Its methods may be called on nil, and are safe for concurrent use.
type Lease struct {
	budget *Budget
	tenant string
	n      int64
}

// Take takes n, which is not negative, for a tenant, who may have own in all; 0 is no bound. An error is an
// [*api.Error], and says whose bound it is.
func (b *Budget) Take(tenant string, n, own int64) (*Lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if used := b.used[tenant]; n < 0 || own > 0 && n > own-used {
		return nil, api.NewError(api.Quota, fmt.Sprintf("the tenant has %d of its %d %s, and this takes %d more", used, own, b.what, n), "ask for less, or wait until others are over")
	}
	if b.total > 0 && n > b.total-b.sum {
		return nil, api.NewError(api.Busy, "all "+b.what+" are taken", "try again later")
	}
	b.add(tenant, n)
	return &Lease{b, tenant, n}, nil
}

func (b *Budget) add(tenant string, n int64) {
	b.sum += n
	if b.used[tenant] += n; b.used[tenant] == 0 {
		delete(b.used, tenant)
	}
}

// Shrink gives back all but n.
func (l *Lease) Shrink(n int64) {
	if l == nil {
		return
	}
	l.budget.mu.Lock()
	defer l.budget.mu.Unlock()
	if n < l.n {
		l.budget.add(l.tenant, n-l.n)
		l.n = n
	}
}

// Free gives all of it back.
func (l *Lease) Free() { l.Shrink(0) }

// Used is how much a tenant has.
func (b *Budget) Used(tenant string) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used[tenant]
}
