package bwrap_test

import (
	"bytes"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
)

// leave writes wherever a command of a room can, and look prints what is there.
const (
	leave = `for d in /tmp /home/sandbox /dev/shm /var/data; do echo secret >$d/left || exit 1; done; ipcmk -Q >/dev/null`
	look  = `ls -A /tmp /home/sandbox /dev/shm /var/data; ipcs -q | grep 0x; true`
	empty = "/dev/shm:\n\n/home/sandbox:\n\n/tmp:\n\n/var/data:\n"
)

// A fresh command finds nothing that others of its room have left, and leaves nothing.
func TestFresh(t *testing.T) {
	room := &bwrap.Room{Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Dest: "/var/data", Size: 1 << 20}}}}
	if err := room.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	in := func(fresh bool, script string) string {
		t.Helper()
		var out bytes.Buffer
		c := room.Command("sh", "-c", script)
		c.Fresh, c.Stdout, c.Stderr, c.Timeout = fresh, &out, &out, bound
		if res, err := c.Run(t.Context()); err != nil || res.ExitCode() != 0 {
			t.Fatalf("%q: %+v, %v, %q", script, res, err, &out)
		}
		return out.String()
	}
	in(true, leave)
	if text := in(false, look); text != empty {
		t.Errorf("left in the room: %q", text)
	}
	in(false, leave)
	if text := in(true, look); text != empty {
		t.Errorf("found by a fresh command: %q", text)
	}
	if text := in(true, `stat -f -c %T /tmp /home/sandbox /dev/shm; stat -c %a /tmp /home/sandbox /dev/shm; df --output=size /var/data | tail -1 | tr -d " "; touch /usr/x /x /etc/x /dev/x 2>/dev/null; echo $?`); text != "tmpfs\ntmpfs\ntmpfs\n1777\n700\n1777\n1024\n1\n" {
		t.Errorf("%q", text)
	}
	if text := in(false, look); text == empty {
		t.Error("the room has lost what was its own")
	}
}

// What is mounted within a directory in memory would be hidden, so there is no fresh one.
func TestFreshRefused(t *testing.T) {
	room := &bwrap.Room{Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Source: "/usr/share", Dest: "/home/sandbox/share"}}}}
	if err := room.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	c := room.Command("true")
	c.Fresh = true
	if _, err := c.Run(t.Context()); code(t, err) != "usage" {
		t.Error(err)
	}
}

// A signal to a command's own process alone does not reach those that it has started.
func TestSignalAlone(t *testing.T) {
	room := &bwrap.Room{}
	if err := room.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	r, w := io.Pipe()
	c := room.Command("sh", "-c", `trap 'exit 3' USR1; sh -c 'trap "echo child" USR1; echo ready; while :; do sleep 0.01; done' & while :; do sleep 0.01; done`)
	c.Stdout, c.Timeout = w, bound
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(r, ready); err != nil {
		t.Fatal(err)
	}
	rest := make(chan []byte)
	go func() {
		text, _ := io.ReadAll(r)
		rest <- text
	}()
	if err := c.SignalAlone(unix.SIGUSR1); err != nil {
		t.Error(err)
	}
	res, err := c.Wait()
	w.Close()
	if text := <-rest; err != nil || res.ExitCode() != 3 || len(text) != 0 {
		t.Errorf("%+v, %v, %q", res, err, text)
	}
	if c.SignalAlone(0) == nil {
		t.Error("it has ended, and can be signalled")
	}
}
