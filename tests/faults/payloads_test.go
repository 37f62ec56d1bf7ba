package faults

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// actEnv turns the test binary into one of these payloads. It is bound into sandboxes, and starts
// in a fifth of the time of an interpreter.
const actEnv = "SBXRUN_FAULTS_ACT"

func act(what string) {
	switch what {
	case "fight":
		fight(os.Args[1])
	case "decoy":
		decoy()
	case "breed":
		os.Exit(breed(os.Args[1]))
	}
}

// names are those of sbxrun's processes.
var names = [...]string{"sbxrun-keeper", "sbxrun-init", "sbxrun-room", "bwrap", "sbxrun"}

// fight is a hostile payload. It blocks all signals, passes its descriptors to a process outside,
// takes the names of sbxrun's processes, creates sessions and orphans, and traces, stops and kills
// whatever it can see. It also tries to attack its PID 1, and creates a file if that works.
func fight(id string) {
	runtime.LockOSThread()
	signal.Ignore() // for Go's own threads
	all := ^uint64(0)
	syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, 0, uintptr(unsafe.Pointer(&all)), 0, 8, 0, 0)
	_ = os.WriteFile("/out/ran-"+id, nil, 0o644) // a missing file fails the test
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	passOut()
	for _, name := range []string{"environ", "mem", "maps", "fd", "root", "cwd"} {
		if f, err := os.Open("/proc/1/" + name); err == nil {
			// While PID 1 is being killed it has no memory, and everybody may read that.
			if _, err = f.Read(make([]byte, 1)); err != io.EOF {
				breach(fmt.Sprintf("opened /proc/1/%s: %v", name, err))
			}
		}
	}
	if init, err := unix.PidfdOpen(1, 0); err == nil {
		for fd := range 8 {
			if _, err := unix.PidfdGetfd(init, fd, 0); err == nil {
				breach(fmt.Sprintf("has descriptor %d of PID 1", fd))
			}
		}
	}
	log, _ := unix.Open("/out/log", unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT, 0o666)
	for _, name := range names {
		w := warrior{log: uintptr(log), pause: unix.Timespec{Nsec: 30e6}, rest: unix.Timespec{Sec: 600}}
		copy(w.name[:], name)
		copy(w.breach[:], "/out/breach")
		w.fork()
	}
	for {
		time.Sleep(time.Hour)
	}
}

func breach(what string) {
	_ = os.WriteFile("/out/breach", []byte(what), 0o666) // may fail where the warriors' files fail too;
	fmt.Fprintln(os.Stderr, "/out/breach:", what)        // then this line shows it
}

// passOut sends descriptors to the listener at /out/sock.
func passOut() {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil || unix.Connect(s, &unix.SockaddrUnix{Name: "/out/sock"}) != nil {
		return // there is no listener
	}
	own := []int{0, 1, 2}
	for _, name := range []string{"/proc/self/ns/pid", "/proc/self/ns/mnt", "/proc/self/ns/user", "/proc", "/proc/self", "/"} {
		if fd, err := unix.Open(name, unix.O_RDONLY, 0); err == nil {
			own = append(own, fd)
		}
	}
	if fd, err := unix.PidfdOpen(os.Getpid(), 0); err == nil {
		own = append(own, fd)
	}
	_ = unix.Sendmsg(s, []byte("x"), unix.UnixRights(own...), nil, 0) // fails only if the listener was killed
}

// orphaned starts an orphan in its own session, and returns true there. It was forked without an exec, so it may only make
// system calls, because Go's other threads are missing.
func orphaned() bool {
	if pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid != 0 {
		return false
	}
	syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	if pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid != 0 {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return true
}

// warrior is an [orphaned] process.
type warrior struct {
	name, breach [16]byte
	log          uintptr
	pause, rest  unix.Timespec
}

func (w *warrior) fork() {
	if !orphaned() {
		return
	}
	syscall.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&w.name)), 0)
	syscall.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWUSER|unix.CLONE_NEWPID, 0, 0)
	for bred := 0; ; bred++ {
		for pid := uintptr(1); pid < 40; pid++ {
			_, _, errno := syscall.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, pid, 0, 0, 0, 0)
			if errno == 0 && pid == 1 {
				syscall.RawSyscall6(unix.SYS_OPENAT, uintptr(here), uintptr(unsafe.Pointer(&w.breach)), unix.O_CREAT|unix.O_WRONLY, 0o666, 0, 0)
				syscall.RawSyscall(unix.SYS_WRITE, 2, uintptr(unsafe.Pointer(&w.breach)), 11)
			}
			syscall.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_INTERRUPT, pid, 0, 0, 0, 0)
		}
		for _, sig := range [...]uintptr{uintptr(unix.SIGKILL), uintptr(unix.SIGSTOP), uintptr(unix.SIGTERM)} {
			syscall.RawSyscall(unix.SYS_KILL, 1, sig, 0)
		}
		if bred < 4 {
			if pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid == 0 {
				for {
					syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&w.rest)), 0, 0)
				}
			}
		}
		syscall.RawSyscall(unix.SYS_WRITE, w.log, uintptr(unsafe.Pointer(&w.name)), 1)
		syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&w.pause)), 0, 0)
	}
}

