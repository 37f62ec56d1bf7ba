package tenants

import (
	"fmt"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Budget is an amount that tenants share: bytes in memory or on disk, or connections.
type Budget struct {
	// Shared limits each tenant to the amount that it leaves free: one tenant alone gets half of the total. Even if
	// several tenants take all they can get, another one still finds some.
	Shared bool
	// Kept marks leases that last until the tenant removes something, so retrying does not help.
	Kept bool

	what  string // in error messages
	total int64  // for all tenants; 0 for no limit

	mu   sync.Mutex
	used map[string]int64
	sum  int64
}

// NewBudget returns a budget of total; 0 means no limit.
func NewBudget(what string, total int64) *Budget {
	return &Budget{what: what, total: total, used: map[string]int64{}}
}

// Lease is a part of a budget. Its methods accept nil and are safe for concurrent use.
type Lease struct {
	budget *Budget
	tenant string
	n      int64
}

// Take reserves n, which must not be negative, for a tenant that may have own in total; 0 means no limit. The
// error is an [*api.Error] that names the exceeded limit.
func (b *Budget) Take(tenant string, n, own int64) (*Lease, error) {
	l := &Lease{budget: b, tenant: tenant}
	if err := l.Grow(n, own); err != nil {
		return nil, err
	}
	return l, nil
}

// Grow reserves n more, like [Budget.Take].
func (l *Lease) Grow(n, own int64) error {
	b := l.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.check(l.n, b.used[l.tenant], n, own); err != nil {
		return err
	}
	b.add(l.tenant, n)
	l.n += n
	return nil
}

// check returns the error of growing a lease by n. The lease has held, of the amount that its tenant has
// used.
func (b *Budget) check(held, used, n, own int64) error {
	free := b.total - b.sum
	switch {
	case n < 0 || own > 0 && n > own-held:
		return api.NewError(api.Policy, fmt.Sprintf("this exceeds the tenant's limit of %d %s", own, b.what), "request less")
	case own > 0 && n > own-used && b.Kept:
		return api.NewError(api.QuotaKept, fmt.Sprintf("the tenant uses %d of its %d %s, and this needs %d more", used, own, b.what, n), "remove some")
	case own > 0 && n > own-used:
		return api.NewError(api.Quota, fmt.Sprintf("the tenant uses %d of its %d %s, and this needs %d more", used, own, b.what, n), "request less, or wait until other requests have ended")
	case b.total > 0 && (n > free || b.Shared && used+n > free-n):
		return api.NewError(api.Busy, "the server has too few free "+b.what, "try again later")
	}
	return nil
}

func (b *Budget) add(tenant string, n int64) {
	b.sum += n
	if b.used[tenant] += n; b.used[tenant] == 0 {
		delete(b.used, tenant)
	}
}

// Shrink returns all but n.
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

// Free returns the whole lease.
func (l *Lease) Free() { l.Shrink(0) }

// Used returns the amount that a tenant has.
func (b *Budget) Used(tenant string) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used[tenant]
}
