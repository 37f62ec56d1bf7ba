// Package public decides which parts of the host's /etc and /var/lib a sandbox shows: the public configuration and data
// of installed programs.
//
// An entry is shown if it belongs to root, only root can write to it, and everybody can read it. A file must be on a list
// of names (publicFile). The name of a directory must not look like a credential, and it must belong to a program:
// /usr/share or /usr/lib has an entry of the same name, or, for NAME and NAME.d in /etc, /usr/bin/NAME exists. Nothing
// that denied or deniedData name is ever shown. Below a shown directory the modes of files decide, as for any user of the
// host.
//
// Every sandbox pays for this search, so it makes as few system calls as possible.
package public

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/values"
)

// Bounds of the search: the number of directory entries, and the size of a checked file.
const (
	manyPublic = 4000
	maxPublic  = 16 << 10
)

// nobody is the uid to which root is mapped in some user namespaces.
const nobody = 65534

// search collects the visible parts.
type search struct {
	root   uint32   // root's uid as seen from here
	uid    uint32   // the sandbox runs as this user
	groups []int    // and has these groups, in addition to the user's own
	dests  []string // destinations of other mounts
	left   int
	buf    []byte
	parts  []Part
}

// Programs returns the parts of installed programs for a sandbox that runs as user uid of the host and keeps these
// supplementary groups. Nothing is shown at dests, where other mounts are.
func Programs(uid uint32, groups []int, dests []string) []Part {
	s := search{left: manyPublic, buf: make([]byte, maxPublic), uid: uid, groups: groups, dests: dests}
	if s.enter("/etc") {
		s.add("/etc", denied, true)
		s.takenFrom("/etc", 0)
	}
	if etc := len(s.parts); s.enter("/var/lib") && s.add("/var/lib", deniedData, false) && len(s.parts) > etc+1 {
		s.takenFrom("/var/lib", etc)
	}
	s.manPages()
	return s.parts
}

// manPages adds the index of man pages, for whatis(1) and apropos(1). It belongs to the account that makes it.
func (s *search) manPages() {
	const dir, accounts = "/var/cache/man", 1000 // accounts below this number are the system's
	var st unix.Stat_t
	if unix.Lstat(dir, &st) == nil && st.Mode&(unix.S_IFMT|0o007) == unix.S_IFDIR|0o005 && (st.Uid < accounts || st.Uid == s.root) &&
		!slices.ContainsFunc(s.dests, func(dest string) bool { return values.Within(dest, dir) }) {
		s.bind(dir, false)
	}
}

// takenFrom sets the tree of the parts from this number on.
func (s *search) takenFrom(tree string, first int) {
	for i := range s.parts[first:] {
		s.parts[first+i].Tree = tree
	}
}

// enter reports whether a directory of the system belongs to root.
func (s *search) enter(dir string) bool {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil || st.Uid != 0 && st.Uid != nobody { // root is unmapped in some user namespaces
		return false
	}
	s.root = st.Uid
	return true
}

// add adds the entries of a directory. It reports whether the directory as a whole can be bound: with the file systems
// of containers in it, a bind would include these, and keep the engine from unmounting them.
func (s *search) add(dir string, denied func(name string) bool, etc bool) (whole bool) {
	whole = true
	for _, e := range s.list(dir) {
		if e.kind == unix.DT_REG {
			if public, checked := publicFile(e.name); etc && public && s.readable(dir+"/"+e.name, checked) {
				s.bind(dir+"/"+e.name, true)
			}
			continue
		}
		whole = whole && !slices.Contains(engineDirs, e.name)
		program, parts := strings.CutSuffix(e.name, ".d")
		if denied(program) || strings.HasSuffix(e.name, "-") || secretName(e.name) {
			continue
		}
		name := dir + "/" + e.name
		switch {
		case slices.Contains(s.dests, name):
		case e.kind == unix.DT_LNK && etc && !parts:
			if target, ok := link(name); ok {
				s.parts = append(s.parts, Part{Name: name, Target: target})
			}
		case e.kind == unix.DT_DIR && (!parts && ofProgram(program) || etc && unix.Access("/usr/bin/"+program, unix.F_OK) == nil):
			s.show(name)
		}
	}
	return whole
}

