package proc

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

func keep(t *testing.T, c Command) *Keeper {
	t.Helper()
	k, err := Keep(c)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// finish waits for the keeper's word and end.
func finish(t *testing.T, k *Keeper) End {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	end, err := k.Empty(deadline)
	if err == ErrNotEmpty && k.StartError() != nil {
		err = k.Inherit(nil, deadline)
	}
	if err != nil {
		t.Error(err)
	}
	if err := k.Reap(deadline); err != nil {
		t.Error(err)
	}
	return end
}

func TestKeeperKills(t *testing.T) {
	k, out := start(t, "sh", "-c", "setsid sh -c 'trap \"\" TERM; echo up; sleep 100' & sleep 100")
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	k.Kill()
	end := finish(t, k)
	if !end.Monitor.Signaled() || end.Monitor.Signal() != 9 {
		t.Errorf("command's end: %v", end.Monitor)
	}
}

func start(t *testing.T, args ...string) (*Keeper, *os.File) {
	t.Helper()
	path, err := exec.LookPath(args[0])
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	k := keep(t, Command{Path: path, Args: args, Env: []string{"A=b"}, Files: []*os.File{null, w, null}})
	t.Cleanup(func() { r.Close() })
	return k, r
}

func TestKeeperReapsOrphans(t *testing.T) {
	k, _ := start(t, "sh", "-c", "setsid sleep 0.1 & exit 3")
	usage := finish(t, k)
	if usage.MaxRSS == 0 {
		t.Errorf("usage of the orphan was not counted: %+v", usage)
	}
}

func TestKeeperStartError(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	k := keep(t, Command{Path: "/nonexistent", Args: []string{"x"}, Files: []*os.File{null}})
	finish(t, k)
	err = k.StartError()
	if want := "exec bwrap: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestKeeperHidesDescriptors(t *testing.T) {
	k, out := start(t, "sh", "-c", "ls /proc/self/fd | tr '\\n' ' '")
	buf := make([]byte, 100)
	n, _ := out.Read(buf)
	// 3 is ls's own descriptor of the directory.
	if got := string(buf[:n]); got != "0 1 2 3 " {
		t.Errorf("descriptors %q", got)
	}
	finish(t, k)
}

func TestExitStatus(t *testing.T) {
	c := exec.Command("sh", "-c", "read x; exit 137")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := Open(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Exited() {
		t.Fatal("has not been told to exit yet")
	}
	in.Close()
	if err := p.Wait(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if !p.Exited() {
		t.Error("waited for, but not exited")
	}
	c.Wait()
	if ws, ok := p.ExitStatus(time.Now().Add(time.Second)); ok && (!ws.Exited() || ws.ExitStatus() != 137) {
		t.Errorf("status %v, want exit 137", ws)
	} else {
		t.Logf("kernel tells: %v", ok)
	}
	if err := p.Signal(9); err != ErrGone {
		t.Errorf("signal after the end: %v", err)
	}
}
