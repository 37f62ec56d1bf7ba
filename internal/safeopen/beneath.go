package safeopen

import (
	"iter"

	"golang.org/x/sys/unix"
)

// Beneath opens a path beneath a directory. The kernel resolves it in one step, in which it neither leaves the
// directory nor follows a symbolic link, whatever other processes change in the meantime (openat2(2)). resolve has
// further RESOLVE flags. Opening a FIFO does not block, and a terminal does not become the controlling one. The
// directory -1 does not exist.
func Beneath(dir int, name string, flags int, mode uint32, resolve uint64) (int, error) {
	if dir == -1 {
		return -1, unix.ENOENT
	}
	flags |= unix.O_NOFOLLOW
	if flags&unix.O_PATH == 0 { // which allows no other flags
		flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	// Do not retry on EAGAIN: without "..", only a lease causes it, and its owner can take it again as often
	// as we retry.
	return openat2(dir, name, flags, mode, resolve|unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS, 1)
}

// InRoot opens a path as a process with this root directory would: symbolic links are followed, but never lead
// out of it. Magic links of /proc, which could, are not followed.
//
// It retries on EAGAIN, which openat2(2) returns for a path with "..", or beyond a link, when anything on the machine
// is renamed or mounted at the same time. A lease also causes EAGAIN, so the attempts are bounded.
func InRoot(root int, name string, flags int, resolve uint64) (int, error) {
	const tries = 1000 // of about a microsecond each
	return openat2(root, name, flags, 0, resolve|unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS, tries)
}

func openat2(dir int, name string, flags int, mode uint32, resolve uint64, tries int) (fd int, err error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: resolve}
	for {
		if fd, err = unix.Openat2(dir, name, &how); err == unix.EAGAIN {
			tries--
		}
		if err != unix.EINTR && (err != unix.EAGAIN || tries == 0) {
			return fd, err
		}
	}
}

// ReadNames iterates over the names in a directory. It moves the descriptor's offset. A removed directory has
// no names.
func ReadNames(dir int) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		if _, err := unix.Seek(dir, 0, unix.SEEK_SET); err != nil {
			yield("", err)
			return
		}
		for buf := make([]byte, 32<<10); ; {
			n, err := unix.ReadDirent(dir, buf)
			switch {
			case err == unix.EINTR:
				continue
			case err == unix.ENOENT, err == nil && n == 0:
				return
			case err != nil:
				yield("", err)
				return
			}
			_, _, found := unix.ParseDirent(buf[:n], -1, nil)
			for _, name := range found {
				if !yield(name, nil) {
					return
				}
			}
		}
	}
}
