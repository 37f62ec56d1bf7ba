package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
)

// Identity distinguishes a process from all others with the same PID, earlier, later or in another PID namespace: PIDs are
// reused, but not with the same start time within one boot.
type Identity struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start_time"`    // clock ticks since boot
	BootID string `json:"boot_id"`       // random(4)
	PIDNS  uint64 `json:"pid_namespace"` // inode of the PID namespace that the process itself is in
}

// Identify returns the identity of a process. The caller must be sure that the PID stays the process's during the call: an
// unreaped child, itself, or a process held by a pidfd with a call of [Process.Exited] afterwards.
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

// IdentifyInit is Identify for PID 1 of a PID namespace whose inode is known. An ordinary user may not read the namespace of
// an undumpable process.
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

// Open opens the process with this identity. It fails with [ErrGone] if the process has ended, even if its PID is in use
// again; any other error means that this is unknown. The caller closes the Process.
func (id Identity) Open() (*Process, error) {
	// No sandbox or supervisor has PID 1, and kill(2) and other calls interpret smaller numbers differently.
	if id.PID <= 1 {
		return nil, ErrGone
	}
	// Open the pidfd first. Values read afterwards belong to its process, or to a later one with the same PID; in that case
	// the pidfd's process has ended.
	p, err := Open(id.PID)
	if err != nil {
		// The number may now belong to a thread of another process, for which pidfd_open fails.
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

// OpenInit is Open for a recorded init. It returns [ErrGone] unless the process is PID 1 of a PID namespace below this
// process's, whatever the record says.
func (id Identity) OpenInit() (*Process, error) {
	p, err := id.Open()
	if err == nil && !isInit(id.PID) {
		p.Close()
		return nil, ErrGone
	}
	return p, err
}

// errHidden reports that a process is alive but hidden in /proc.
var errHidden = errors.New("/proc does not show it (hidepid of proc(5))")

// hidden reports whether /proc has no such process.
func hidden(pid int) bool {
	_, err := ReadStat(pid)
	return err == ErrGone
}

// verify first compares values that every user may read. So another process, whose namespace may be unreadable, is
// recognised by its start time.
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
		return nil // see IdentifyInit; another process would have to be an init started in the same tick
	} else if err != nil {
		return err
	} else if ns != id.PIDNS {
		return ErrGone
	}
	return nil
}

// Apart reports whether the process belongs to a PID namespace other than this process's, so that its PID is meaningless
// here.
func (id Identity) Apart() bool {
	ns, err := Namespace(os.Getpid(), "pid")
	return err == nil && id.PIDNS != 0 && id.PIDNS != ns
}

// isInit reports whether a process is PID 1 of a namespace below this process's. It uses values that every user may read.
func isInit(pid int) bool {
	numbers, err := NSPIDs(pid)
	return err == nil && len(numbers) > 1 && numbers[len(numbers)-1] == 1
}

// BootID returns the random ID of the current boot (random(4)).
func BootID() (string, error) {
	if id := knownBootID.Load(); id != nil {
		return *id, nil
	}
	data, err := ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	if data = bytes.TrimSpace(data); len(data) == 0 {
		return "", errors.New("boot ID: the kernel returned none")
	}
	id := string(data)
	knownBootID.Store(&id)
	return id, nil
}

// knownBootID caches the boot ID.
var knownBootID atomic.Pointer[string]
