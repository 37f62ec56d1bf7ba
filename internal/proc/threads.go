package proc

import "runtime"

// ShedThreads ends the threads of ours that have nothing to do, for who is about to wait:
// from eight to five. Go makes one whenever something blocks or could go on beside it,
// and keeps it for ever; what was needed for a moment's work at the start would count
// against a bound on tasks (pids.max) for as long as the run takes. A goroutine that ends
// while it is locked to its thread takes that with it; one processor keeps Go from making
// others in their place.
func ShedThreads() {
	const most = 8
	runtime.GOMAXPROCS(1)
	for range most {
		done := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(done)
		}()
		<-done
	}
}
