package harness

import (
	"os"
	"runtime"
	"strconv"
	"testing"
)

// MainWithHeap runs tests like WithHeap, and exits.
func MainWithHeap(m *testing.M) { os.Exit(WithHeap(m.Run)) }

// WithHeap runs tests with SBXRUN_TEST_HEAP bytes of heap in use.
func WithHeap(run func() int) int {
	size, _ := strconv.Atoi(os.Getenv("SBXRUN_TEST_HEAP")) // 0 if it is not set
	heap := make([]byte, size)
	for i := 0; i < size; i += 4096 {
		heap[i] = 1
	}
	code := run()
	runtime.KeepAlive(heap)
	return code
}
