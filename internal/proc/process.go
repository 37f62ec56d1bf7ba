package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone says that the process has ended.
var ErrGone = errors.New("no such process")

// Process is one process, held by a pidfd. PID is for looking at /proc and for
// people; only the pidfd is ever signalled or waited for.
type Process struct {
	PID    int
	file   *os.File // pidfd
	polled bool     // by Go's poller, which waiting needs
}

// Adopt makes a Process of a child and the pidfd that clone(2) gave of it. The
// Process owns the pidfd. Most are never waited for by it: the keeper says that they have ended. So it
// is kept out of Go's poller: to register it takes five system calls, and its end would wake us.
func Adopt(pid, fd int) *Process {
	return &Process{PID: pid, file: os.NewFile(uintptr(fd), "pidfd")}
}

// polled is Adopt for a process that is waited for.
func polled(pid, fd int) Process {
	// Non-blocking is what makes os.NewFile use the poller, so that waiting
	// costs no thread (PIDFD_NONBLOCK, Linux 5.10, does the same at open).
	_ = unix.SetNonblock(fd, true)
	return Process{PID: pid, file: os.NewFile(uintptr(fd), "pidfd"), polled: true}
}

// Open takes hold of a process by its pid (pidfd_open(2), Linux 5.3). What the
// pid meant to the caller must be verified afterwards, and then [Process.Exited]
// asked once more: only if it still runs was it the same process all the time.
// The caller owns the Process and closes it.
func Open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return nil, ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	return Adopt(pid, fd), nil
}

// Dup is the same process by a descriptor of its own, for waiting, with a deadline of its own.
// The caller owns it and closes it.
func (p *Process) Dup() (*Process, error) {
	fd, err := Duplicate(p.file)
	if err != nil {
		return nil, fmt.Errorf("duplicate a pidfd of %d: %w", p.PID, err)
	}
	return new(polled(p.PID, fd)), nil
}

// FromPidfd is the process of a pidfd, which stays the caller's: the Process has a
// duplicate. [ErrGone] says that it has ended and was reaped.
func FromPidfd(pidfd *os.File) (*Process, error) {
	if pidfd == nil {
		return nil, os.ErrInvalid
	}
	fd, err := Duplicate(pidfd)
	if err != nil {
		return nil, fmt.Errorf("duplicate a pidfd: %w", err)
	}
	p := Adopt(0, fd)
	// proc_pid_fdinfo(5): "Pid:" is there for pidfds alone, and -1 once it was reaped.
	info, err := ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err == nil {
		p.PID, err = strconv.Atoi(field(info, "Pid"))
	}
	switch {
	case err != nil:
		err = fmt.Errorf("it is no pidfd: %w", err)
	case p.PID < 0:
		err = ErrGone
	case p.PID == 0:
		err = errors.New("a process of another PID namespace")
	default:
		return p, nil
	}
	p.Close()
	return nil, err
}

// Duplicate returns a second descriptor of an open file; of a closed one [os.ErrClosed].
// While Control runs the file is not closed: in between its number could become that of
// another process's pidfd.
func Duplicate(f *os.File) (fd int, err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	closed := conn.Control(func(number uintptr) { fd, err = unix.FcntlInt(number, unix.F_DUPFD_CLOEXEC, 0) })
	if closed != nil {
		return -1, os.ErrClosed
	}
	return fd, err
}

// Close gives up the pidfd, not the process. As of a file, nil is an error, and no more.
func (p *Process) Close() error {
	if p == nil {
		return os.ErrInvalid
	}
	return p.file.Close()
}

// FD is the pidfd, still owned by p and valid until its Close.
func (p *Process) FD() int { return Descriptor(p.file) }

// Descriptor is f's descriptor number, -1 if f is closed. Unlike [os.File.Fd]
// it leaves the file in the mode it is in: Fd makes it a blocking one.
func Descriptor(f *os.File) int {
	number := -1
	if conn, err := f.SyscallConn(); err == nil {
		// An error means closed, and leaves -1.
		_ = conn.Control(func(fd uintptr) { number = int(fd) })
	}
	return number
}

