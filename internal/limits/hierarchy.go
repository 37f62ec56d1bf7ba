package limits

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Prefix starts the names of all cgroups made by sbxrun.
const Prefix = "sbxrun-"

// Mount is a mounted cgroup hierarchy.
type Mount struct {
	Root, Point string
	V2          bool
	Controllers []string // v1 only
}

// Mounts returns the cgroup mounts of the calling process. It reads them only once, for admission and
// limits. The caller may change the list. root is "", or the directory with a test's files.
func Mounts(root string) ([]Mount, error) {
	if root != "" {
		return readMounts(root)
	}
	ours.Do(func() { ours.mounts, ours.err = readMounts("") })
	return slices.Clone(ours.mounts), ours.err
}

var ours struct {
	sync.Once
	mounts []Mount
	err    error
}

func readMounts(root string) ([]Mount, error) {
	data, err := proc.ReadFile(root + "/proc/self/mountinfo")
	return parseMounts(data), err
}

// parseMounts parses /proc/self/mountinfo (proc_pid_mountinfo(5)).
func parseMounts(data []byte) (mounts []Mount) {
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, " - cgroup") {
			continue // fast path: there may be hundreds
		}
		front, back, ok := strings.Cut(line, " - ")
		f, b := strings.Fields(front), strings.Fields(back)
		if !ok || len(f) < 6 || len(b) < 3 {
			continue
		}
		mt := Mount{Root: unescape(f[3]), Point: strings.TrimSuffix(unescape(f[4]), "/"), V2: b[0] == "cgroup2"}
		if mt.Root == "" || mt.Root[0] != '/' || !strings.HasPrefix(mt.Point, "/") {
			continue
		}
		if b[0] == "cgroup" {
			for _, word := range strings.Split(b[2], ",") {
				if slices.Contains([]string{"memory", "pids", "cpu", "cpuacct", "freezer"}, word) {
					mt.Controllers = append(mt.Controllers, word)
				}
			}
		}
		if mt.V2 || len(mt.Controllers) > 0 {
			mounts = append(mounts, mt)
		}
	}
	return mounts
}

// unescape decodes blanks, tabs, newlines and backslashes, which are in octal.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// Membership returns the cgroups of a process (0 means the caller): paths by controller, "" for v2. root
// is as for [Mounts].
func Membership(root string, pid int) (map[string]string, error) {
	who := "self"
	if pid != 0 {
		who = strconv.Itoa(pid)
	}
	data, err := proc.ReadFile(root + "/proc/" + who + "/cgroup")
	return parseMembership(data), err
}

// parseMembership parses /proc/PID/cgroup (cgroups(7)).
func parseMembership(data []byte) map[string]string {
	paths := map[string]string{}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) < 3 || !strings.HasPrefix(f[2], "/") {
			continue
		}
		if f[0] != "0" && f[1] == "" {
			continue // a hierarchy without controllers or name
		}
		for _, c := range strings.Split(f[1], ",") {
			if _, known := paths[c]; !known {
				paths[c] = f[2]
			}
		}
	}
	return paths
}

// Own returns the directory of a cgroup below the mount.
func (mt Mount) Own(path string) (dir string, ok bool) {
	below, ok := strings.CutPrefix(path, strings.TrimSuffix(mt.Root, "/"))
	if path == "" || !ok || below != "" && below[0] != '/' || strings.HasPrefix(below, "/..") || strings.HasSuffix(below, " (deleted)") {
		return "", false
	}
	return strings.TrimSuffix(mt.Point+below, "/"), true
}

// Row returns the number after key, as in memory.events; for a file with a single number the key is
// "".
func Row(data []byte, key string) (n int64, ok bool) {
	for line := range bytes.Lines(data) {
		f := strings.Fields(string(line))
		if key == "" {
			f = append([]string{""}, f...)
		}
		if len(f) != 2 || f[0] != key {
			continue
		}
		n, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil || n < 0 {
			return 0, false
		}
		return n, true
	}
	return 0, false
}

func write(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		if _, err = unix.Write(fd, []byte(value)); err != unix.EINTR {
			return err
		}
	}
}
