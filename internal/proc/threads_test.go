package proc

import (
	"fmt"
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

// MakeThreads does not count idle threads twice: with those that the first call leaves, the second one needs more than the
// difference.
func TestMakeThreads(t *testing.T) {
	MakeThreads(tasks(t) + 20)
	want := tasks(t) + 20
	MakeThreads(want)
	// The runtime counts threads that are about to start, and with cgo a few that never do.
	eventually(t, fmt.Sprint(want, " threads"), func() bool { return tasks(t) >= want-5 })
}
