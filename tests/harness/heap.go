package harness

import (
	"os"
	"runtime"
	"strconv"
	"testing"
)

// MainWithHeap runs tests with so many bytes of heap in use as SBXRUN_TEST_HEAP says.
func MainWithHeap(m *testing.M) {
	size, _ := strconv.Atoi(os.Getenv("SBXRUN_TEST_HEAP")) // none if it is not set
	heap := make([]byte, size)
	for i := 0; i < size; i += 4096 {
		heap[i] = 1
	}
	code := m.Run()
	runtime.KeepAlive(heap)
	os.Exit(code)
}
