package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

func environmentFile(set *values.Environment, name string) error {
	text, err := readEnvironmentFile(name)
	var vars []values.Var
	if err == nil {
		vars, err = values.ParseVars(text, name)
	}
	if err != nil {
		e := &result.Error{Code: "usage", Message: fmt.Sprintf("--env-file: %v", err), Err: err,
			Hint: "give a file with a line for each variable, such as LANG=C; or one variable as --env LANG=C"}
		if errors.As(err, new(*safeopen.Error)) {
			e.Hint = safeopen.Hint
		}
		return e
	}
	for _, v := range vars {
		set.Put(v)
	}
	return nil
}

// readEnvironmentFile reads a regular file, or an open descriptor such as a shell's <(command). It refuses a named
// pipe or a device before opening it, because a sandboxed command could have created it to block sbxrun. It returns
// one byte more than the limit of a file that is too large, which [values.ParseVars] rejects.
func readEnvironmentFile(name string) ([]byte, error) {
	if number := descriptor(name); number != "" {
		return readDescriptor(name, number)
	}
	fd, err := safeopen.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // O_PATH
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat %q: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%q is not a regular file", name)
	}
	in, err := safeopen.Reopen(fd, unix.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", name, err)
	}
	file := os.NewFile(uintptr(in), name)
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, values.MaxVarsSize+1))
}

// readDescriptor reads an open descriptor of a regular file or a pipe to its end. A pipe must end within pipeBound
// and before a signal arrives.
func readDescriptor(name, number string) ([]byte, error) {
	const pipeBound = 30 * time.Second
	if caller != nil {
		return nil, fmt.Errorf("%q: the caller's descriptors are not passed on to the background; name a file", name)
	}
	n, err := strconv.ParseUint(number, 10, 31)
	if err != nil {
		return nil, fmt.Errorf("%q is not a descriptor", name)
	}
	// Copy it, because an *os.File closes its descriptor, and this one belongs to the caller.
	fd, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("%q: no such descriptor is open", name)
	}
	file := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG && st.Mode&unix.S_IFMT != unix.S_IFIFO {
		file.Close()
		return nil, fmt.Errorf("%q is neither a regular file nor a pipe", name)
	}
	var text []byte
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer file.Close()
		text, err = io.ReadAll(io.LimitReader(file, values.MaxVarsSize+1))
	}()
	select {
	case <-read:
		return text, err
	case <-signaled:
		return nil, fmt.Errorf("%q: interrupted by a signal", name)
	case <-time.After(pipeBound):
		return nil, fmt.Errorf("%q: not closed within %v", name, pipeBound)
	}
}
