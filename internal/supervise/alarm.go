package supervise

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// alarm returns a channel that is closed after d. Go's own timers are late by up to a
// millisecond when nothing else happens: the runtime waits for them with epoll_wait(2), in
// whole ones. A timerfd (timerfd_create(2)) is on time. stop gives it up.
//
// It costs eight system calls, so a late alarm is a timer of Go's at first.
func alarm(d time.Duration) (rung <-chan struct{}, stop func()) {
	ring := make(chan struct{})
	if d <= 2*near {
		return ring, ringAfter(d, ring)
	}
	at := time.Now().Add(d)
	var lock sync.Mutex
	stopped, stopLast := false, func() {}
	t := time.AfterFunc(d-near, func() {
		lock.Lock()
		defer lock.Unlock()
		if !stopped {
			stopLast = ringAfter(time.Until(at), ring)
		}
	})
	return ring, func() {
		t.Stop()
		lock.Lock()
		defer lock.Unlock()
		stopped = true
		stopLast()
	}
}

// near is how long before its time an alarm has a timerfd.
const near = 20 * time.Millisecond

// ringAfter closes ring after d, on time, unless it is stopped.
func ringAfter(d time.Duration, ring chan<- struct{}) (stop func()) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(d)))}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err == nil {
		err = unix.TimerfdSettime(fd, 0, &spec, nil)
	}
	if err != nil {
		t := time.AfterFunc(d, func() { close(ring) }) // there is no descriptor left
		return func() { t.Stop() }
	}
	timer, at := os.NewFile(uintptr(fd), "timer"), time.Now().Add(d)
	go func() {
		var times [8]byte
		_, err := timer.Read(times[:])
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // epoll took no descriptor more (epoll_ctl(2), ENOSPC)
			time.Sleep(time.Until(at))
		}
		close(ring)
	}()
	return func() { _ = timer.Close() }
}
