package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// enoughDescriptors returns an error if the Go runtime could not open the descriptors of its poller. It would end the
// process with a trace and exit code 2. All later failures to open files are ordinary errors.
func enoughDescriptors() error {
	// epoll, its eventfd, and files that may be open before the first is polled.
	const few = 12
	var fds [few]int
	n := 0
	var err error
	for ; n < few && err == nil; n++ {
		fds[n], err = unix.Eventfd(0, unix.EFD_CLOEXEC)
	}
	if err != nil {
		n--
	} else if err := watch(fds[0]); err == unix.ENOSPC {
		return &result.Error{Code: "setup", Message: "this user's processes watch too many files (epoll(7))", Hint: "end one of them, or raise the limit (sysctl fs.epoll.max_user_watches)", Err: err}
	}
	for _, fd := range fds[:n] {
		_ = unix.Close(fd)
	}
	message := "too few files can be opened"
	switch err {
	case unix.EMFILE:
		var l unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
			message += fmt.Sprintf(" (the limit is %d)", l.Cur)
		}
	case unix.ENFILE:
	default:
		return nil // the operation that fails returns a better error
	}
	return &result.Error{Code: "setup", Message: message, Hint: proc.DescriptorsHint(err), Err: err}
}

// watch adds a file to a temporary epoll instance.
func watch(fd int) error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(epoll)
	return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{})
}
