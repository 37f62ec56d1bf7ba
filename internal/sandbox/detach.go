package sandbox

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
)

// A detached command (start, and exec --detach) is run by another sbxrun process in the background. The calling
// process waits until the command runs. The two communicate over a socket:
//
//	to the background    arguments and environment, which would otherwise be visible in /proc
//	                     as long as the background process lives
//	from the background  one [Handover]: the command runs, or the error
//
// If the caller dies first, the background process sees the socket close and gives up.

// BackgroundArgument is the only argument of a background process.
const BackgroundArgument = "supervise-detached"

// backgroundSocket is the background process's descriptor of the socket.
const backgroundSocket = 3

// assignment tells the background process what to do. Arguments are bytes, because they may not be valid UTF-8,
// unlike JSON strings.
type assignment struct {
	Command string   `json:"command"`
	Args    [][]byte `json:"args"`
	Env     [][]byte `json:"env"`
}

// Handover is the report of the background process.
type Handover struct {
	ID     string `json:"id"`
	Handle string `json:"handle,omitempty"` // of an exec
	Name   string `json:"name,omitempty"`
	Status string `json:"status"`
	// Warning is for the caller to print.
	Warning string              `json:"warning,omitempty"`
	PID     int                 `json:"supervisor_pid,omitempty"`
	Error   *result.ReportError `json:"error,omitempty"`
	Code    int                 `json:"exit_code,omitempty"` // exit code for Error
}

// Caller is the process that waits for the report.
type Caller struct {
	Warning string // added to the report

	socket *os.File
	told   atomic.Bool
}

// Spawn runs a command of this program in the background, with this process's environment, and waits for the
// report, however long that takes. After an error, or a report with an error, the process has exited.
func Spawn(command string, args []string) (said Handover, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return said, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "supervisor"), os.NewFile(uintptr(pair[1]), "supervisor")
	defer ours.Close()
	cmd := exec.Command("/proc/self/exe", BackgroundArgument)
	cmd.Args[0] = "sbxrun"
	// A single processor saves threads while it waits.
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// The background process must not inherit other descriptors, such as locks, for the life of the
	// sandbox.
	err = proc.CloseOnExec(backgroundSocket)
	if err == nil {
		err = cmd.Start()
	}
	theirs.Close()
	if err != nil {
		return said, err
	}
	defer func() {
		if err == nil && said.Error == nil {
			_ = cmd.Process.Release() // it continues in the background
			return
		}
		// Reap it before returning an error. It exits by itself, at the latest when it sees the socket
		// close.
		ours.Close()
		_ = cmd.Wait() // the report matters, not the exit code
	}()
	told := make(chan struct{})
	defer close(told)
	go endStopped(cmd.Process, told)
	// A long assignment blocks until it is read.
	if err := json.NewEncoder(ours).Encode(assignment{command, state.Convert[[]byte](args), state.Convert[[]byte](os.Environ())}); err != nil {
		return said, fmt.Errorf("the supervisor exited before reporting: %w", err)
	}
	if err := json.NewDecoder(io.LimitReader(ours, 1<<20)).Decode(&said); err != nil {
		return said, fmt.Errorf("the supervisor exited before reporting: %w", err)
	}
	return said, nil
}

// endStopped kills a supervisor that was stopped (SIGSTOP) before it reported, because the caller would otherwise
// wait forever. There is no plain deadline, because the supervisor may be waiting for admission.
func endStopped(supervisor *os.Process, told <-chan struct{}) {
	const look, patience = 500 * time.Millisecond, 5 * time.Second
	for stopped := time.Duration(0); stopped < patience; {
		select {
		case <-told:
			return
		case <-time.After(look):
		}
		if st, err := proc.ReadStat(supervisor.Pid); err == nil && st.State == "T" {
			stopped += look
		} else {
			stopped = 0
		}
	}
	_ = supervisor.Kill() // fails if it has ended
}

// Receive makes this process the background process, with its caller's environment, and returns its command. An
// error means that there is no caller.
func Receive() (c *Caller, command string, args []string, err error) {
	// Replace the name "exe" of /proc/self/exe, because people and cleanup look for sbxrun. If it fails, the
	// process is only harder to find.
	_ = os.WriteFile("/proc/self/comm", []byte("sbxrun"), 0)
	unix.CloseOnExec(backgroundSocket)
	_ = unix.SetNonblock(backgroundSocket, true)
	c = &Caller{socket: os.NewFile(backgroundSocket, "caller")}
	var a assignment
	if err := json.NewDecoder(c.socket).Decode(&a); err != nil {
		return nil, "", nil, err
	}
	// Replace the environment of this process with the caller's.
	os.Clearenv()
	for _, pair := range state.Convert[string](a.Env) {
		if name, value, ok := strings.Cut(pair, "="); ok {
			_ = os.Setenv(name, value) // it was valid in the caller
		}
	}
	return c, a.Command, state.Convert[string](a.Args), nil
}

// OrElse calls giveUp if the caller dies before the report.
func (c *Caller) OrElse(giveUp func()) {
	go func() {
		var b [1]byte
		if _, err := c.socket.Read(b[:]); err != nil && !c.told.Load() {
			giveUp()
		}
	}()
}

// Tell sends the report to the caller, once. It returns an error if the caller is dead.
func (c *Caller) Tell(said Handover) error {
	if c.told.Swap(true) {
		return nil
	}
	defer c.socket.Close()
	said.Warning = c.Warning
	if said.Error == nil {
		said.PID = os.Getpid()
	}
	return json.NewEncoder(c.socket).Encode(said)
}

// Fail sends an error to the caller if it still waits.
func (c *Caller) Fail(e *result.Error, code int) {
	// A dead caller needs no report.
	_ = c.Tell(Handover{Error: e.Report(), Code: code})
}
