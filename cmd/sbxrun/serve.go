package main

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
)

// serverCommand becomes the server, which is a program of its own so that a run loads nothing
// of it. It is the one beside this program: another could be anybody's.
func serverCommand(args []string, flags any) int {
	if _, err := cli.Parse(flags, args[1:]); err != nil {
		return failUsage(flags, err)
	}
	server, err := serverProgram()
	if err != nil {
		return fail(err)
	}
	return fail(noServer(server, unix.Exec(server, append([]string{server}, args...), os.Environ())))
}

// serverProgram is where the server should be.
func serverProgram() (string, error) {
	self, err := os.Readlink("/proc/self/exe")
	return filepath.Join(filepath.Dir(self), "sbxrund"), err
}

// noServer words why it cannot be executed.
func noServer(server string, err error) error {
	e := &result.Error{Code: "setup", Message: "cannot execute the server " + server + ": " + err.Error(), Err: err}
	setup := filepath.Join(filepath.Dir(filepath.Dir(server)), "setup.sh")
	if _, missing := os.Stat(setup); errors.Is(err, unix.ENOENT) && missing == nil {
		e.Hint = "build it: " + setup + " build"
	} else if errors.Is(err, unix.ENOENT) {
		e.Hint = "install sbxrund beside sbxrun: packages and archives contain both; go install builds it from cmd/sbxrund"
	}
	return e
}
