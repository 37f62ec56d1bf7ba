// Package detach has a command carried out by another process of the same program, in the
// background, and waits for its word.
package detach

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
)

// A detached command (start, and exec --detach) is carried out by another sbxrun
// in the background, which the one that was called waits for until the payload runs. The
// two talk over a socket:
//
//	to the background    what it was called with. Not by its command line and its
//	                     environment: they are there to be seen as long as it lives
//	from the background  one [Handover]: the payload runs, or why it does not
//
// Should the caller die before, the one in the background sees the socket close, and gives up.

// Argument is the only one of a process in the background.
const Argument = "supervise-detached"

// backgroundSocket is its descriptor.
const backgroundSocket = 3

// assignment is what is to be done in the background. It has bytes, because JSON's texts
// are UTF-8, and arguments need not be.
type assignment struct {
	Command string   `json:"command"`
	Args    [][]byte `json:"args"`
	Env     [][]byte `json:"env"`
}

// Handover is the word of the one in the background.
type Handover struct {
	ID     string `json:"id"`
	Handle string `json:"handle,omitempty"` // of an exec
	Name   string `json:"name,omitempty"`
	Status string `json:"status"`
	// Warning is for the caller to say on stderr.
	Warning string              `json:"warning,omitempty"`
	PID     int                 `json:"supervisor_pid,omitempty"`
	Error   *result.ReportError `json:"error,omitempty"`
	Code    int                 `json:"exit_code,omitempty"` // of Error
}

// Caller is who waits for our word, until it is told.
type Caller struct {
	Warning string // goes with what it is told

	socket *os.File
	told   atomic.Bool
}

// words are the same words in another form.
func words[To, From string | []byte](list []From) []To {
	out := make([]To, 0, len(list))
	for _, w := range list {
		out = append(out, To(w))
	}
	return out
}

// Spawn has a command of this program carried out in the background, with this process's
// environment, and waits for the word, for as long as that takes. After an error, or one that the word holds, nothing is left of it.
func Spawn(command string, args []string) (said Handover, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return said, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "supervisor"), os.NewFile(uintptr(pair[1]), "supervisor")
	defer ours.Close()
	cmd := exec.Command("/proc/self/exe", Argument)
	cmd.Args[0] = "sbxrun"
	// One processor is enough for who waits, and saves threads.
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// What we have inherited open, a lock perhaps, is not to be kept open as long as
	// a sandbox lives.
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
			_ = cmd.Process.Release() // it lives on
			return
		}
		// Nothing is left when we say that nothing was started, not even a zombie: it
		// ends by itself, at the latest when it sees our end close.
		ours.Close()
		_ = cmd.Wait() // its word counts, not its exit code
	}()
	told := make(chan struct{})
	defer close(told)
	go endStopped(cmd.Process, told)
	// A long assignment has to be read before it is all written.
	if err := json.NewEncoder(ours).Encode(assignment{command, words[[]byte](args), words[[]byte](os.Environ())}); err != nil {
		return said, fmt.Errorf("it ended without a word: %w", err)
	}
	if err := json.NewDecoder(io.LimitReader(ours, 1<<20)).Decode(&said); err != nil {
		return said, fmt.Errorf("it ended without a word: %w", err)
	}
	return said, nil
}

// endStopped kills a supervisor that was stopped (SIGSTOP) before it reported: otherwise the caller
// would wait for ever. There is no plain deadline, because the supervisor may be waiting for admission.
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
	_ = supervisor.Kill() // an error means that it has ended
}

// Receive makes this process the one in the background, with its caller's environment, and
// says what it is to do. An error means that nobody is there.
func Receive() (c *Caller, command string, args []string, err error) {
	// Not the exe of /proc/self/exe: people look for it, and so does cleanup. Without
	// it is only harder to find.
	_ = os.WriteFile("/proc/self/comm", []byte("sbxrun"), 0)
	unix.CloseOnExec(backgroundSocket)
	_ = unix.SetNonblock(backgroundSocket, true)
	c = &Caller{socket: os.NewFile(backgroundSocket, "caller")}
	var a assignment
	if err := json.NewDecoder(c.socket).Decode(&a); err != nil {
		return nil, "", nil, err
	}
	// Ours is for the time until the caller's is known.
	os.Clearenv()
	for _, pair := range words[string](a.Env) {
		if name, value, ok := strings.Cut(pair, "="); ok {
			_ = os.Setenv(name, value) // it was one
		}
	}
	return c, a.Command, words[string](a.Args), nil
}

// OrElse calls giveUp if the caller dies before it is told.
func (c *Caller) OrElse(giveUp func()) {
	go func() {
		var b [1]byte
		if _, err := c.socket.Read(b[:]); err != nil && !c.told.Load() {
			giveUp()
		}
	}()
}

// Tell gives the caller its word, once. An error means that nobody has heard it.
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

// Fail tells the caller why there is nothing, if it still waits.
func (c *Caller) Fail(e *result.Error, code int) {
	// Dead is as good as told.
	_ = c.Tell(Handover{Error: e.Report(), Code: code})
}
