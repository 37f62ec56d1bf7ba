package limits

import (
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// freezers say how a cgroup is frozen, and how it tells that it is: v2 from Linux 5.2 on
// (Documentation/admin-guide/cgroup-v2.rst), and the freezer of v1.
var freezers = []struct{ file, frozen, tells, word string }{
	{"cgroup.freeze", "1", "cgroup.events", "frozen 1"},
	{"freezer.state", "FROZEN", "freezer.state", "FROZEN"},
}

// Freeze stops all that is in these cgroups of a sandbox, and returns when it stands still. none
// of them may be of a kind that can be frozen: then it returns false and has done nothing. What
// does not stand still in time is thawed, and an error. SIGKILL ends what is frozen in v2 alone.
func Freeze(dirs []string, within time.Duration) (bool, error) {
	for _, dir := range dirs {
		for _, f := range freezers {
			err := os.WriteFile(dir+"/"+f.file, []byte(f.frozen), 0)
			if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
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
