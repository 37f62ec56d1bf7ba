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

// freezers say how a cgroup is frozen, and how it tells that it is: v2 from Linux 5.2 on
// (Documentation/admin-guide/cgroup-v2.rst), and the freezer of v1.
var freezers = []struct{ file, frozen, tells, word string }{
	{"cgroup.freeze", "1", "cgroup.events", "frozen 1"},
	{"freezer.state", "FROZEN", "freezer.state", "FROZEN"},
}

// LockFreezer is who may freeze these cgroups of a sandbox, and thaw them: one at a time, for as long
// as a descriptor of the file is open, so that one who was killed has left them as they are. nil: none
// can be frozen. [unix.EAGAIN]: somebody else had it all the while. Only who may write to the file can
// lock it (fcntl_locking(2), F_WRLCK), so no payload that merely sees it.
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

// cannot says that a cgroup is of no kind that can be frozen, or not by the caller.
func cannot(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// Frozen reports whether one of these cgroups is to stand still.
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

// Freeze stops all that is in these cgroups of a sandbox, and returns when it stands still. none
// of them may be of a kind that can be frozen: then it returns false and has done nothing. What
// does not stand still in time is thawed, and an error. SIGKILL ends what is frozen in v2 alone.
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
			return true, nil // one holds all: each process is in every cgroup of the sandbox
		}
	}
	return false, nil
}

// ThawDirs lets go what [Freeze] has stopped.
func ThawDirs(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, thaw(dir))
	}
	return result.All(errs...)
}

// awaitWord waits until a line of a file is so.
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
			return errors.New("the sandbox does not stand still in its cgroup")
		}
	}
}
