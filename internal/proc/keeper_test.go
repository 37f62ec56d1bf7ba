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
		err = k.inherit(nil, deadline)
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
	st, err := ReadStat(Children(k.PID, k.PID)[0])
	if err != nil {
		t.Fatal(err)
	}
	k.Kill()
	end := finish(t, k)
	if ws, ok := end.Status(st.PID); !ok || !ws.Signaled() || ws.Signal() != 9 {
		t.Errorf("program's end: %v, %v", ws, ok)
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
	k := keep(t, Command{Program: &Program{Path: path, Args: args, Env: []string{"A=b"}, Files: []*os.File{null, w, null}}})
	t.Cleanup(func() { r.Close() })
	return k, r
}

func TestKeeperReapsOrphans(t *testing.T) {
	// With its program the keeper ends all that this has left.
	k, out := start(t, "sh", "-c", "setsid sleep 100 & echo up; exit 3")
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if end := finish(t, k); len(end.reaped) != 2 || end.reaped[0].maxrss == 0 {
		t.Errorf("reaped: %+v", end)
	}
}

func TestKeeperStartError(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	k := keep(t, Command{Program: &Program{Path: "/nonexistent", Args: []string{"x"}, Files: []*os.File{null}}})
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
