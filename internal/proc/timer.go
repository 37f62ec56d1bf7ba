package proc

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// NewTimer makes a timerfd (timerfd_create(2)) that is not set, for [Kept.Timer]. It is a blocking
// one, which Go's poller does not take: nobody here waits for it.
func NewTimer() (*os.File, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), "timer"), nil
}

// setTimer has a timerfd run out at a time, in place of the one before. One that is closed
// meanwhile is left alone: its number could be that of the next command's.
func setTimer(timer *os.File, at time.Time) {
	conn, err := timer.SyscallConn()
	if err != nil {
		return
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(time.Until(at))))}
	_ = conn.Control(func(fd uintptr) { _ = unix.TimerfdSettime(int(fd), 0, &spec, nil) })
}