// Signal sends sig (pidfd_send_signal(2), Linux 5.1). A process that was reaped is
// [ErrGone]; one that has ended and waits for that takes it without effect.
func (p *Process) Signal(sig syscall.Signal) error {
	err := unix.PidfdSendSignal(p.FD(), sig, nil, 0)
	if err == unix.ESRCH {
		return ErrGone
	}
	return err
}

// Exited reports, without blocking, whether the process has ended. Of a PID
// namespace's init it means more: every other process of the namespace is dead
// and reaped (pid_namespaces(7)).
func (p *Process) Exited() bool { return readable(p.FD()) }

// Wait blocks until the process has ended, or the deadline has passed
// ([os.ErrDeadlineExceeded]); the zero time is no deadline.
func (p *Process) Wait(deadline time.Time) error {
	return p.WaitContext(context.Background(), deadline)
}

// WaitContext is Wait, and also returns ([os.ErrDeadlineExceeded]) when ctx is
// done. Of a keeper, or a Process that [Process.Dup] has made, one Wait or WaitContext at a time: the deadline is
// the pidfd's.
func (p *Process) WaitContext(ctx context.Context, deadline time.Time) error {
	if !p.polled {
		if p.Exited() {
			return nil
		}
		d, err := p.Dup()
		switch {
		case errors.Is(err, os.ErrClosed):
			return err
		case err != nil:
			return p.look(ctx, deadline)
		}
		defer d.Close()
		p = d
	}
	if p.file.SetReadDeadline(deadline) != nil {
		return p.look(ctx, deadline)
	}
	defer ReadUntil(ctx, p.file, deadline)()
	conn, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool { return readable(int(fd)) })
}

// look is WaitContext where there is no descriptor left to wait by, or where this user waits for as
// many as it may (epoll(7), fs.epoll.max_user_watches).
func (p *Process) look(ctx context.Context, deadline time.Time) error {
	for !p.Exited() {
		switch {
		case p.FD() < 0:
			return os.ErrClosed
		case ctx.Err() != nil, !deadline.IsZero() && time.Now().After(deadline):
			return os.ErrDeadlineExceeded
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// ReadUntil bounds the reads of f until stop is called: by the deadline, and by
// ctx. After stop nothing more is done to f.
func ReadUntil(ctx context.Context, f *os.File, deadline time.Time) (stop func()) {
	// Files that take no deadline are not waited for, they are ready.
	_ = f.SetReadDeadline(deadline)
	done := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		_ = f.SetReadDeadline(time.Unix(1, 0))
		close(done)
	})
	return func() {
		if !cancel() {
			<-done // or it would cut the next read short
		}
	}
}

func readable(fd int) bool { return Poll(fd, unix.POLLIN)&(unix.POLLIN|unix.POLLNVAL) != 0 }

// Poll returns which of these events, and errors, a descriptor has (poll(2)), without blocking.
func Poll(fd int, events int16) int16 { return Await(fd, events, 0) }

// Await is Poll that waits for one of them, with its thread, at most so long.
func Await(fd int, events int16, within time.Duration) int16 {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for end := time.Now().Add(within); ; {
		// Go stops its threads by signals, which interrupt also a call that does not wait.
		if _, err := unix.Poll(fds, int(max(0, time.Until(end)).Milliseconds())); err != unix.EINTR {
			return fds[0].Revents
		}
	}
}

// WaitHangup blocks until nobody can read any more what is written to the pipe
// w, or the deadline has passed.
func WaitHangup(w *os.File, deadline time.Time) error {
	if err := w.SetWriteDeadline(deadline); err != nil {
		return err
	}
	conn, err := w.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Write(func(fd uintptr) bool { return Poll(int(fd), 0)&unix.POLLERR != 0 })
}

// File is a pidfd of the process that the caller owns, for others than this package.
func (p *Process) File() (*os.File, error) {
	d, err := p.Dup()
	if err != nil {
		return nil, err
	}
	return d.file, nil
}
