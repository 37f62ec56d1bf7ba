package proc

import (
	"os"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func tasks(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	check.Must(t, err)
	return len(list)
}

// MakeThreads does not count idle threads twice.
func TestMakeThreads(t *testing.T) {
	MakeThreads(tasks(t) + 3) // makes some idle threads
	want := tasks(t) + 5
	MakeThreads(want)
	got := tasks(t)
	check.That(t, got >= want-1, "%d threads, want %d", got, want) // the runtime counts one that is about to start
}
