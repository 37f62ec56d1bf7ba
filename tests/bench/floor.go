package main

import (
	"bufio"
	"bytes"
	endian "encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// holder is the first argument with which the benchmark runs itself as the smallest possible
// supervisor: a Go process that starts a plain bwrap, kills its PID 1 when told to, reaps bwrap,
// and exits. It has no keeper, no init of its own, no proof, no report and no record. It is the
// floor for every supervisor that is a Go process and leaves nothing behind.
const holder = "hold"

// hold runs in the holder. File 3 contains the deadline in nanoseconds of CLOCK_MONOTONIC.
func hold(command []string) {
	cmd, plan := plain(command...)
	defer plan.Close()
	cmd.Stdout = os.Stdout
	must(cmd.Start())
	var when [8]byte
	if _, err := io.ReadFull(os.NewFile(3, "deadline"), when[:]); err != nil {
		must(errors.Join(err, cmd.Process.Kill()))
	}
	init := initOf(cmd)
	time.Sleep(time.Duration(int64(endian.NativeEndian.Uint64(when[:])) - monotonic()))
	must(init.Signal(unix.SIGKILL))
	_ = cmd.Wait() // it was killed
}

// monotonic returns CLOCK_MONOTONIC, which all processes share, in nanoseconds.
func monotonic() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // cannot fail
	return now.Nano()
}

// held is a running holder.
type held struct {
	*exec.Cmd
	deadline *os.File
	out      *bufio.Reader
}

func startHolder(command ...string) *held {
	r, w, err := os.Pipe()
	must(err)
	defer r.Close()
	cmd := exec.CommandContext(ctx, self, append([]string{holder}, command...)...)
	cmd.ExtraFiles, cmd.Stderr = []*os.File{r}, os.Stderr
	_, out := piped(cmd)
	return &held{cmd, w, out}
}

// end tells the holder its deadline. It exits some time after that.
func (h *held) end(at int64) {
	got(h.deadline.Write(endian.NativeEndian.AppendUint64(nil, uint64(at))))
}

// close ends a holder that was not told a deadline.
func (h *held) close() {
	h.deadline.Close()
	_ = h.Wait() // already waited for, or its failure was expected
}

// holdTree returns the time from the deadline of the same tree to its holder's exit.
func holdTree(n int) time.Duration {
	h := startHolder(tree(n)...)
	defer h.close()
	complete(h.Process.Pid, n, h.out, time.Now().Add(time.Minute))
	deadline := monotonic() + int64(rest)
	h.end(deadline)
	must(h.Wait())
	return time.Duration(monotonic() - deadline)
}

// holdMany returns the time from telling n holders of an idle bwrap to end until all have exited.
func holdMany(n int) time.Duration {
	list := make([]*held, n)
	defer func() {
		for _, h := range list {
			if h != nil {
				h.close()
			}
		}
	}()
	eachOf(n, func(i int) {
		list[i] = startHolder("sleep", "infinity")
		settled(list[i].Process.Pid, 1, time.Now().Add(time.Minute))
	})
	time.Sleep(rest)
	begin := monotonic()
	for _, h := range list {
		h.end(begin)
	}
	for i, h := range list {
		if err := h.Wait(); err != nil {
			fail("holder %d: %w", i, err)
		}
	}
	return time.Duration(monotonic() - begin)
}

// floorServer is the first argument with which the benchmark runs itself as the smallest server
// that runs commands: net/http, a JSON document in and one out, and fork and exec between,
// optionally in new namespaces without mounts. It has no limits, no deadline, no proof and no log.
const floorServer = "floor-server"

func serveFloor(socket, spaces string) {
	l := got((&net.ListenConfig{}).Listen(ctx, "unix", socket))
	attr := &syscall.SysProcAttr{}
	if spaces == "new" {
		attr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP
	}
	must(http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var call struct{ Argv []string }
		if err := json.NewDecoder(r.Body).Decode(&call); err != nil || len(call.Argv) == 0 {
			http.Error(w, "no call", http.StatusBadRequest)
			return
		}
		cmd := exec.CommandContext(r.Context(), call.Argv[0], call.Argv[1:]...)
		cmd.SysProcAttr = attr
		if err := cmd.Run(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]int{"exit_code": cmd.ProcessState.ExitCode()}) // fails if the client has disconnected
	})))
}

func floor(spaces string) *server {
	s := newServer()
	s.cmd = exec.CommandContext(ctx, self, floorServer, s.address, spaces)
	s.cmd.Stderr = os.Stderr
	s.answers()
	return s
}

// floorLoad is a load on such a server.
func (s *server) floorLoad(letter, name string) *load {
	return s.request(letter, name, "/", measure.Object{"argv": []string{"/bin/true"}}, func(answer []byte) bool {
		return bytes.Contains(answer, []byte(`"exit_code":0`))
	})
}
