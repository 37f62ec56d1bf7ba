package proc

import "runtime"

// SpareThreads keeps Go from making unnecessary threads. Use it in processes that mostly wait, and where threads are scarce.
func SpareThreads() { runtime.GOMAXPROCS(1) }

// MakeThreads makes threads until there are total. The runtime keeps them for later use. It uses idle threads first, and
// needs another thread for each goroutine that waits while locked to its thread.
func MakeThreads(total int) {
	enough := make(chan struct{})
	defer close(enough)
	for range total {
		if n, _ := runtime.ThreadCreateProfile(nil); n >= total {
			return
		}
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			close(locked)
			<-enough
		}()
		<-locked
	}
}

// ShedThreads ends idle threads, from eight to five, before a long wait. Go makes threads when goroutines block or can run
// in parallel, and keeps them. Threads from the start would count against a limit on tasks (pids.max) during the whole run.
// The end of a goroutine that is locked to its thread ends the thread, too. GOMAXPROCS 1 keeps Go from making new ones.
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
