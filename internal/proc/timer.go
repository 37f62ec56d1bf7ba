package proc

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Timer is a timerfd (timerfd_create(2)), for whoever has its descriptor too.
type Timer struct{ fd int }

// NewTimer makes one that is not set.
func NewTimer() (*Timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	return &Timer{fd}, nil
}

// FD is the descriptor, valid until Close.
func (t *Timer) FD() int { return t.fd }

// Set has it run out at a time, in place of the one before.
func (t *Timer) Set(at time.Time) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(time.Until(at))))}
	_ = unix.TimerfdSettime(t.fd, 0, &spec, nil) // it cannot fail
}

// Close gives the descriptor up. It may be called more than once.
func (t *Timer) Close() {
	if t.fd >= 0 {
		unix.Close(t.fd)
		t.fd = -1
	}
}
