package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// goJudge starts a go-judge with as many containers as our server has rooms, its own mounts, and
// no log. It has no Unix sockets.
func goJudge(path string, ready, most int) (_ *server, close func()) {
	s := newServer()
	l := got((&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0"))
	s.network, s.address = "tcp", l.Addr().String()
	l.Close()
	cgroups := fmt.Sprintf("go-judge-bench-%d", os.Getpid()) // not our prefix, because sbxrun cleanup would remove them
	s.cmd = exec.CommandContext(ctx, path, "-http-addr", s.address, "-pre-fork", strconv.Itoa(ready), "-parallelism", strconv.Itoa(most),
		"-cgroup-prefix", cgroups, "-dir", s.dir, "-release", "-silent")
	s.cmd.Dir = s.dir
	s.answers()
	return s, func() {
		s.close()
		for _, left := range []string{"*/" + cgroups + "/*", "*/" + cgroups} { // cgroup v1 directories that it leaves
			names, _ := filepath.Glob("/sys/fs/cgroup/" + left)
			for _, name := range names {
				_ = os.Remove(name) // fails for files
			}
		}
	}
}

// judged is a load on go-judge, which requires a memory limit.
func (s *server) judged(letter string) *load {
	kept := func(name string) measure.Object { return measure.Object{"name": name, "max": 1 << 20} }
	const timeout = 30_000_000_000 // like our server's
	command := measure.Object{
		"args": []string{"/bin/true"}, "env": []string{"PATH=/usr/bin:/bin"}, "files": []measure.Object{{"content": ""}, kept("stdout"), kept("stderr")},
		"clockLimit": timeout, "cpuLimit": timeout, "memoryLimit": 256 << 20, "procLimit": 64,
	}
	return s.request(letter, "go-judge, memory and pids limited", "/run", measure.Object{"cmd": []measure.Object{command}}, func(answer []byte) bool {
		return bytes.Contains(answer, []byte(`"status":"Accepted","exitStatus":0`))
	})
}
