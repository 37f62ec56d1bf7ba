package proc

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func keep(t *testing.T, c Command) *Keeper {
	t.Helper()
	k, err := Keep(c)
	check.Must(t, err)
	return k
}

// finish waits for the keeper's report and end.
func finish(t *testing.T, k *Keeper) End {
	t.Helper()
	deadline := soon()
	end, err := k.Empty(deadline)
	if err == errNotEmpty {
		err = (&Kept{Keeper: k}).Inherit(deadline)
	}
	check.That(t, err == nil, "%v", err)
	check.OK(t, k.Reap(deadline))
	return end
}

func TestKeeperKills(t *testing.T) {
	k, out := start(t, "sh", "-c", "setsid sh -c 'trap \"\" TERM; echo up; sleep 100' & sleep 100")
	_, err := out.Read(make([]byte, 3))
	check.Must(t, err)
	st := Descendants(k.PID, 1)[0]
	k.Kill()
	end := finish(t, k)
	check.That(t, slices.ContainsFunc(end.reaped, func(r ended) bool { return r.PID == int64(st.PID) && r.Status == 9 }), "reaped: %+v", end.reaped)
}

func start(t *testing.T, args ...string) (*Keeper, *os.File) {
	t.Helper()
	path, err := exec.LookPath(args[0])
	check.Must(t, err)
	r, w := harness.Pipe(t)
	null := harness.Null(t)
	k := keep(t, Command{Program: &Program{Path: path, Args: args, Files: []*os.File{null, w, null}}})
	w.Close()
	return k, r
}

// A program gets more files than fit into one message.
func TestKeeperManyFiles(t *testing.T) {
	r, w := harness.Pipe(t)
	null := harness.Null(t)
	for _, last := range []int{252, 253, 600} {
		files := append(slices.Repeat([]*os.File{null}, last), w)
		way := &Way{Files: files, Lay: func(s *helper.Script) {
			s.Do("write", unix.SYS_WRITE, last, "way\n", 4)
			s.Do("exit", helper.Exit, 0)
		}}
		for _, c := range []Command{
			{Program: &Program{Path: "/bin/sh", Args: []string{"sh", "-c", "echo sh >/proc/self/fd/" + strconv.Itoa(last)}, Files: files}},
			{Way: way},
			{Program: &Program{Path: "/bin/sleep", Args: []string{"sleep", "100"}, Files: files}, Way: way},
		} {
			k := keep(t, c)
			_ = r.SetReadDeadline(soon())
			if n, err := r.Read(make([]byte, 10)); n == 0 {
				t.Errorf("%d files: %v, %v", len(files), err, k.StartError())
			}
			k.Kill()
			finish(t, k)
			check.OK(t, k.StartError(), "%d files", len(files))
		}
	}
	w.Close()
}

// The entering process has the capabilities of an ordinary user's sbxrun, and a program has none.
func TestKeeperCapabilities(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root can give itself some
	}
	_, err := helper.File()
	check.Must(t, err) // stays root's
	done := make(chan struct{})
	go func() { // its thread ends with it
		defer close(done)
		runtime.LockOSThread()
		const uid = 61000
		if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
			t.Error(err)
			return
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			t.Error(errno)
			return
		}
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		own := [2]unix.CapUserData{{Permitted: 1 << unix.CAP_SYS_NICE, Effective: 1 << unix.CAP_SYS_NICE}}
		if err := unix.Capset(&hdr, &own[0]); err != nil {
			t.Error(err)
			return
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		defer w.Close()
		way := &Way{Files: []*os.File{w, w, w, w}, Lay: func(s *helper.Script) {
			s.Do("nice", unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, -5)
			s.Do("write", unix.SYS_WRITE, 0, "done", 4)
			s.Do("exit", helper.Exit, 0)
		}}
		for _, c := range []struct {
			Command
			want string
		}{
			{Command{Way: way}, "done"},
			{Command{Program: &Program{Path: "/bin/grep", Args: []string{"grep", "-c", "^Cap[IPEA].*:.0*$", "/proc/self/status"}, Files: []*os.File{w, w, w}}}, "4\n"},
		} {
			k, err := Keep(c.Command)
			if err != nil {
				t.Error(err)
				continue
			}
			buf := make([]byte, 100)
			_ = r.SetReadDeadline(soon())
			n, err := r.Read(buf)
			check.That(t, string(buf[:n]) == c.want, "%q, %v, want %q", buf[:n], err, c.want)
			finish(t, k)
		}
		var after [2]unix.CapUserData
		err = unix.Capget(&hdr, &after[0])
		check.That(t, err == nil && after == own, "capabilities afterwards: %+v, %v", after, err)
		set, err := unix.PrctlRetInt(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_IS_SET, unix.CAP_SYS_NICE, 0, 0)
		check.That(t, set == 0 && err == nil, "ambient afterwards: %d, %v", set, err)
	}()
	<-done
}

// A keeper that cannot get its orders does not block sbxrun, even if it is stopped.
func TestKeeperDiscarded(t *testing.T) {
	k, out := start(t, "sh", "-c", "echo up; sleep 100")
	_, err := out.Read(make([]byte, 3))
	check.Must(t, err)
	child := Descendants(k.PID, 1)[0]
	check.Must(t, k.Signal(unix.SIGSTOP))
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.discard()
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		_ = unix.Kill(k.PID, unix.SIGKILL)
		t.Fatal("it waits for a stopped keeper")
	}
	st, err := ReadStat(child.PID)
	check.That(t, err != nil || st.Start != child.Start, "a child is left: %+v", st)
}

