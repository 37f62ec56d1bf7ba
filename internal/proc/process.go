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

// ErrGone reports that the process has ended.
var ErrGone = errors.New("no such process")

// Process is a process held by a pidfd. PID is for reading /proc and for messages; signals and waits use only the pidfd.
type Process struct {
	PID    int
	file   *os.File // pidfd
	polled bool     // registered with Go's poller, as waiting requires
}

// Adopt returns a Process for a child and its pidfd from clone(2), which it takes over. The pidfd is not registered with
// Go's poller: that takes five system calls and causes a wakeup at the process's end, and for most processes the keeper
// reports the end.
func Adopt(pid, fd int) *Process {
	return &Process{PID: pid, file: os.NewFile(uintptr(fd), "pidfd")}
}

// polled is Adopt for a process that this process will wait for.
func polled(pid, fd int) Process {
	// os.NewFile registers only non-blocking files with the poller, and waiting with the poller needs no thread
	// (PIDFD_NONBLOCK does the same at open since Linux 5.10).
	_ = unix.SetNonblock(fd, true)
	return Process{PID: pid, file: os.NewFile(uintptr(fd), "pidfd"), polled: true}
}

// Open opens a process by its PID (pidfd_open(2), Linux 5.3). The caller must then verify that it is the intended process,
// and finally call [Process.Exited]: only if it is still alive have all checks seen the same process. The caller closes the
// Process.
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

// Dup returns the same process with its own descriptor, for waiting with its own deadline. The caller closes it.
func (p *Process) Dup() (*Process, error) {
	fd, err := Duplicate(p.file)
	if err != nil {
		return nil, fmt.Errorf("duplicate a pidfd of %d: %w", p.PID, err)
	}
	return new(polled(p.PID, fd)), nil
}

// FromPidfd returns the process of a pidfd. The pidfd stays the caller's; the Process has a duplicate. It fails with
// [ErrGone] if the process has ended and was reaped.
func FromPidfd(pidfd *os.File) (*Process, error) {
	if pidfd == nil {
		return nil, os.ErrInvalid
	}
	fd, err := Duplicate(pidfd)
	if err != nil {
		return nil, fmt.Errorf("duplicate a pidfd: %w", err)
	}
	p := Adopt(0, fd)
	// proc_pid_fdinfo(5): only pidfds have "Pid:", which is -1 after the process was reaped.
	info, err := ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err == nil {
		p.PID, err = strconv.Atoi(field(info, "Pid"))
	}
	switch {
	case err != nil:
		err = fmt.Errorf("not a pidfd: %w", err)
	case p.PID < 0:
		err = ErrGone
	case p.PID == 0:
		err = errors.New("process of another PID namespace")
	default:
		return p, nil
	}
	p.Close()
	return nil, err
}

// Duplicate returns a duplicate of a file's descriptor, or [os.ErrClosed] if the file is closed. The file cannot be closed
// while Control runs; otherwise its number could be reused for another process's pidfd.
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

// Close closes the pidfd. The process continues. As with a file, Close on nil only returns an error.
func (p *Process) Close() error {
	if p == nil {
		return os.ErrInvalid
	}
	return p.file.Close()
}

// FD returns the pidfd, which stays p's and is valid until Close.
func (p *Process) FD() int { return Descriptor(p.file) }

// Descriptor returns f's descriptor number, or -1 if f is closed. Unlike [os.File.Fd] it does not make the file blocking.
func Descriptor(f *os.File) int {
	number := -1
	if conn, err := f.SyscallConn(); err == nil {
		// It fails only if f is closed.
		_ = conn.Control(func(fd uintptr) { number = int(fd) })
	}
	return number
}

// Signal sends sig (pidfd_send_signal(2), Linux 5.1). It returns [ErrGone] if the process was reaped. A signal to a zombie
// has no effect.
func (p *Process) Signal(sig syscall.Signal) error {
	err := unix.PidfdSendSignal(p.FD(), sig, nil, 0)
	if err == unix.ESRCH {
		return ErrGone
	}
	return err
}

// Exited reports, without blocking, whether the process has ended. If it is the init of a PID namespace, then every other
// process of the namespace is dead and reaped, too (pid_namespaces(7)).
func (p *Process) Exited() bool { return readable(p.FD()) }

// Wait waits for the end of the process. It fails with [os.ErrDeadlineExceeded] at the deadline; the zero time is no
// deadline.
func (p *Process) Wait(deadline time.Time) error {
	return p.WaitContext(context.Background(), deadline)
}

// WaitContext is like Wait, but also fails with [os.ErrDeadlineExceeded] when ctx is done. A keeper, or a Process
// made by [Process.Dup], supports one Wait or WaitContext at a time, because the deadline belongs to the pidfd.
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

// look is WaitContext by polling, used when descriptors or epoll watches (epoll(7), fs.epoll.max_user_watches) run out.
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

// ReadUntil limits the reads of f by the deadline and by ctx until stop is called. After stop it no longer touches f.
func ReadUntil(ctx context.Context, f *os.File, deadline time.Time) (stop func()) {
	// Reads of files that do not support deadlines do not block.
	_ = f.SetReadDeadline(deadline)
	done := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		_ = f.SetReadDeadline(time.Unix(1, 0))
		close(done)
	})
	return func() {
		if !cancel() {
			<-done // otherwise the cancellation could cut the next read short
		}
	}
}

func readable(fd int) bool { return Poll(fd, unix.POLLIN)&(unix.POLLIN|unix.POLLNVAL) != 0 }

// Poll returns the current events of a descriptor, including errors (poll(2)), without blocking.
func Poll(fd int, events int16) int16 { return Await(fd, events, 0) }

// Await is like Poll, but blocks its thread until there is an event, for at most the given time.
func Await(fd int, events int16, within time.Duration) int16 {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for end := time.Now().Add(within); ; {
		// Go preempts threads with signals, which interrupt even a non-blocking call.
		if _, err := unix.Poll(fds, int(max(0, time.Until(end)).Milliseconds())); err != unix.EINTR {
			return fds[0].Revents
		}
	}
}

// WaitHangup waits until all read ends of the pipe w are closed, at most until the deadline.
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

// File returns a duplicate of the pidfd, which the caller closes.
func (p *Process) File() (*os.File, error) {
	d, err := p.Dup()
	if err != nil {
		return nil, err
	}
	return d.file, nil
}
