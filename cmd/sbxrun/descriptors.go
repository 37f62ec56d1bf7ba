package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// enoughDescriptors returns an error if so few more files can be opened that the Go
// runtime could not start its poller: it ends the process then, with a trace and exit
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
	}
	for _, fd := range fds[:n] {
		_ = unix.Close(fd) // nothing was written
	}
	switch err {
	case unix.EMFILE:
		limit := ""
		var l unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
			limit = fmt.Sprintf(" (the limit is %d)", l.Cur)
		}
		return &result.Error{Code: "setup", Message: "too few files can be opened" + limit, Hint: "raise the limit of open files (ulimit -n)", Err: err}
	case unix.ENFILE:
		return &result.Error{Code: "setup", Message: "the machine has no more open files", Hint: "raise it (sysctl fs.file-max)", Err: err}
	}
	return nil // of another error there will be a better description
}
