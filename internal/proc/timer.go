package proc

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// NewTimer returns an unset timerfd (timerfd_create(2)) for [Kept.Timer]. It is in blocking mode, so it is not registered
// with Go's poller, because this process does not wait for it.
func NewTimer() (*os.File, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), "timer"), nil
}

// setTimer sets the time of a timerfd. It does nothing if the file is closed, because the number could belong to the next
// command's timer.
func setTimer(timer *os.File, at time.Time) {
	conn, err := timer.SyscallConn()
	if err != nil {
		return
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, int64(time.Until(at))))}
	_ = conn.Control(func(fd uintptr) { _ = unix.TimerfdSettime(int(fd), 0, &spec, nil) })
}
