package tests

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// contents returns modes and contents of all files in a directory, except locks and directories
// that contain only a lock.
func contents(t *testing.T, top string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
		name, _ := filepath.Rel(top, path)
		if os.IsNotExist(err) {
			return nil
		}
		if base := filepath.Base(name); err != nil || base == "lock" || base == "execs" || name == "queue" || name == "admission" || strings.HasPrefix(name, "slot-") {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		found[name] = info.Mode().String()
		switch {
		case info.Mode().IsRegular():
			text, err := os.ReadFile(path)
			found[name] += " " + string(text)
			return err
		case info.Mode()&os.ModeSymlink != 0:
			target, err := os.Readlink(path)
			found[name] += " " + target
			return err
		}
		return nil
	})
	check.Must(t, err)
	return found
}

// planned returns values for the flags in TestPlanningHasNoEffects, and flags that they need. A bool needs none.
func planned(dir string) map[string][]string {
	return map[string][]string{
		"rootfs": {"/none"}, "image": {"none"}, "ro-bind": {"/etc/hostname:/mnt/h"}, "bind": {dir + ":/mnt/b"}, "ro-bind-try": {"/none"}, "bind-try": {"/none"}, "overlay": {dir + ":/mnt/o"}, "device": {"/dev/zero"},
		"upper": {dir + "/upper", "--overlay", dir + ":/mnt/o"}, "from": {"snap"}, "data-dir": {dir + "/data"}, "state-dir": {dir + "/state"}, "volume": {"other:/mnt/v"},
		"put": {"/etc/hostname:/tmp/h"}, "get": {"/tmp/*:" + dir}, "tmpfs": {"/mnt/t"}, "tmp-size": {"1M"}, "cwd": {"none"}, "cwd-root": {"."}, "protect": {"none"}, "get-max-size": {"1M", "--get", "x"}, "get-max-entries": {"1", "--get", "x"}, "workdir": {"/tmp"}, "net": {"allow=example.org"},
		"publish": {"0:80"}, "connect": {"unix:/none=80"}, "env": {"A=1"}, "env-file": {"/dev/null"}, "seccomp": {"off"}, "user": {"1000"}, "hostname": {"x"},
		"timeout": {"60"}, "idle-timeout": {"60"}, "signal": {"INT"}, "grace": {"1"}, "proof-timeout": {"60"}, "memory": {"64M", "--limits", "best-effort"},
		"memory-swap": {"64M", "--memory", "64M", "--limits", "best-effort"}, "pids": {"50", "--limits", "best-effort"}, "cpus": {"1", "--limits", "best-effort"}, "cpu-time": {"60", "--limits", "best-effort"},
		"fsize": {"1M"}, "nofile": {"100"}, "stack": {"1M"}, "nice": {"1"}, "oom-score-adj": {"100"}, "limits": {"best-effort"}, "report": {dir + "/report"},
		"max-output": {"1K", "--output-limit", "kill"}, "output-limit": {"kill"}, "on-pressure": {"refuse"}, "wait-timeout": {"1", "--on-pressure", "wait"}, "max-parallel": {"1"}, "warn": {"100"}, "alert": {"100"},
		"print-filter": {dir + "/filter"}, "name": {"a-name"}, "tag": {"a=b"}, "ready-tcp": {"80"}, "ready-exec": {"true"}, "ready-log": {"x"}, "ready-interval": {"1", "--ready-tcp", "80"}, "ready-timeout": {"1", "--ready-tcp", "80"},
	}
}

