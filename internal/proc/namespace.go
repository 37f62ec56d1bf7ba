package proc

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Namespace is the inode of a namespace of the process: type "pid", "user" ….
func Namespace(pid int, kind string) (inode uint64, err error) {
	var st unix.Stat_t
	err = look("stat", pid, "ns/"+kind, func(path string) error { return unix.Stat(path, &st) })
	return st.Ino, err
}

// OpenNamespace opens one, and with it holds it. The caller closes it.
func OpenNamespace(pid int, kind string) (fd int, err error) {
	return openFile(pid, "ns/"+kind, unix.O_RDONLY)
}

// NamespaceOwner returns the user namespace that one of the process's namespaces belongs to. The caller
// closes it.
func (p *Process) NamespaceOwner(kind string) (*os.File, error) {
	fd, err := OpenNamespace(p.PID, kind)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if p.Exited() {
		return nil, ErrGone // so it may be another's
	}
	owner, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS) // ioctl_ns(2), Linux 4.9
	if err != nil {
		return nil, fmt.Errorf("ask for the user namespace of /proc/%d/ns/%s: %w", p.PID, kind, err)
	}
	return os.NewFile(uintptr(owner), "user namespace"), nil
}

// openFile opens a file in /proc/PID; -1 with an error.
func openFile(pid int, name string, flags int) (fd int, err error) {
	fd = -1
	err = look("open", pid, name, func(path string) (err error) {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// look does something with a file in /proc/PID, in the place of that process's owner if need be.
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

// asOwner calls f with the effective user and group id of a process, if we are
// root. To look into a process takes CAP_SYS_PTRACE in the user namespace of that
// process (ptrace(2), PTRACE_MODE_READ_FSCREDS). Who has made that namespace has it,
// but root, in the usual container, is neither that one nor has it elsewhere.
//
// The ids are those of this thread alone (credentials(7)). Nobody else can do more to
// us for it: signals and attaching go by the real and the saved ids as well. f must stay
// on the thread, and neither fork nor make descriptors by package os, which takes
// [syscall.ForkLock].
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
	// One at a time, or the second would take the flag that the first has changed for what
	// is to be put back. And no fork: it would inherit these ids, and the flag.
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Changed ids make all of the process undumpable, and those who look for us, with
	// no more rights than we have, could not tell who we are (prctl(2)).
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(dumpable), 0, 0, 0) }() // as it was is always allowed
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

// setEffective sets an effective id. Not by package syscall, which sets those of all
// threads.
func setEffective(call uintptr, id int) error {
	const keep = ^uintptr(0)
	if _, _, errno := syscall.RawSyscall(call, keep, uintptr(id), keep); errno != 0 {
		return errno
	}
	return nil
}

// restore undoes setEffective. That is always allowed; and without it this thread must
// not go on.
func restore(call uintptr, id int) {
	if err := setEffective(call, id); err != nil {
		panic("the effective ids cannot be restored: " + err.Error())
	}
}

// OpenFile opens a file in /proc/PID that stands for another one, "exe" or "fd/3", without
// opening that one (O_PATH): a device, a FIFO or a file system in user space could do
// something about it, or keep us waiting. The caller closes it.
func OpenFile(pid int, name string) (fd int, err error) { return openFile(pid, name, unix.O_PATH) }

// OpenRoot opens the root directory that a process has (proc_pid_root(5)). [ErrGone]: it has ended,
// and so its number may have been another's already. The caller closes the descriptor.
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
