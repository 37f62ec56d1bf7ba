package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// enoughDescriptors returns an error if so few more files can be opened or watched that the
// Go runtime could not start its poller: it ends the process then, with a trace and exit
// code 2. With these few, all other failures are errors, and are worded.
func enoughDescriptors() error {
	// epoll and its eventfd, and what we may have open when the first file is polled.
	const few = 8
	var fds [few]int
	n := 0
	var err error
	for ; n < few && err == nil; n++ {
		fds[n], err = unix.Eventfd(0, unix.EFD_CLOEXEC)
	}
	if err != nil {
		n--
	} else if err := watch(fds[0]); err == unix.ENOSPC {
		return &result.Error{Code: "setup", Message: "processes of this user watch as many files as a user may (epoll(7))", Hint: "end the one that does, or raise the limit (sysctl fs.epoll.max_user_watches)", Err: err}
	}
	for _, fd := range fds[:n] {
		_ = unix.Close(fd) // nothing was written
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
		return nil // of another there will be a better description
	}
	return &result.Error{Code: "setup", Message: message, Hint: proc.DescriptorsHint(err), Err: err}
}

// watch has one file watched by epoll(7), for a moment.
func watch(fd int) error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(epoll)
	return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{})
}
