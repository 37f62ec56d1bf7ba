package limits

import (
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// freezers are the files that freeze a cgroup and show that it is frozen: v2 since Linux 5.2
// (Documentation/admin-guide/cgroup-v2.rst), and the freezer of v1.
var freezers = []struct{ file, frozen, tells, word string }{
	{"cgroup.freeze", "1", "cgroup.events", "frozen 1"},
	{"freezer.state", "FROZEN", "freezer.state", "FROZEN"},
}

// LockFreezer gives the caller the exclusive right to freeze and thaw a sandbox's cgroups while the file
// is open. A locked file shows that its process is alive. LockFreezer returns nil if none of the cgroups
// can be frozen, and [unix.EAGAIN] if another process keeps the lock. Locking needs write permission
// (fcntl_locking(2), F_WRLCK), so a command that merely sees the file cannot do it.
func LockFreezer(dirs []string, patience time.Duration) (*os.File, error) {
	for _, dir := range dirs {
		for _, f := range freezers {
			file, err := os.OpenFile(dir+"/"+f.file, os.O_WRONLY, 0)
			if cannot(err) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if err := proc.Lock(proc.Descriptor(file), unix.F_WRLCK, patience); err != nil {
				file.Close()
				return nil, err
			}
			return file, nil
		}
	}
	return nil, nil
}

// cannot reports whether an error means that this kind of cgroup cannot be frozen, or not by the caller.
func cannot(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// Frozen reports whether one of these cgroups is frozen or being frozen.
func Frozen(dirs []string) bool {
	for _, dir := range dirs {
		for _, f := range freezers {
			text, err := os.ReadFile(dir + "/" + f.file)
			if word := strings.TrimSpace(string(text)); err == nil && word != "0" && word != "THAWED" {
				return true
			}
		}
	}
	return false
}

// Freeze freezes a sandbox's cgroups and returns when all processes are frozen. It returns false and does
// nothing if none of them can be frozen. If it takes too long, it thaws them and returns an error.
// Only v2 lets SIGKILL end frozen processes.
func Freeze(dirs []string, within time.Duration) (bool, error) {
	for _, dir := range dirs {
		for _, f := range freezers {
			err := os.WriteFile(dir+"/"+f.file, []byte(f.frozen), 0)
			if cannot(err) {
				continue
			}
			if err == nil {
				err = awaitWord(dir+"/"+f.tells, f.word, within)
			}
			if err != nil {
				return false, result.All(err, ThawDirs([]string{dir}))
			}
			return true, nil // one is enough: each process is in every cgroup of the sandbox
		}
	}
	return false, nil
}

// ThawDirs thaws cgroups frozen by [Freeze].
func ThawDirs(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, thaw(dir))
	}
	return result.All(errs...)
}

// awaitWord waits until a file contains this line.
func awaitWord(name, word string, within time.Duration) error {
	const look = time.Millisecond
	for end := time.Now().Add(within); ; time.Sleep(look) {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			if strings.TrimSpace(line) == word {
				return nil
			}
		}
		if !time.Now().Before(end) {
			return errors.New("cannot freeze the sandbox's cgroup in time")
		}
	}
}