func TestKeeperReapsOrphans(t *testing.T) {
	// When its program ends, the keeper kills the processes that the program has left behind.
	k, out := start(t, "sh", "-c", "setsid sleep 100 & echo up; exit 3")
	_, err := out.Read(make([]byte, 3))
	check.Must(t, err)
	end := finish(t, k)
	check.That(t, len(end.reaped) == 2 && end.reaped[0].MaxRSS != 0, "reaped: %+v", end)
}

func TestKeeperStartError(t *testing.T) {
	null := harness.Null(t)
	k := keep(t, Command{Program: &Program{Path: "/nonexistent", Args: []string{"x"}, Files: []*os.File{null}}})
	finish(t, k)
	err := k.StartError()
	want := "exec x: no such file or directory"
	check.That(t, err != nil && err.Error() == want, "got %v, want %s", err, want)
}

func TestKeeperHidesDescriptors(t *testing.T) {
	k, out := start(t, "sh", "-c", "ls /proc/self/fd | tr '\\n' ' '")
	// 3 is ls's own descriptor of the directory.
	check.Equal(t, string(harness.ReadAll(t, out)), "0 1 2 3 ", "descriptors")
	finish(t, k)
}

// Inherit fails without a free descriptor: sbxrun cannot see the children of a killed keeper then, so their end is not
// proven.
func TestInheritNoDescriptors(t *testing.T) {
	k, out := start(t, "sh", "-c", "echo up; exec sleep 100")
	_, err := out.Read(make([]byte, 3))
	check.Must(t, err)
	program := Descendants(k.PID, 1)[0].PID
	check.Must(t, k.Signal(unix.SIGKILL))
	check.Must(t, k.Wait(soon()))
	kept := &Kept{Keeper: k}
	left := kept.Survivors(10)
	check.That(t, len(left) == 1 && left[0].PID == program, "survivors %+v, want %d", left, program)
	restore := harness.LimitDescriptors(t, lowestDescriptor(t))
	err = kept.Inherit(time.Now().Add(harness.Scaled(200 * time.Millisecond))) // it takes as long
	restore()
	check.That(t, errors.Is(err, unix.EMFILE), "with no descriptor free: %v", err)
	finish(t, k)
	left = kept.Survivors(10)
	check.That(t, left == nil, "left behind: %+v", left)
}

// Abandon succeeds if the keeper was killed and one of its children still has the keeper's socket open.
func TestAbandonSocketHeld(t *testing.T) {
	r, w := harness.Pipe(t)
	// A process that was stopped before it could set its death signal, and before the exec of its program, which closes the
	// socket.
	var s helper.Script
	s.Do("write", unix.SYS_WRITE, 0, "x", 1)
	s.Do("wait", unix.SYS_PPOLL, 0, 0, 0, 0)
	script, err := s.Seal()
	check.Must(t, err)
	defer script.Close()
	k, err := startKeeper()
	check.Must(t, err)
	check.Must(t, k.send(&order{Kind: orderChild, Child: 1, Files: 1, Program: 1, Cgroup: -1}, []*os.File{script, w}, nil))
	_, err = r.Read(make([]byte, 1))
	check.Must(t, err)
	child := Descendants(k.PID, 1)[0].PID
	check.Must(t, k.Signal(unix.SIGKILL))
	begin := time.Now()
	_, err = (&Kept{Keeper: k}).Abandon(begin.Add(20 * time.Second))
	check.That(t, err == nil, "%v", err)
	took := time.Since(begin)
	check.That(t, took <= 15*time.Second, "that took %v", took)
	_, err = ReadStat(child)
	check.That(t, err == ErrGone, "its child is left: %v", err)
}

// With any number of free descriptors the keeper either opens its own files before it has children, or starts nothing: a
// keeper that failed later would end a running command.
func TestKeeperFewDescriptors(t *testing.T) {
	shell, err := exec.LookPath("sh")
	check.Must(t, err)
	_, err = helper.File()
	check.Must(t, err) // stays open
	begun := 0
	for free := range 12 {
		read, write, err := os.Pipe()
		check.Must(t, err)
		var fill []int // uses all free numbers up to the last one
		for range 64 {
			fd, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
			check.Must(t, err)
			fill = append(fill, fd)
		}
		restore := harness.LimitDescriptors(t, fill[len(fill)-1]+1)
		for range free {
			unix.Close(fill[len(fill)-1])
			fill = fill[:len(fill)-1]
		}
		k, err := Keep(Command{Program: &Program{Path: shell, Args: []string{"sh", "-c", "echo; exec sleep 100"}, Files: []*os.File{write, write, write}}})
		restore()
		write.Close()
		for _, fd := range fill {
			unix.Close(fd)
		}
		if errors.Is(err, unix.EMFILE) {
			read.Close()
			continue
		}
		check.Must(t, err)
		n, _ := read.Read(make([]byte, 1)) // end-of-file, if nothing has begun
		read.Close()
		k.Kill()
		_, err = k.Empty(soon())
		kept := Kept{Keeper: k}
		switch {
		case n == 1 && err != nil:
			t.Errorf("%d free: the command has begun, and the keeper ended: %v", free, k.StartError())
		case n == 1:
			begun++
		case !errors.Is(k.StartError(), unix.EMFILE):
			t.Errorf("%d free: nothing has begun: %v, %v", free, k.StartError(), err)
		case err == errNotEmpty:
			check.OK(t, k.Wait(soon()))
			if left, err := kept.orphans(); err != nil || len(left) > 0 {
				t.Errorf("%d free: the keeper has ended with children: %v; %+v, %v", free, k.StartError(), left, err)
			}
		}
		err = kept.Inherit(soon())
		check.That(t, n != 0 || err == nil, "%v", err)
		check.OK(t, k.Reap(soon()))
	}
	check.That(t, begun != 0, "nothing has begun, with any number")
}