// bind adds a file or directory.
func (s *search) bind(name string, file bool) {
	s.parts = append(s.parts, Part{Name: name, File: file})
}

// readable reports whether everybody can read a file in /etc and only root can change it. If checked is true, its text
// must not look like a credential either.
func (s *search) readable(name string, checked bool) bool {
	var st unix.Stat_t
	if slices.Contains(s.dests, name) || unix.Lstat(name, &st) != nil || !s.ofRoot(&st) || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o004 == 0 {
		return false
	}
	if !checked {
		return true
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	n, err := unix.Read(fd, s.buf)
	unix.Close(fd)
	return err == nil && n < len(s.buf) && !secretText(s.buf[:n])
}

// ofRoot reports whether only root can change a file or directory.
func (s *search) ofRoot(st *unix.Stat_t) bool {
	return st.Uid == s.root && st.Mode&0o002 == 0 && (st.Mode&0o020 == 0 || st.Gid == 0 || st.Gid == nobody && s.root == nobody)
}

// show adds a directory, or its entries one by one if an entry is hidden or the destination of another mount. It
// examines the entries only for a user whose groups let the sandbox read more than everybody can.
func (s *search) show(dir string) {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil || !s.ofRoot(&st) || st.Mode&0o005 != 0o005 {
		return
	}
	whole := !slices.ContainsFunc(s.dests, func(dest string) bool { return len(dest) > len(dir) && values.Within(dest, dir) })
	if whole && len(s.groups) == 0 {
		s.bind(dir, false)
		return
	}
	first := len(s.parts)
	for _, e := range s.list(dir) {
		name := dir + "/" + e.name
		p := Part{Name: name, File: e.kind != unix.DT_DIR}
		switch {
		case slices.Contains(s.dests, name):
			continue
		case e.kind == unix.DT_LNK:
			var err error
			if p.Target, err = os.Readlink(name); err != nil {
				continue
			}
		case unix.Lstat(name, &st) != nil || s.closed(&st):
			continue
		case e.kind != unix.DT_REG && e.kind != unix.DT_DIR || secretName(e.name) || !s.ofRoot(&st) || st.Mode&0o004 == 0:
			whole = false
			continue
		}
		s.parts = append(s.parts, p)
	}
	if whole {
		s.parts = s.parts[:first]
		s.bind(dir, false)
	}
}

// closed reports whether the kernel keeps the sandbox from reading a file or directory.
func (s *search) closed(st *unix.Stat_t) bool {
	return st.Mode&0o004 == 0 && st.Uid != s.uid && (st.Mode&0o040 == 0 || !slices.Contains(s.groups, int(st.Gid)))
}

// entry is a directory entry, as from getdents(2).
type entry struct {
	name string
	kind uint8
}

// list returns the entries of a directory; nil if it cannot be read or has too many.
func (s *search) list(dir string) (list []entry) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	list = make([]entry, 0, 160)
	for {
		n, err := unix.Getdents(fd, s.buf)
		if err != nil {
			return nil
		}
		if n <= 0 {
			return list
		}
		for at := 0; at < n; {
			d := (*unix.Dirent)(unsafe.Pointer(&s.buf[at]))
			text := s.buf[at+int(unsafe.Offsetof(d.Name)) : at+int(d.Reclen)]
			at += int(d.Reclen)
			end := bytes.IndexByte(text, 0)
			e := entry{string(text[:max(end, 0)]), d.Type}
			if e.name == "." || e.name == ".." || end < 0 {
				continue
			}
			if e.kind == unix.DT_UNKNOWN {
				var st unix.Stat_t
				if unix.Fstatat(fd, e.name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
					continue
				}
				e.kind = uint8(st.Mode & unix.S_IFMT >> 12)
			}
			if s.left--; s.left < 0 {
				return nil
			}
			list = append(list, e)
		}
	}
}
