package supervise

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm returns a channel that is closed after d. Go's own timers are late by up to a
// millisecond when nothing else happens: the runtime waits for them with epoll_wait(2), in
// whole ones. A timerfd (timerfd_create(2)) is on time. stop gives it up.
func alarm(d time.Duration) (rung <-chan struct{}, stop func()) {
	ring := make(chan struct{})
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(d)))}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err == nil {
		err = unix.TimerfdSettime(fd, 0, &spec, nil)
	}
	if err != nil {
		t := time.AfterFunc(d, func() { close(ring) }) // there is no descriptor left
		return ring, func() { t.Stop() }
	}
	timer := os.NewFile(uintptr(fd), "timer")
	go func() {
		var times [8]byte
		if _, err := timer.Read(times[:]); err == nil {
			close(ring)
		}
	}()
	return ring, func() { _ = timer.Close() }
}
