package proc

import (
	"os"
	"testing"
)

func tasks(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// MakeThreads does not count idle threads twice.
func TestMakeThreads(t *testing.T) {
	MakeThreads(tasks(t) + 3) // makes some idle threads
	want := tasks(t) + 5
	MakeThreads(want)
	if got := tasks(t); got < want-1 { // the runtime counts one that is about to start
		t.Errorf("%d threads, want %d", got, want)
	}
}
