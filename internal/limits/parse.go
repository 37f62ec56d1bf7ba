package limits

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is a cgroup hierarchy that is mounted.
type mount struct {
	root, point string
	v2          bool
	controllers []string // of v1
}

// parseMounts takes the cgroups from /proc/self/mountinfo (proc_pid_mountinfo(5)).
func parseMounts(data []byte) (mounts []mount) {
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, " - cgroup") {
			continue // quickly: there may be hundreds
		}
		front, back, ok := strings.Cut(line, " - ")
		f, b := strings.Fields(front), strings.Fields(back)
		if !ok || len(f) < 6 || len(b) < 3 {
			continue
		}
		mt := mount{root: unescape(f[3]), point: strings.TrimSuffix(unescape(f[4]), "/"), v2: b[0] == "cgroup2"}
		if mt.root == "" || mt.root[0] != '/' || !strings.HasPrefix(mt.point, "/") {
			continue
		}
		if b[0] == "cgroup" {
			for _, word := range strings.Split(b[2], ",") {
				if slices.Contains([]string{"memory", "pids", "cpu", "cpuacct", "freezer"}, word) {
					mt.controllers = append(mt.controllers, word)
				}
			}
		}
		if mt.v2 || len(mt.controllers) > 0 {
			mounts = append(mounts, mt)
		}
	}
	return mounts
}

// unescape: blanks, tabs, newlines and backslashes are written in octal.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// parseMembership takes the paths by controller, "" for v2, from
// /proc/PID/cgroup (cgroups(7)).
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

// row is the number that stands after key, as in memory.events; of a file of one
// number the key is "".
func row(data []byte, key string) (n int64, ok bool) {
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
