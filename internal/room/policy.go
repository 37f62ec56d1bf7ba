package room

import (
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Network is what of the network the payload sees.
type Network string

const (
	NetNone Network = "none" // a network namespace of its own, with loopback only
	NetHost Network = "host" // the caller's, abstract unix sockets included
)

// Cwd is what of the caller's current directory the payload sees, at its own path.
type Cwd string

const (
	CwdReadOnly  Cwd = "ro" // it can be read
	CwdReadWrite Cwd = "rw" // it can be written to, too
	CwdNone      Cwd = "none"
	CwdOverlay   Cwd = "overlay" // it can be written to, and stays as it is: see [Overlay]
)

// MountKind is how a [Mount] appears.
type MountKind int

const (
	ReadOnly  MountKind = iota // a bind that cannot be written through
	ReadWrite                  // a bind
	Tmpfs                      // empty, private, in memory
	Empty                      // in the place of a file, one with nothing in it
	Overlaid                   // a directory that can be written to, and stays as it is: see [Overlay]
)

// Mount is one thing the user wants to see in the sandbox.
type Mount struct {
	Kind   MountKind
	Source string // binds: absolute path on the host
	// Here is Source relative to the current directory, if that is how the caller named it: the
	// source is opened from there, whatever the path of the current directory leads to by now.
	Here string
	// Dest is an absolute path in the sandbox. The mount at / takes the place of the host's system; it
	// is ReadOnly or Overlaid.
	Dest string
	Try  bool  // leave it out if Source does not exist
	Size int64 // Tmpfs, Overlaid in memory: bytes, 0 for Policy.TmpSize
	// Upper, of an Overlaid one, is a directory on disk for what is written, absolute; "" for
	// memory. Overlaid ones with the same Upper share it.
	Upper string
	// Lower are directories of the host, absolute, that lie between Source and what is written,
	// the uppermost first: layers of others, which nothing writes to.
	Lower []string
	Since time.Time // Overlaid: when Source was looked at first, for [Overlay]; now if it is zero
	Mode  string    // Overlaid: permissions of Dest in octal; those of Source if it is ""
	Git   bool      // ReadWrite: see Policy.Git
	Owned bool      // ReadOnly: what belongs to the source's owner is the sandbox's own, as with ReadWrite
	// In is the Dest of a bind that Source is a part of. Its owner takes the place of Source's.
	In string
}

// User is an identity inside the sandbox.
type User struct{ UID, GID uint32 }

// noID is what no user and no group has as its id.
const noID = 1<<32 - 1

// Policy is what the payload may see and be. The zero value of a member is the
// default, which is the strictest.
type Policy struct {
	Command  []string // empty for a room that waits for commands
	Cwd      Cwd      // "" for read-only, and for none if there is a Workdir
	CwdRoot  string   // a directory at or above the current one, to be shown in its place; may be relative to it
	Workdir  string   // absolute, in the sandbox; "" for the current directory, or Home if that is not shown
	Mounts   []Mount
	CwdUpper string // CwdOverlay: as Mount.Upper
	// Protect are absolute paths in the sandbox, below writable binds, that the command cannot
	// change.
	Protect []string
	// Git: the command cannot change the hooks and the configuration of the git repository that the
	// current directory belongs to.
	Git     bool
	Tools   string // in the place of the caller's PATH, if that is shown
	TmpSize int64  // bytes, of /tmp and of every other writable part
	Env     values.Environment
	// Captured: the command's output is collected, so Python is to write it at once. Otherwise what it has
	// buffered is lost at a deadline.
	Captured bool
	// Put are paths of files that will be copied in before the command runs; relative ones to Workdir.
	Put     []string
	Network Network
	// Alone: nothing but the command will enter the room. Then it is the command that gets the network
	// namespace, on its way in, and the room has the caller's: that is quicker.
	Alone    bool
	User     *User
	Hostname string
	NoFilter bool       // all system calls are there: no seccomp filter
	Meminfo  []byte     // in the place of /proc/meminfo; nil for the host's
	Hold     []*os.File // stay open as long as anything of the room lives; the caller's to close
	Terminal bool       // the payload's stdin becomes its controlling terminal
}

// Defaults of a policy.
const (
	DefaultTmpSize  = 256 << 20
	DefaultHostname = "sandbox"
	Home            = "/home/sandbox" // HOME of the payload, a tmpfs
	UserName        = "sandbox"       // USER of the payload
	// Nobody is what the sandbox of a run started by root runs under.
	Nobody = 65534
)

// ParseBind parses SRC[:DST], relative to dir; with no dir a relative SRC is an error. A colon or backslash that
// belongs to a path is written \: or \\. DST must be absolute; without it the
// source appears at its own path.
func ParseBind(arg, dir string) (source, dest string, err error) {
	parts := SplitColon(arg)
	switch {
	case len(parts) > 2:
		return "", "", fmt.Errorf("bind %q: want SRC or SRC:DST, with \\: for a colon in a path", arg)
	case parts[0] == "":
		return "", "", fmt.Errorf("bind %q: the source is empty", arg)
	}
	source = parts[0]
	if !path.IsAbs(source) {
		if dir == "" {
			return "", "", fmt.Errorf("bind %q: the current directory was removed, or cannot be reached; give an absolute path", arg)
		}
		source = path.Join(dir, source)
	}
	source = path.Clean(source)
	dest = source
	if len(parts) == 2 {
		dest = parts[1]
	}
	place := dest
	if dest, err = CleanDest(place); err != nil {
		if !path.IsAbs(place) {
			err = fmt.Errorf("%w; write \\: for a colon that belongs to a path", err)
		}
		return "", "", fmt.Errorf("bind %q: %w", arg, err)
	}
	return source, dest, nil
}

// ParseTmpfs parses DST[:SIZE]; size is left to the caller's parser.
func ParseTmpfs(arg string) (dest, size string, err error) {
	parts := SplitColon(arg)
	if len(parts) > 2 {
		return "", "", fmt.Errorf("tmpfs %q: want DST or DST:SIZE, with \\: for a colon in a path", arg)
	}
	if dest, err = CleanDest(parts[0]); err != nil {
		return "", "", fmt.Errorf("tmpfs %q: %w", arg, err)
	}
	if len(parts) == 2 {
		size = parts[1]
	}
	return dest, size, nil
}

// ParseVolume parses NAME:DST[:ro].
func ParseVolume(arg string) (name, dest string, readOnly bool, err error) {
	parts := SplitColon(arg)
	switch {
	case len(parts) == 3 && parts[2] == "ro":
		readOnly = true
	case len(parts) != 2:
		return "", "", false, fmt.Errorf("volume %q: want NAME:DST or NAME:DST:ro, with \\: for a colon in a path", arg)
	}
	if dest, err = CleanDest(parts[1]); err != nil {
		return "", "", false, fmt.Errorf("volume %q: %w", arg, err)
	}
	return parts[0], dest, readOnly, nil
}

// CleanDest checks a place in the sandbox. / would hide everything else, and
// /proc and /dev must be the sandbox's own: the host's would show its processes
// and devices.
func CleanDest(dest string) (string, error) {
	if !path.IsAbs(dest) {
		return "", fmt.Errorf("the path in the sandbox, %q, must be absolute", dest)
	}
	dest = path.Clean(dest)
	if dest == "/" || dest == "/dev" || Within(dest, "/proc") || Within(dest, enter.LayersDir) || Within(dest, enter.RootDir) {
		return "", fmt.Errorf("%s of the sandbox cannot be replaced", dest)
	}
	// Links that bwrap makes in /dev, into /proc.
	for _, link := range []string{"/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/core", "/dev/ptmx"} {
		if Within(dest, link) {
			return "", fmt.Errorf("%s of the sandbox is a symbolic link", link)
		}
	}
	return dest, nil
}

// SplitColon splits at unescaped colons and removes the escapes.
func SplitColon(s string) []string {
	parts := []string{""}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == ':':
			parts = append(parts, "")
			continue
		case c == '\\' && i+1 < len(s) && (s[i+1] == ':' || s[i+1] == '\\'):
			i++
		}
		parts[len(parts)-1] += s[i : i+1]
	}
	return parts
}

