package proc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// Command describes the children of a keeper: bwrap, which builds a room, or a process that enters a room, or both.
type Command struct {
	Program *Program
	Way     *Way
	// Cred is the identity of both. Only root can set it; nil keeps the identity.
	Cred *Cred
	// Terminals, at most [MaxTerminals], are restored by the keeper, mainly for when sbxrun is killed.
	Terminals []Terminal
	// Remove are cgroups that the keeper removes at its end, in this order, even if sbxrun is killed.
	Remove []string
	// Hold are files that the keeper keeps open until its end, with their locks.
	Hold []*os.File
	// Lasting is set if the Way makes one init after the other. The keeper reports the end of each at once, see
	// [Keeper.Reaped].
	Lasting bool
}

// Program is a program to execute.
type Program struct {
	Path string   // absolute
	Args []string // with argv[0]; the environment is empty
	// Files become descriptors 0, 1, 2 …; the program gets no others. They stay the
	// caller's.
	Files []*os.File
	// Stage are detached mounts (open_tree(2)). The i-th is attached at StageDir/i, in the program's own mount namespace
	// and before the change to Cred. The descriptors stay the caller's.
	Stage []*os.File
}

// Way is a child of a keeper that enters a room, by a script.
type Way struct {
	// Lay adds the calls that follow the settings of the Command. The child's descriptor 3 is a socket for reports. All
	// signals are blocked.
	Lay func(*helper.Script)
	// Files become descriptors 0, 1, 2 …, with close-on-exec from 3 on; they stay the caller's.
	Files []*os.File
	// Bounds apply from the start, except Rlimits, which are for a payload and ignored here.
	Bounds Bounds
}

// Bounds are the inherited limits of a command.
type Bounds struct {
	// The cgroups. The child is created in them or moves itself. A move by another process would take 3 to 15 ms if no
	// process was moved in the last tenth of a second: an RCU grace period, during which the kernel blocks all forks and
	// exits (cgroup_threadgroup_rwsem). A process with one thread that moves itself blocks no others.
	Tasks  []string // files named tasks, of v1
	V2     string   // directory; "" for none
	Remove []string // for [Command.Remove]

	Nice        *int
	OOMScoreAdj *int
	CPUs        *unix.CPUSet
	Rlimits     []Rlimit // soft and hard limits
}

// Rlimit is a resource limit (getrlimit(2)).
type Rlimit struct {
	Resource int
	Value    uint64
}

// Terminal is a terminal of the caller and the state to restore.
type Terminal struct {
	File  *os.File
	State unix.Termios
}

// Background reports whether sbxrun is in the background of the terminal, which then belongs to another job of the shell.
// It returns false if the terminal is not the controlling terminal of sbxrun's session.
func (t Terminal) Background() bool {
	group, err := unix.IoctlGetInt(Descriptor(t.File), unix.TIOCGPGRP)
	return err == nil && group != unix.Getpgrp()
}

// MaxTerminals is the maximum number of terminals: stdin, stdout and stderr.
const MaxTerminals = 3

// StageDir is where Stage is attached. It hides the host's directory, which bwrap itself requires to exist.
const StageDir = "/tmp"

// KeeperName is the process name of a keeper.
const KeeperName = "sbxrun-keeper"

// Cred is the identity of a command.
type Cred struct {
	UID, GID uint32
	Groups   Groups // supplementary groups
}

// Groups are IDs of groups. The first 0 ends them: no sandbox gets root's group.
type Groups [16]uint32

// Len returns the number of groups.
func (g *Groups) Len() int {
	if n := slices.Index(g[:], 0); n >= 0 {
		return n
	}
	return len(g)
}

// Usage is CPU time and memory that processes have used.
type Usage struct {
	User, System time.Duration
	MaxRSS       int64 // bytes, of the largest process
}

// Larger combines two measurements of the same processes: the one with more CPU time, and the larger memory.
func (u Usage) Larger(v Usage) Usage {
	if v.User+v.System > u.User+u.System {
		u.User, u.System = v.User, v.System
	}
	u.MaxRSS = max(u.MaxRSS, v.MaxRSS)
	return u
}

// End is a keeper's report of its end.
type End struct {
	// Late is set if the keeper killed all processes at its deadline because sbxrun had not.
	Late bool
	// Killed is set if the keeper was killed before it could report.
	Killed bool
	// Program is the program's wait status, nil if there was no program. A SIGKILL may be the keeper's own.
	Program *unix.WaitStatus
	reaped  []ended
}

// Usage returns the resource usage of a process and of the children that it had reaped. It excludes children that still
// ran when the process was killed: the kernel discards their times (wait(2), zap_pid_ns_processes). It is zero if the
// keeper has not reaped the process.
func (e End) Usage(pid int) (u Usage) {
	for _, r := range e.reaped {
		if r.PID == int64(pid) {
			u = Usage{User: time.Duration(r.User) * time.Microsecond, System: time.Duration(r.System) * time.Microsecond, MaxRSS: r.MaxRSS << 10}
		}
	}
	return u
}