// A command that is only printed, or that fails to start, leaves no trace in the state and data
// directories, whatever its flags.
func TestPlanningHasNoEffects(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), harness.SharedDir(t)
	data := s.Dir + "-data"
	s.Sandbox(harness.Options{Dir: original(t)}, layer(t, "--name", "box", "--cwd", "overlay", "--max-parallel", "1")...)
	snapshot(t, s, "box", "--name", "snap")
	ends := []struct {
		commands, name string
		code           int
		flags, command []string
	}{
		{"run", "dry", 0, []string{"--print-command"}, []string{"true"}},
		{"run", "dry, volume", 125, []string{"--print-command", "--volume", "new:/mnt/new"}, []string{"true"}},
		{"run start", "125", 125, []string{"--volume", "new:/mnt/new", "--from", "snap", "--ro-bind", "/none/x:/mnt/x"}, []string{"true"}},
		{"run start", "127", 127, []string{"--volume", "new:/mnt/new", "--from", "snap"}, []string{"no-such-command"}},
		{"run start", "75", 75, []string{"--volume", "new:/mnt/new", "--from", "snap", "--max-parallel", "1"}, []string{"true"}},
		{"exec", "125", 125, []string{"--workdir", "/none"}, []string{"box", "true"}},
		{"exec", "127", 127, nil, []string{"box", "no-such-command"}},
		{"exec", "75", 75, []string{"--max-parallel", "1"}, []string{"box", "true"}},
	}
	if os.Getenv("SBXRUN_BWRAP") != "" {
		ends[0].code = -1 // an older one cannot do the same as sbxrun
	}
	before := [2]map[string]string{contents(t, s.Dir), contents(t, data)}
	try := func(what string, want int, args ...string) {
		t.Helper()
		r := s.Start(harness.Options{Dir: "/usr", Stdin: strings.NewReader("")}, args...).Wait()
		check.That(t, want < 0 || r.ExitCode == want, "%s: exit code %d, want %d: %s", what, r.ExitCode, want, r.Stderr)
		check.That(t, slices.Contains([]int{0, 75, 125, 126, 127}, r.ExitCode), "%s: exit code %d: %s", what, r.ExitCode, r.Stderr)
		for i, top := range []string{s.Dir, data} {
			if now := contents(t, top); !maps.Equal(now, before[i]) {
				for name := range now {
					check.That(t, now[name] == before[i][name], "%s (exit code %d): %s has changed", what, r.ExitCode, filepath.Join(top, name))
				}
				for name := range before[i] {
					_, ok := now[name]
					check.That(t, ok, "%s (exit code %d): %s is gone", what, r.ExitCode, filepath.Join(top, name))
				}
				before[i] = now
			}
		}
		for _, name := range []string{dir + "/data", dir + "/state"} {
			left := contents(t, name)
			check.That(t, len(left) <= 1, "%s: in %s: %q", what, name, slices.Collect(maps.Keys(left)))
		}
	}
	values := planned(dir)
	for _, c := range cli.Commands() {
		for _, end := range ends {
			if !slices.Contains(strings.Fields(end.commands), c.Name) {
				continue
			}
			try(c.Name+", "+end.name, end.code, slices.Concat([]string{c.Name}, end.flags, end.command)...)
			for _, f := range c.Flags {
				words := []string{"--" + f.Name}
				if !f.IsBool() {
					value, ok := values[f.Name]
					check.Require(t, ok, "sbxrun %s --%s: give it a value in planned", c.Name, f.Name)
					words = append(words, value...)
				}
				if f.Name == "state-dir" && (c.Name == "exec" || end.code == 75) {
					continue // there is no other sandbox
				}
				try(fmt.Sprintf("%s %q, %s", c.Name, words, end.name), -1, slices.Concat([]string{c.Name}, words, end.flags, end.command)...)
			}
		}
	}
}

// --print-filter writes to a named pipe or a device, and does not replace it with a file.
func TestPrintFilterToPipe(t *testing.T) {
	t.Parallel()
	pipe := filepath.Join(harness.Dir(t), "pipe")
	check.Must(t, unix.Mkfifo(pipe, 0o600))
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	check.Must(t, err)
	defer reader.Close()
	r := harness.Start(t, harness.Options{Bare: true, Dir: "/usr"}, "--print-command", "--print-filter", pipe, "true").Wait()
	filter := make([]byte, 1<<16)
	n, err := reader.Read(filter)
	if info, lost := os.Lstat(pipe); r.ExitCode != 0 || err != nil || n == 0 || n%8 != 0 || lost != nil || info.Mode()&os.ModeNamedPipe == 0 {
		t.Errorf("exit code %d, stderr %s; %d bytes, %v, %v", r.ExitCode, r.Stderr, n, err, info)
	}
}
