package harness

import "sync"

// Meanwhile calls do repeatedly in the background until stop is called. stop waits for the last call to return.
func Meanwhile(do func()) (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-over:
				return
			default:
				do()
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(over)
		<-ended
	})
}
