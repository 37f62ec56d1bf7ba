package proc

import "testing"

// In one process in a million the heap begins just below the program. Then a fork must still copy the
// program.
func TestHeap(t *testing.T) {
	const code, block, most = 0x4a1000, 0x7f3a_1234_5000, 1 << 36
	for _, test := range []struct{ first, base, size uintptr }{
		{0xc0_0000_1000, 0xc0_0000_0000, most},
		{0x2356_1080_0000, 0x2356_1000_0000, most},
		{0x1000_0000, 0x1000_0000, most}, // above the code
		{0x3f_f000, 0, 0},                // and below it
		{block - most/2, (block - most/2) &^ (64<<20 - 1), 0},
		{block + 64<<20, (block + 64<<20) &^ (64<<20 - 1), most},
	} {
		if base, size := heap(test.first, code, block); base != test.base || size != test.size {
			t.Errorf("first object at %#x: %#x and %#x, want %#x and %#x", test.first, base, size, test.base, test.size)
		}
	}
}
