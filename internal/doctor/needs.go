package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/state"
)

// refusedFrom is the share of a task limit above which runs are refused: the default of --alert.
const refusedFrom = 0.8

func inUse(b admission.Bound) string {
	return fmt.Sprintf("%d of %d tasks in use, by %s", b.Current, b.Max, b.Path)
}

// checkTasks checks that a run would be admitted. The other checks do not request admission.
func checkTasks() (string, error) {
	r, err := admission.Look()
	if err != nil {
		return "", err
	}
	return roomForRun(r)
}

func roomForRun(r admission.Reading) (string, error) {
	if b, lacks := r.Lacking(admission.Needs); lacks {
		return "", failure{step: stepTasks, text: inUse(b) + fmt.Sprintf(": a run needs about %d", admission.Needs)}
	}
	tightest := r.Tightest()
	if tightest.Ratio() >= refusedFrom {
		return "", failure{step: stepTasks, text: inUse(tightest) + fmt.Sprintf(": runs are refused from %.0f %%", 100*refusedFrom)}
	}
	return inUse(tightest), nil
}

// fullCgroup returns the limit of a cgroup that has too few tasks left for a run, "" for none.
func fullCgroup() string {
	r, err := admission.Look()
	if err != nil {
		return ""
	}
	if b, lacks := r.Lacking(admission.Needs); lacks && strings.HasSuffix(b.Path, "/pids.max") {
		return inUse(b)
	}
	return ""
}

// checkStateDir checks the state directory, which records the sandboxes of `sbxrun start` and the slots of
// --max-parallel. A plain run does not need it.
func checkStateDir() (string, error) {
	dir, err := state.Mine().Path()
	if err != nil {
		return "", err
	}
	return checkDir(stepStateDir, dir)
}

// checkDir checks that the directory belongs to this user and is closed to others, or could be created. It creates
// nothing.
func checkDir(s step, dir string) (string, error) {
	var st unix.Stat_t
	switch err := unix.Lstat(dir, &st); {
	case err == nil && (st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid()):
		return "", failed(s, dir+": ", errors.New("not a directory of this user's own with mode 0700"))
	case err == nil && st.Mode&0o077 != 0:
		return "", failure{step: s, text: fmt.Sprintf("%s: must have mode 0700, not %04o", dir, st.Mode&0o7777), open: dir}
	case err == nil:
		return dir, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", failed(s, dir+": ", err)
	}
	above := filepath.Dir(dir)
	for ; unix.Access(above, unix.F_OK) == unix.ENOENT; above = filepath.Dir(above) {
	}
	err := unix.Faccessat(unix.AT_FDCWD, above, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
	return dir + ", which can be created", failed(s, dir+" cannot be created: "+above+": ", err)
}