// here is AT_FDCWD as a variable, because a negative constant cannot become a uintptr.
var here = unix.AT_FDCWD

// decoy lives until it gets a signal.
func decoy() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals)
	for sig := range signals {
		if sig != unix.SIGURG { // from Go's scheduler
			os.Exit(64 + int(sig.(unix.Signal)))
		}
	}
}

// actor returns a copy of the test binary that every sandbox can show.
func actor(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	check.Must(t, err)
	program := harness.ReadFile(t, self)
	path := filepath.Join(harness.Dir(t), "actor")
	check.Must(t, os.WriteFile(path, program, 0o755))
	return path
}

// troupe starts decoys: bystanders with the names of sbxrun's processes.
type troupe struct {
	t   testing.TB
	dir string
	mu  sync.Mutex
}

func newTroupe(t testing.TB, actor string) *troupe {
	t.Helper()
	r := &troupe{t: t, dir: harness.Dir(t)}
	for _, name := range names {
		check.Must(t, os.Symlink(actor, filepath.Join(r.dir, name)))
	}
	return r
}

// decoy starts a decoy with the given name, or with the first of names if the troupe lacks it. The decoy gets
// the given PID if that is free; 0 means any. The caller ends it.
func (r *troupe) decoy(name string, pid int) (*decoyed, error) {
	if _, err := os.Lstat(filepath.Join(r.dir, name)); err != nil || name == "" {
		name = names[0]
	}
	d := &decoyed{cmd: &exec.Cmd{
		Path: filepath.Join(r.dir, name), Args: []string{name}, Env: []string{actEnv + "=decoy"},
	}}
	r.mu.Lock()
	defer r.mu.Unlock()
	done, err := harness.Register(func() (int, error) {
		if pid > 1 { // the kernel gives the next process the PID after this one
			if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
				return 0, err
			}
		}
		return harness.StartBare(d.cmd)
	})
	d.done = done
	if err == nil {
		p, _ := harness.ReadProc(d.cmd.Process.Pid)
		d.start = p.Start
	}
	return d, err
}

// decoyed is a running decoy.
type decoyed struct {
	cmd   *exec.Cmd
	done  func()
	start string
}

// unharmed reports whether no signal has reached the decoy.
func (d *decoyed) unharmed() (harness.Proc, bool) {
	p, ok := harness.ReadProc(d.cmd.Process.Pid)
	return p, ok && p.Start == d.start && (p.State == "S" || p.State == "R" || p.State == "D")
}

// end kills the decoy, and returns how it ended.
func (d *decoyed) end() *os.ProcessState {
	_ = d.cmd.Process.Kill() // fails only if it has exited, which unharmed reports
	_ = d.cmd.Wait()         // likewise
	d.done()
	return d.cmd.ProcessState
}

// receive accepts the descriptors that payloads pass out, and holds them until release.
func (e *env) receive() (release func()) {
	e.t.Helper()
	path := filepath.Join(e.out, "sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	check.Must(e.t, err)
	check.Must(e.t, os.Chmod(path, 0o777))
	var mu sync.Mutex
	var held []int
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close()
				_ = conn.SetReadDeadline(time.Now().Add(bound)) // cannot fail
				oob := make([]byte, 1024)
				_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 16), oob)
				if err != nil {
					return // the payload was killed
				}
				messages, _ := unix.ParseSocketControlMessage(oob[:n])
				for _, m := range messages {
					if fds, err := unix.ParseUnixRights(&m); err == nil {
						mu.Lock()
						held = append(held, fds...)
						mu.Unlock()
					}
				}
			})
		}
	})
	return func() {
		l.Close()
		all.Wait()
		for _, fd := range held {
			unix.Close(fd)
		}
	}
}
