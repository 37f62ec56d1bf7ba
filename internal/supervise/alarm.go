package supervise

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm returns a channel that is closed after d. Go's timers are up to a millisecond late in an idle process
// because the runtime waits for them with epoll_wait(2), whose unit is a millisecond. A timerfd
// (timerfd_create(2)) is precise, but costs eight system calls, so alarm uses a Go timer until shortly before
// the end. stop releases the alarm.
func alarm(d time.Duration) (rung <-chan struct{}, stop func()) {
	ring := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	if d <= 2*near {
		ringAfter(ctx, d, ring)
		return ring, cancel
	}
	at := time.Now().Add(d)
	t := time.AfterFunc(d-near, func() { ringAfter(ctx, time.Until(at), ring) })
	return ring, func() {
		t.Stop()
		cancel()
	}
}

// near is the time before the end at which an alarm switches to a timerfd.
const near = 20 * time.Millisecond

// ringAfter closes ring after precisely d, unless ctx is done first.
func ringAfter(ctx context.Context, d time.Duration, ring chan<- struct{}) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(d)))}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err == nil {
		err = unix.TimerfdSettime(fd, 0, &spec, nil)
	}
	if err != nil {
		t := time.AfterFunc(d, func() { close(ring) }) // out of descriptors
		context.AfterFunc(ctx, func() { t.Stop() })
		return
	}
	timer, at := os.NewFile(uintptr(fd), "timer"), time.Now().Add(d)
	context.AfterFunc(ctx, func() { _ = timer.Close() })
	go func() {
		var times [8]byte
		_, err := timer.Read(times[:])
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // epoll did not accept the descriptor (epoll_ctl(2), ENOSPC)
			time.Sleep(time.Until(at))
		}
		close(ring)
	}()
}
