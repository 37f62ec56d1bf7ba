package tenants

import (
	"fmt"
	"math"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A tenant cannot exceed its own limit, all tenants together cannot exceed the total, and freed amounts can
// be taken again.
func TestBudget(t *testing.T) {
	b := NewBudget("bytes", 10)
	a, err := b.Take("a", 6, 6)
	check.Must(t, err)
	_, err = b.Take("a", 1, 6)
	check.That(t, code(err) == api.Quota, "above its own: %v", err)
	_, err = b.Take("b", 5, 6)
	check.That(t, code(err) == api.Busy, "above all there is: %v", err)
	a.Shrink(2)
	a.Shrink(4) // does not grow it
	other, err := b.Take("b", 8, 0)
	check.That(t, err == nil && b.Used("a") == 2 && b.Used("b") == 8, "%v, %d and %d", err, b.Used("a"), b.Used("b"))
	a.Free()
	a.Free()
	other.Free()
	check.That(t, b.sum == 0 && len(b.used) == 0, "%d is left: %v", b.sum, b.used)
	(*Lease)(nil).Free()
	// Sums do not overflow, and negative amounts are rejected.
	_, err = b.Take("b", 1, 0)
	check.Must(t, err)
	for _, n := range []int64{math.MaxInt64, -1} {
		_, err := b.Take("b", n, 9)
		check.That(t, code(err) == api.Policy, "%d: %v", n, err)
		_, err = b.Take("b", n, 0)
		check.That(t, err != nil, "%d was taken of 10 bytes", n)
	}
}

// Errors of permanent limits differ from temporary ones.
func TestBudgetForGood(t *testing.T) {
	b := NewBudget("sessions", 0)
	b.Kept = true
	_, err := b.Take("a", 3, 2)
	check.That(t, code(err) == api.Policy, "more than ever: %v", err)
	l, err := b.Take("a", 1, 2)
	check.Must(t, err)
	check.OK(t, l.Grow(1, 2))
	err = l.Grow(1, 2)
	check.That(t, code(err) == api.Policy, "one lease with more than ever: %v", err)
	_, err = b.Take("a", 1, 2)
	check.That(t, code(err) == api.QuotaKept, "more than it may keep: %v", err)
	l.Free()
	check.That(t, b.Used("a") == 0, "%d is left", b.Used("a"))
}

// Tenants that take all they can get leave some for the next one.
func TestBudgetShared(t *testing.T) {
	const total = 1 << 20
	b := NewBudget("bytes", total)
	b.Shared = true
	for n := range 6 {
		tenant := fmt.Sprint(n)
		_, err := b.Take(tenant, total/200, 0)
		check.Require(t, err == nil, "after %d tenants: %v", n, err)
		for size := int64(total); size > 0; {
			if _, err := b.Take(tenant, size, 0); err != nil {
				size /= 2
			}
		}
		used := b.Used("0")
		check.That(t, n != 0 || used >= total*49/100, "a tenant alone gets %d of %d", used, total)
	}
	check.That(t, b.sum <= total, "%d of %d", b.sum, total)
}
