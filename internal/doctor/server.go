package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/beside"
	"github.com/sbxrun/sbxrun/internal/pressure"
	"github.com/sbxrun/sbxrun/internal/state"
)

// What a server with the default configuration needs: 4,096 connections, 64 calls and 32 warm
// rooms at once, with a few tasks and descriptors each; and some for what else there is.
const (
	serverTasks       = 512
	serverDescriptors = 8192
)

// server checks what `sbxrun serve` and `sbxrun mcp` need beside what a run needs. A run needs
// nothing of it, so each is a warning.
func (e *exam) server() {
	for _, c := range []struct {
		name  string
		check func() (string, error)
	}{
		{"server program", checkServerProgram},
		{"server directory", func() (string, error) { return checkServerDir(state.ServerDir()) }},
		{"server tasks", checkServerTasks},
		{"server descriptors", checkServerDescriptors},
	} {
		e.check(c.name, func() (string, error) {
			detail, err := c.check()
			if err != nil {
				err = warning{error: err}
			}
			return detail, err
		})
	}
}

// checkServerProgram: the server is the program beside this one, and no other.
func checkServerProgram() (string, error) {
	program, err := beside.Server()
	if err != nil {
		return "", failed(stepServer, "", err)
	}
	err = unix.Faccessat(unix.AT_FDCWD, program, unix.X_OK, unix.AT_EACCESS)
	return program, failed(stepServer, program+": ", err)
}

// checkServerDir checks without making anything: the directory is this user's own and closed to
// others, or can be made.
func checkServerDir(dir string) (string, error) {
	var st unix.Stat_t
	switch err := unix.Lstat(dir, &st); {
	case err == nil && (st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0):
		return "", failed(stepServerDir, dir, errors.New(" is no directory of this user's own with mode 0700"))
	case err == nil:
		return dir, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", failed(stepServerDir, dir+": ", err)
	}
	above := filepath.Dir(dir)
	for ; unix.Access(above, unix.F_OK) == unix.ENOENT; above = filepath.Dir(above) {
	}
	err := unix.Faccessat(unix.AT_FDCWD, above, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
	return dir + ", which can be created", failed(stepServerDir, dir+" cannot be created: "+above+": ", err)
}

func checkServerTasks() (string, error) {
	r, err := pressure.Look()
	if err != nil {
		return "", failed(stepServerTasks, "", err)
	}
	words := func(b pressure.Bound) string {
		return fmt.Sprintf("%d of %d tasks in use, by %s", b.Current, b.Max, b.Path)
	}
	if b, lacks := r.Lacking(serverTasks); lacks {
		return "", failure{step: stepServerTasks, text: words(b) + fmt.Sprintf(": a server needs about %d", serverTasks)}
	}
	return words(r.Tightest()), nil
}

// checkServerDescriptors looks at the hard limit, to which Go raises the soft one (package os).
func checkServerDescriptors() (string, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return "", failed(stepServerFiles, "getrlimit: ", err)
	}
	if limit.Max < serverDescriptors {
		return "", failure{step: stepServerFiles, text: fmt.Sprintf("at most %d open files (ulimit -Hn): a server needs about %d", limit.Max, serverDescriptors)}
	}
	return fmt.Sprintf("at most %d open files", limit.Max), nil
}
