package harness

import "sync"

// Meanwhile repeats do in the background until stop, which returns when it has ended.
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