// CheckWorkdir refuses a relative path as working directory. "" is none.
func CheckWorkdir(dir string) error {
	if dir == "" || path.IsAbs(dir) {
		return nil
	}
	e := &result.Error{Code: "usage", Message: fmt.Sprintf("working directory %q: must be an absolute path in the sandbox", dir)}
	if e.Hint = `write --workdir "$PWD"`; path.Clean(dir) != "." {
		e.Hint += "/" + shellQuote(dir)
	}
	return e
}

// Shows reports whether the payload sees a real path of the host, at the same place.
func (p *Policy) Shows(name string) bool {
	for _, top := range toplevel {
		if p.rootMount() == nil && Within(name, top) {
			return true
		}
	}
	for _, m := range p.Mounts {
		if m.Source == m.Dest && Within(name, m.Dest) {
			return true
		}
	}
	if p.Cwd == CwdNone || p.Workdir != "" && p.Cwd == "" && p.CwdRoot == "" {
		return false
	}
	dir, err := unix.Getwd()
	if err == nil && p.CwdRoot != "" {
		dir, err = aboveDirectory(p.CwdRoot, dir)
	}
	return err == nil && dir != "/" && Within(name, dir)
}

// validate finds what no machine could run.
func (p *Policy) validate() error {
	usage := func(format string, args ...any) error {
		return &result.Error{Code: "usage", Message: fmt.Sprintf(format, args...)}
	}
	for _, arg := range p.Command {
		if strings.IndexByte(arg, 0) >= 0 {
			return usage("argument %.40q holds a NUL byte", arg)
		}
	}
	if err := CheckWorkdir(p.Workdir); err != nil {
		return err
	}
	seen, sizes := map[string]bool{}, p.TmpSize
	for _, m := range p.Mounts {
		sizes = min(sizes, m.Size)
		if seen[m.Dest] {
			return usage("%q is given twice as a destination in the sandbox", m.Dest)
		}
		seen[m.Dest] = true
		if m.Dest == "/" && m.Kind != ReadOnly && m.Kind != Overlaid {
			return usage("a root directory is read-only, or the lowest layer of an overlay")
		}
		if strings.IndexByte(m.Source+m.Dest, 0) >= 0 {
			return usage("path %q holds a NUL byte", m.Source+m.Dest)
		}
	}
	if sizes < 0 {
		return usage("size %d of a directory in memory is negative", sizes)
	}
	// To system calls it means: leave the id as it is, which is root's (setresuid(2)).
	if u := p.User; u != nil && (u.UID == noID || u.GID == noID) {
		return usage("user %d:%d: %d is no id", u.UID, u.GID, uint32(noID))
	}
	if h := p.Hostname; len(h) > 64 || strings.ContainsAny(h, "\x00\n/ ") {
		return usage("host name %q: want at most 64 bytes, without slash, space, line break or NUL", h)
	}
	switch p.Cwd {
	case "", CwdReadOnly, CwdReadWrite, CwdOverlay:
	case CwdNone:
		if p.CwdRoot != "" {
			return usage("--cwd none shows nothing of the current directory, and --cwd-root more than it: give one of them")
		}
	default:
		return usage("--cwd %q: want ro, rw, overlay or none", p.Cwd)
	}
	switch p.Network {
	case "", NetNone, NetHost:
	default:
		return usage("network %q: want none or host", p.Network)
	}
	return nil
}
