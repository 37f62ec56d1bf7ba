package tenants

import (
	"fmt"
	"math"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A tenant cannot exceed its own limit, all tenants together cannot exceed the total, and freed amounts can
// be taken again.
func TestBudget(t *testing.T) {
	b := NewBudget("bytes", 10)
	a, err := b.Take("a", 6, 6)
	harness.Must(t, err)
	if _, err := b.Take("a", 1, 6); code(err) != api.Quota {
		t.Errorf("above its own: %v", err)
	}
	if _, err := b.Take("b", 5, 6); code(err) != api.Busy {
		t.Errorf("above all there is: %v", err)
	}
	a.Shrink(2)
	a.Shrink(4) // does not grow it
	other, err := b.Take("b", 8, 0)
	if err != nil || b.Used("a") != 2 || b.Used("b") != 8 {
		t.Errorf("%v, %d and %d", err, b.Used("a"), b.Used("b"))
	}
	a.Free()
	a.Free()
	other.Free()
	if b.sum != 0 || len(b.used) != 0 {
		t.Errorf("%d is left: %v", b.sum, b.used)
	}
	(*Lease)(nil).Free()
	// Sums do not overflow, and negative amounts are rejected.
	if _, err := b.Take("b", 1, 0); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int64{math.MaxInt64, -1} {
		if _, err := b.Take("b", n, 9); code(err) != api.Policy {
			t.Errorf("%d: %v", n, err)
		}
		if _, err := b.Take("b", n, 0); err == nil {
			t.Errorf("%d was taken of 10 bytes", n)
		}
	}
}

// Errors of permanent limits differ from temporary ones.
func TestBudgetForGood(t *testing.T) {
	b := NewBudget("sessions", 0)
	b.Kept = true
	if _, err := b.Take("a", 3, 2); code(err) != api.Policy {
		t.Errorf("more than ever: %v", err)
	}
	l, err := b.Take("a", 1, 2)
	harness.Must(t, err)
	if err := l.Grow(1, 2); err != nil {
		t.Error(err)
	}
	if err := l.Grow(1, 2); code(err) != api.Policy {
		t.Errorf("one lease with more than ever: %v", err)
	}
	if _, err := b.Take("a", 1, 2); code(err) != api.QuotaKept {
		t.Errorf("more than it may keep: %v", err)
	}
	l.Free()
	if b.Used("a") != 0 {
		t.Errorf("%d is left", b.Used("a"))
	}
}

// Tenants that take all they can get leave some for the next one.
func TestBudgetShared(t *testing.T) {
	const total = 1 << 20
	b := NewBudget("bytes", total)
	b.Shared = true
	for n := range 6 {
		tenant := fmt.Sprint(n)
		if _, err := b.Take(tenant, total/200, 0); err != nil {
			t.Fatalf("after %d tenants: %v", n, err)
		}
		for size := int64(total); size > 0; {
			if _, err := b.Take(tenant, size, 0); err != nil {
				size /= 2
			}
		}
		if used := b.Used("0"); n == 0 && used < total*49/100 {
			t.Errorf("a tenant alone gets %d of %d", used, total)
		}
	}
	if b.sum > total {
		t.Errorf("%d of %d", b.sum, total)
	}
}
