package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
)

// Identity tells one process from every other that has had, or will have, its
// number: a pid is used again, a start time not within one boot, and the same
// pid and start time in another PID namespace is somebody else.
type Identity struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start_time"`    // clock ticks since boot
	BootID string `json:"boot_id"`       // random(4)
	PIDNS  uint64 `json:"pid_namespace"` // inode of the PID namespace that the process itself is in
}

// Identify is for a process that the caller knows to be the one it means while
// this looks: a child not yet reaped, itself, or one held by a pidfd and asked
// [Process.Exited] afterwards.
func Identify(pid int) (Identity, error) {
	id, err := IdentifyInit(pid, 0)
	if err == nil {
		id.PIDNS, err = Namespace(pid, "pid")
	}
	if err != nil {
		return Identity{}, err
	}
	return id, nil
}

// IdentifyInit is Identify for PID 1 of a PID namespace whose inode is known: that of a
// process that is not dumpable an ordinary user may not look at.
func IdentifyInit(pid int, ns uint64) (Identity, error) {
	id := Identity{PID: pid, PIDNS: ns}
	st, err := ReadStat(pid)
	if err != nil {
		return Identity{}, err
	}
	id.Start = st.Start
	if id.BootID, err = BootID(); err != nil {
		return Identity{}, err
	}
	return id, nil
}

// Open takes hold of the process that id was made of. [ErrGone] means that it
// has ended, whoever has its number now; any other error, that it could not be
// told. The caller owns the Process and closes it.
func (id Identity) Open() (*Process, error) {
	// No sandbox is, or is supervised by, process 1; below it kill(2) and others
	// take a number for something else than a process.
	if id.PID <= 1 {
		return nil, ErrGone
	}
	// The pidfd comes first: what is read after it is of this process, or of one
	// that got the number later, and then this one has ended.
	p, err := Open(id.PID)
	if err != nil {
		// The number may be that of a stranger's thread now, which has no pidfd.
		if id.verify() == ErrGone {
			err = ErrGone
		}
		return nil, err
	}
	if err = id.verify(); p.Exited() {
		err = ErrGone
	} else if err == ErrGone && hidden(id.PID) && !p.Exited() {
		err = errHidden
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// OpenInit is Open for who can only be PID 1 of a PID namespace below ours, as all inits on record are:
// anybody else is not taken for it, whatever a record says.
func (id Identity) OpenInit() (*Process, error) {
	p, err := id.Open()
	if err == nil && !isInit(id.PID) {
		p.Close()
		return nil, ErrGone
	}
	return p, err
}

// errHidden means that a process is alive, but /proc does not show it.
var errHidden = errors.New("/proc does not show it (hidepid of proc(5))")

// hidden reports whether /proc has no such process.
func hidden(pid int) bool {
	_, err := ReadStat(pid)
	return err == ErrGone
}

// verify compares what everybody may read first. So a stranger, whose namespace
// we may not look at, is known as one by his start time.
func (id Identity) verify() error {
	if boot, err := BootID(); err != nil {
		return err
	} else if boot != id.BootID {
		return ErrGone
	}
	if st, err := ReadStat(id.PID); err != nil {
		return err
	} else if st.Start != id.Start {
		return ErrGone
	}
	if ns, err := Namespace(id.PID, "pid"); errors.Is(err, fs.ErrPermission) && isInit(id.PID) {
		return nil // see IdentifyInit; a stranger would have to be an init as well, begun in the same tick
	} else if err != nil {
		return err
	} else if ns != id.PIDNS {
		return ErrGone
	}
	return nil
}

// Apart reports whether the process belongs to another PID namespace than ours, so that its pid means
// nothing here.
func (id Identity) Apart() bool {
	ns, err := Namespace(os.Getpid(), "pid")
	return err == nil && id.PIDNS != 0 && id.PIDNS != ns
}

// isInit reports whether a process is PID 1 of a namespace below ours, by what everybody
// may read.
func isInit(pid int) bool {
	numbers, err := NSPIDs(pid)
	return err == nil && len(numbers) > 1 && numbers[len(numbers)-1] == 1
}

// BootID is a number that the kernel draws once per boot (random(4)).
func BootID() (string, error) {
	if id := knownBootID.Load(); id != nil {
		return *id, nil
	}
	data, err := ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	if data = bytes.TrimSpace(data); len(data) == 0 {
		return "", errors.New("boot id: the kernel gives none")
	}
	id := string(data)
	knownBootID.Store(&id)
	return id, nil
}

// knownBootID is what was read: who looks at many sandboxes needs it for each.
var knownBootID atomic.Pointer[string]
