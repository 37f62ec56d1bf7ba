package main

import (
	"encoding/json"
	"errors"
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
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
)

// A detached command (start, and exec --detach) is carried out by another sbxrun
// in the background, the supervisor, which the one that was called waits for until
// the payload runs. The two talk over a socket:
//
//	to the supervisor    what it was called with. Not by its command line and its
//	                     environment: they are there to be seen as long as it lives
//	from the supervisor  one [handover]: the payload runs, or why it does not
//
// Should the caller die before, the supervisor sees the socket close, and gives up.

// backgroundCommand is the first argument of a supervisor.
const backgroundCommand = "supervise-detached"

// backgroundSocket is its descriptor.
const backgroundSocket = 3

// assignment is what a supervisor is to do.
type assignment struct {
	Command string `json:"command"`
	// Bytes, because JSON's texts are UTF-8, and these need not be.
	Args [][]byte `json:"args"`
	Env  [][]byte `json:"env"`
}

// handover is a supervisor's word.
type handover struct {
	ID     string `json:"id"`
	Name   string `json:"name,omitempty"`
	Status string `json:"status"`
	// Warning is for the caller to say on stderr.
	Warning string              `json:"warning,omitempty"`
	PID     int                 `json:"supervisor_pid,omitempty"`
	Error   *result.ReportError `json:"error,omitempty"`
	Code    int                 `json:"exit_code,omitempty"` // of Error
}

// caller is the one that waits for a supervisor's word; nil if this is none.
var caller *waiting

// waiting is a caller until it is told.
type waiting struct {
	socket  *os.File
	warning string // goes with what it is told
	told    atomic.Bool
}

var errDetachedOnTerminal = errors.New("--detach and --tty do not go together: nobody is there any more for what is written")

// detach has a command carried out in the background, and prints what comes of it.
func detach(command string, args []string, asJSON bool, print func(handover) error) int {
	var said handover
	if err := state.CheckProc(); err != nil {
		said = handover{Error: asError(err).Report(), Code: result.ExitNotStarted}
	} else if said, err = spawn(assignment{command, toBytes(args), toBytes(os.Environ())}); err != nil {
		var none *admission.Leave
		return fail(none.Explain(&result.Error{Code: "detach", Message: "cannot start the supervisor: " + err.Error(), Err: err}))
	}
	if said.Warning != "" {
		warn(errors.New(said.Warning))
	}
	if e := said.Error; e != nil {
		if asJSON {
			if err := json.NewEncoder(os.Stdout).Encode(said); err != nil {
				return fail(printError(err))
			}
		}
		return fail(&result.Error{Code: e.Code, Message: e.Message, Hint: e.Hint, ExitCode: said.Code})
	}
	if err := print(said); err != nil {
		return fail(printError(err))
	}
	return 0
}

func toBytes(list []string) [][]byte {
	out := make([][]byte, 0, len(list))
	for _, s := range list {
		out = append(out, []byte(s))
	}
	return out
}

func toStrings(list [][]byte) []string {
	out := make([]string, 0, len(list))
	for _, b := range list {
		out = append(out, string(b))
	}
	return out
}

// spawn starts a supervisor and waits for its word, for as long as the supervisor
// takes. After an error, or one that the word holds, nothing is left of it.
func spawn(a assignment) (said handover, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return said, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "supervisor"), os.NewFile(uintptr(pair[1]), "supervisor")
	defer ours.Close()
	cmd := exec.Command("/proc/self/exe", backgroundCommand)
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
	if err := json.NewEncoder(ours).Encode(a); err != nil {
		return said, err
	}
	if err := json.NewDecoder(io.LimitReader(ours, 1<<20)).Decode(&said); err != nil {
		return said, fmt.Errorf("it ended without a word: %w", err)
	}
	return said, nil
}

// backgroundMain is a supervisor.
func backgroundMain(begin time.Time) int {
	// Not the exe of /proc/self/exe: people look for it, and so does cleanup. Without
	// it is only harder to find.
	_ = os.WriteFile("/proc/self/comm", []byte("sbxrun"), 0)
	unix.CloseOnExec(backgroundSocket)
	_ = unix.SetNonblock(backgroundSocket, true)
	caller = &waiting{socket: os.NewFile(backgroundSocket, "caller")}
	var a assignment
	if err := json.NewDecoder(caller.socket).Decode(&a); err != nil {
		return result.ExitNotStarted // nobody is there
	}
	// Ours is for the time until the sandbox's is known.
	os.Clearenv()
	for _, pair := range toStrings(a.Env) {
		if name, value, ok := strings.Cut(pair, "="); ok {
			_ = os.Setenv(name, value) // it was one
		}
	}
	args := toStrings(a.Args)
	switch a.Command {
	case "start":
		return superviseSandbox(args, begin)
	case "exec":
		return execCommand(args, begin)
	}
	return result.ExitNotStarted
}

// orElse calls giveUp if the caller dies before it is told.
func (c *waiting) orElse(giveUp func()) {
	go func() {
		var b [1]byte
		if _, err := c.socket.Read(b[:]); err != nil && !c.told.Load() {
			giveUp()
		}
	}()
}

// tell gives the caller its word, once. An error means that nobody has heard it.
func (c *waiting) tell(said handover) error {
	if c.told.Swap(true) {
		return nil
	}
	defer c.socket.Close()
	said.Warning = c.warning
	if said.Error == nil {
		said.PID = os.Getpid()
	}
	return json.NewEncoder(c.socket).Encode(said)
}

// fail tells the caller why there is nothing, if it still waits.
func (c *waiting) fail(e *result.Error, code int) {
	// Dead is as good as told.
	_ = c.tell(handover{Error: e.Report(), Code: code})
}
