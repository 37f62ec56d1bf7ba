package proc

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Namespace returns the inode of a namespace of the process; kind is "pid", "user" ….
func Namespace(pid int, kind string) (inode uint64, err error) {
	var st unix.Stat_t
	err = look("stat", pid, "ns/"+kind, func(path string) error { return unix.Stat(path, &st) })
	return st.Ino, err
}

// OpenNamespace opens a namespace of the process, which lives at least until the caller closes it.
func OpenNamespace(pid int, kind string) (fd int, err error) {
	return openFile(pid, "ns/"+kind, unix.O_RDONLY)
}

// NamespaceOwner returns the user namespace that owns one of the process's namespaces. The caller closes it.
func (p *Process) NamespaceOwner(kind string) (*os.File, error) {
	fd, err := OpenNamespace(p.PID, kind)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if p.Exited() {
		return nil, ErrGone // the namespace may be another process's
	}
	owner, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS) // ioctl_ns(2), Linux 4.9
	if err != nil {
		return nil, fmt.Errorf("ask for the user namespace of /proc/%d/ns/%s: %w", p.PID, kind, err)
	}
	return os.NewFile(uintptr(owner), "user namespace"), nil
}

// openFile opens a file in /proc/PID. It returns -1 with an error.
func openFile(pid int, name string, flags int) (fd int, err error) {
	fd = -1
	err = look("open", pid, name, func(path string) (err error) {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// look calls at with the path of a file in /proc/PID, if necessary with the IDs of the process's owner.
func look(what string, pid int, name string, at func(path string) error) error {
	path := "/proc/" + strconv.Itoa(pid) + "/" + name
	err := at(path)
	if err == unix.EACCES {
		err = asOwner(pid, func() error { return at(path) })
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, path, err)
	}
	return nil
}

// asOwner calls f with the effective user and group ID of a process, if this process is root. Reading a protected
// file of it in /proc requires CAP_SYS_PTRACE in the user namespace of that process (ptrace(2),
// PTRACE_MODE_READ_FSCREDS). The user who made the namespace has it, but in a usual container root is not that user
// and lacks the capability.
//
// Only this thread's IDs change (credentials(7)). They give other processes no new rights over this one, because signals
// and ptrace also depend on the real and saved IDs. f must stay on the thread, and must neither fork nor open files
// with package os, which takes [syscall.ForkLock].
func asOwner(pid int, f func() error) error {
	if unix.Geteuid() != 0 {
		return unix.EACCES
	}
	var owner unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(pid), &owner); err != nil {
		return err
	}
	if owner.Uid == 0 {
		return unix.EACCES
	}
	// Allow one call at a time: a second one would save the flag that the first has changed. Allow no forks either, because
	// they would inherit the IDs and the flag.
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The change of IDs makes the whole process undumpable (prctl(2)). Then other sbxrun processes of the same user could not
	// identify it.
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(dumpable), 0, 0, 0) }() // restoring the flag is always allowed
	group := unix.Getegid()
	if err := setEffective(syscall.SYS_SETRESGID, int(owner.Gid)); err != nil {
		return err
	}
	defer restore(syscall.SYS_SETRESGID, group)
	if err := setEffective(syscall.SYS_SETRESUID, int(owner.Uid)); err != nil {
		return err
	}
	defer restore(syscall.SYS_SETRESUID, 0)
	return f()
}

// setEffective sets an effective ID of this thread. Package syscall would set it for all threads.
func setEffective(call uintptr, id int) error {
	const keep = ^uintptr(0)
	if _, _, errno := syscall.RawSyscall(call, keep, uintptr(id), keep); errno != 0 {
		return errno
	}
	return nil
}

// restore undoes setEffective, which is always allowed. It panics on failure, because the thread must not continue.
func restore(call uintptr, id int) {
	if err := setEffective(call, id); err != nil {
		panic("the effective ids cannot be restored: " + err.Error())
	}
}

// OpenFile opens a magic link in /proc/PID, such as "exe" or "fd/3", with O_PATH: opening a device, a FIFO or a file of a file
// system in user space could have side effects or block. The caller closes the descriptor.
func OpenFile(pid int, name string) (fd int, err error) { return openFile(pid, name, unix.O_PATH) }

// OpenRoot opens the process's root directory (proc_pid_root(5)). It fails with [ErrGone] if the process has ended, because
// its PID may be in use again. The caller closes the descriptor.
func (p *Process) OpenRoot() (int, error) {
	fd, err := OpenFile(p.PID, "root")
	if p.Exited() {
		if err == nil {
			unix.Close(fd)
		}
		return -1, ErrGone
	}
	return fd, err
}