// A StartError is the error of a step in the keeper, between its fork and the exec of bwrap, or while entering a sandbox.
// After a StartError there is no payload.
type StartError struct {
	Step  string
	Err   error
	Mount int // number of the failed mount, from 1; 0 for none
}

func (e *StartError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// Keeper is sbxrun's handle of a running keeper.
type Keeper struct {
	Process
	// The keeper sends its records through this socket. It kills all its children when sbxrun's end is shut down, or closes
	// because sbxrun has died.
	socket    *os.File
	failure   error // a StartError among the records
	terminals []Terminal
	args      *spawnArgs // in use until the keeper executes the helper
}

// StartError returns the failed step between the keeper's fork and the exec of its command, or nil. Call it after Empty.
func (k *Keeper) StartError() error {
	if k.failure == nil {
		return k.args.failure()
	}
	return k.failure
}

// read returns the next record, or a record of kind helper.Failed after it has set failure.
func (k *Keeper) read(deadline time.Time) (rec record, err error) {
	// A socket supports deadlines; any error here shows in the read.
	_ = k.socket.SetReadDeadline(deadline)
	buf := (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))
	n, err := k.socket.Read(buf[:])
	if errors.Is(err, unix.ECONNRESET) {
		// The kernel returns this once if the keeper has exited with an unread deadline. Its records are still there.
		n, err = k.socket.Read(buf[:])
	}
	var report helper.Report
	switch {
	case err != nil:
		return record{}, err
	case n == int(unsafe.Sizeof(report)) && rec.Kind == helper.Failed:
		report = *(*helper.Report)(unsafe.Pointer(&rec))
		k.failure = Failure(&report)
	case n != len(buf):
		return record{}, errors.New("short record")
	}
	return rec, nil
}

// Failure returns the error of a failed step.
func Failure(r *helper.Report) *StartError {
	return &StartError{Step: r.Step(), Err: syscall.Errno(r.Value), Mount: int(r.Number)}
}

// EndAt sets a deadline at which the keeper kills all processes, in case sbxrun is stopped. Each call replaces the
// previous deadline.
func (k *Keeper) EndAt(t time.Time) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return // it cannot fail, and without a deadline the keeper still watches for sbxrun's end
	}
	// An error means that the keeper is dead or was reaped.
	_ = k.send(&order{Kind: orderDeadline, Deadline: now.Nano() + int64(time.Until(t))}, nil, nil)
}

// Kill makes the keeper kill all its children, without waiting: see Empty. It may be called more than once.
func (k *Keeper) Kill() {
	if slices.ContainsFunc(k.terminals, Terminal.Background) {
		k.terminals = nil
		_ = k.send(&order{Kind: orderLeaveTerminals}, nil, nil)
	}
	// An error means that the keeper is dead.
	_ = unix.Shutdown(Descriptor(k.socket), unix.SHUT_WR)
}

// errNotEmpty reports that the keeper ended before it had reaped all its children, because it was killed or failed before
// it had any. The children are now sbxrun's.
var errNotEmpty = errors.New("the keeper was killed before it had reaped the sandbox")

// Empty waits until the deadline for the keeper's report that all its children are dead and reaped. It fails with
// [errNotEmpty], or with os.ErrDeadlineExceeded if there are children left.
func (k *Keeper) Empty(deadline time.Time) (End, error) { return k.Reaped(0, deadline) }

// LateStatus is the exit code of an init that exits at the deadline set by [Kept.EndAt].
const LateStatus = 124

// Forget discards the unread reports of a lasting keeper. They are about reaped processes, whose PIDs may be in use again.
func (k *Keeper) Forget() {
	var rec record
	for {
		n, _, err := unix.Recvfrom(Descriptor(k.socket), (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))[:], unix.MSG_DONTWAIT)
		if err != nil || n == 0 {
			return // end-of-file is returned again by the next read
		}
	}
}

// Reaped waits until the deadline for a lasting keeper's report that it has reaped a process, or that it has no children,
// as Empty does. The process must have been alive at the last call of [Keeper.Forget].
func (k *Keeper) Reaped(pid int, deadline time.Time) (End, error) {
	for {
		rec, err := k.read(deadline)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return End{}, err
		case err != nil:
			return End{}, errNotEmpty // the keeper is dead
		case rec.Kind == recordEmpty:
			end := End{Late: rec.Late != 0, reaped: rec.Ended[:min(rec.Count, maxEnded)]}
			if rec.Program != 0 {
				end.Program = new(unix.WaitStatus(rec.Status))
			}
			return end, nil
		case rec.Kind == recordReaped && rec.Ended[0].PID == int64(pid):
			ws := unix.WaitStatus(rec.Ended[0].Status)
			return End{Late: ws.Exited() && ws.ExitStatus() == LateStatus, reaped: rec.Ended[:1]}, nil
		}
	}
}

// Reap waits until the deadline for the keeper's end and reaps it.
func (k *Keeper) Reap(deadline time.Time) error {
	k.socket.Close() // a keeper with a terminal or cgroups waits for this
	if err := k.Wait(deadline); err != nil {
		return err
	}
	if err := reap(k.PID); err != nil {
		return fmt.Errorf("wait for the keeper: %w", err)
	}
	k.Close()
	return nil
}
