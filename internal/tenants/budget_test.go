package tenants

import (
	"math"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A tenant has no more than its own, all have no more than there is, and what is given back can
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
	a.Shrink(4) // no growth
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
	// No sum of it is too much for 64 bits, and nobody takes less than nothing.
	if _, err := b.Take("b", 1, 0); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int64{math.MaxInt64, -1} {
		if _, err := b.Take("b", n, 9); code(err) != api.Quota {
			t.Errorf("%d: %v", n, err)
		}
		if _, err := b.Take("b", n, 0); err == nil {
			t.Errorf("%d was taken of 10 bytes", n)
		}
	}
}
