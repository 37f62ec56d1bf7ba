package proc

import "testing"

// The heap of one process in a thousand is where the program is, and must not be left out
// of a fork then.
func TestApart(t *testing.T) {
	const code, block = 0x4a1000, 0x7f3a_1234_5000
	for _, test := range []struct {
		heap uintptr
		want bool
	}{
		{0xc0_0000_1000, true},
		{0x2356_1080_0000, true},
		{0x1000_0000, false}, // below 64 GiB, as the code
		{0xf_ffff_f000, false},
		{0x10_0000_0000, true}, // just above
		{block + 0x1000, false},
	} {
		window := test.heap &^ (heapSpan - 1)
		if got := apart(window, code, block); got != test.want {
			t.Errorf("heap at %#x: apart %v, want %v", test.heap, got, test.want)
		}
	}
}
