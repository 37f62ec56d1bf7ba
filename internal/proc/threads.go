package proc

import (
	"runtime"
	"sync"
)

// SpareThreads keeps Go from making threads that it can do without, for who has to wait,
// and where they are scarce.
func SpareThreads() { runtime.GOMAXPROCS(1) }

// MakeThreads makes threads until there are so many, which the runtime keeps for when it
// needs one: a goroutine that waits with its thread locked makes it run the others on
// another. What idles is taken first. Two are beside these: the caller's own, and the
// runtime's monitor.
func MakeThreads(total int) {
	var waiting sync.WaitGroup
	enough := make(chan struct{})
	for range max(0, total-2) {
		waiting.Add(1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			waiting.Done()
			<-enough
		}()
	}
	waiting.Wait()
	close(enough)
}

// ShedThreads ends the threads of ours that have nothing to do, for who is about to wait:
// from eight to five. Go makes one whenever something blocks or could go on beside it,
// and keeps it for ever; what was needed for a moment's work at the start would count
// against a bound on tasks (pids.max) for as long as the run takes. A goroutine that ends
// while it is locked to its thread takes that with it; one processor keeps Go from making
// others in their place.
func ShedThreads() {
	const most = 8
	SpareThreads()
	for range most {
		done := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(done)
		}()
		<-done
	}
}
