package room

import (
	"errors"
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

// Network selects the payload's network.
type Network string

const (
	NetNone Network = "none" // a new network namespace, with loopback only
	NetHost Network = "host" // the caller's network namespace, including abstract unix sockets
)

// Cwd selects how the payload sees the caller's current directory, at the same path.
type Cwd string

const (
	CwdReadOnly  Cwd = "ro"
	CwdReadWrite Cwd = "rw"
	CwdNone      Cwd = "none"
	CwdOverlay   Cwd = "overlay" // copy-on-write: see [Overlay]
)

// MountKind is how a [Mount] appears.
type MountKind int

const (
	ReadOnly  MountKind = iota // a read-only bind
	ReadWrite                  // a writable bind
	Tmpfs                      // an empty directory in memory
	Empty                      // an empty file that covers another
	Overlaid                   // a copy-on-write directory: see [Overlay]
	device                     // a device node: see [Policy].Devices
)

// Mount is a mount that the user requested.
type Mount struct {
	Kind   MountKind
	Source string // binds: absolute path on the host
	// Here is Source relative to the current directory, if the caller named it that way. The source is then opened
	// from the current directory, whose path may lead elsewhere by now.
	Here string
	// Dest is an absolute path in the sandbox. A mount at / replaces the host's system and must be ReadOnly or Overlaid.
	Dest string
	Try  bool  // leave it out if Source does not exist
	Size int64 // Tmpfs, Overlaid in memory: bytes, 0 for Policy.TmpSize
	// Upper of an Overlaid mount is an absolute path on disk for the changes; "" keeps them in memory. Overlaid mounts
	// with the same Upper share it.
	Upper string
	// Lower are further read-only layers between Source and the changes, absolute paths on the host, the uppermost
	// first.
	Lower []string
	Since time.Time // Overlaid: the time when Source was first examined, for [Overlay]; zero for now
	Mode  string    // Overlaid: permissions of Dest in octal; "" for Source's
	Git   bool      // ReadWrite: see Policy.Git
	Image string    // digest of the image whose tree is at /; "" for another directory
	Owned bool      // ReadOnly: map the source's owner to the sandbox's identity, as for ReadWrite
	// In is the Dest of the bind that contains Source. That bind's owner is mapped, not Source's.
	In string
}

// User is an identity inside the sandbox.
type User struct{ UID, GID uint32 }

// noID is not a valid ID of a user or group.
const noID = 1<<32 - 1

// Policy describes what the payload sees and with which identity it runs. The zero values are the strictest.
type Policy struct {
	Command  []string // empty for a room that waits for commands
	Cwd      Cwd      // "" for read-only, or for none if Workdir is set
	CwdRoot  string   // show this directory, at or above the current one, instead; may be relative to it
	Workdir  string   // absolute path in the sandbox; "" for the current directory, or Home if that is hidden
	Mounts   []Mount
	CwdUpper string // CwdOverlay: as Mount.Upper
	// Protect are absolute paths in the sandbox, below writable binds, that the command cannot
	// change.
	Protect []string
	// Git protects the hooks and the configuration of the git repository of the current directory.
	Git     bool
	Tools   string // replaces the caller's PATH if not ""
	TmpSize int64  // bytes, of /tmp and of each other writable directory in memory
	// Base has the variables of the caller and the image. Variables of devices override Base, and Env overrides both.
	Base, Env values.Environment
	// Captured reports that sbxrun collects the command's output. Python then runs unbuffered, because buffered output
	// is lost at a deadline.
	Captured bool
	// Put are destinations of files that are copied in before the command runs. Relative paths start at Workdir.
	Put     []string
	Network Network
	// Alone reports that no other command will enter the room. Then the entering process creates the command's network
	// namespace, and the room keeps the caller's, which is faster.
	Alone  bool
	User   *User
	Inside *User // identity inside the sandbox only, if User is nil
	// Devices are the names of devices, valid by [devices.Check]: CDI names, or paths of character devices.
	Devices  []string
	Hostname string
	NoFilter bool       // no seccomp filter
	Meminfo  []byte     // contents of /proc/meminfo; nil for the host's
	Hold     []*os.File // stay open while any process of the room lives; the caller closes them
	Terminal bool       // the payload's stdin becomes its controlling terminal
}

// Defaults of a policy.
const (
	DefaultTmpSize  = 256 << 20
	DefaultHostname = "sandbox"
	Home            = "/home/sandbox" // HOME of the payload, a tmpfs
	UserName        = "sandbox"       // USER of the payload
	// Nobody is the default uid of sandboxes that root starts.
	Nobody = 65534
)

// ParseBind parses SRC[:DST], relative to dir; with no dir a relative SRC is an error. A colon or backslash that
// belongs to a path is written \: or \\. DST must be absolute; without it the
// source appears at its own path.
func ParseBind(arg, dir string) (source, dest string, err error) {
	parts := values.SplitColon(arg)
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
	parts := values.SplitColon(arg)
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
	parts := values.SplitColon(arg)
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

// CleanDest checks and cleans a mount destination. A mount at / would hide everything else, and the host's /proc and
// /dev would expose its processes and devices.
func CleanDest(dest string) (string, error) {
	if !path.IsAbs(dest) {
		return "", fmt.Errorf("the path in the sandbox, %q, must be absolute", dest)
	}
	dest = path.Clean(dest)
	if dest == "/" || dest == "/dev" || values.Within(dest, "/proc") || values.Within(dest, enter.LayersDir) || values.Within(dest, enter.RootDir) {
		return "", fmt.Errorf("%s of the sandbox cannot be replaced", dest)
	}
	// Links into /proc that bwrap creates in /dev.
	for _, link := range []string{"/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/core", "/dev/ptmx"} {
		if values.Within(dest, link) {
			return "", fmt.Errorf("%s of the sandbox is a symbolic link", link)
		}
	}
	return dest, nil
}

// CheckWorkdir rejects a relative working directory. "" is valid.
func CheckWorkdir(dir string) error {
	if dir == "" || path.IsAbs(dir) {
		return nil
	}
	e := &result.Error{Code: "usage", Message: fmt.Sprintf("working directory %q: must be an absolute path in the sandbox", dir)}
	if e.Hint = `write --workdir "$PWD"`; path.Clean(dir) != "." {
		e.Hint += "/" + values.ShellQuote(dir)
	}
	return e
}

// Shows reports whether the payload sees a host path, which must not contain links, at the same path.
func (p *Policy) Shows(name string) bool {
	if p.rootMount() == nil && OfSystem(name) {
		return true
	}
	for _, m := range p.Mounts {
		if m.Source == m.Dest && values.Within(name, m.Dest) {
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
	return err == nil && dir != "/" && values.Within(name, dir)
}

// validate rejects policies that are invalid on every machine.
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
		if e, ok := errors.AsType[*result.Error](err); ok && p.Cwd == "" && p.CwdRoot == "" {
			e.Hint = strings.Replace(e.Hint, "--workdir", "--cwd ro --workdir", 1) // --workdir alone hides the current directory
		}
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
	// System calls take it as "no change", which would keep root's ID (setresuid(2)).
	if u := p.User; u != nil && (u.UID == noID || u.GID == noID) {
		return usage("user %d:%d: %d is not a valid ID", u.UID, u.GID, uint32(noID))
	}
	if h := p.Hostname; len(h) > 64 || strings.ContainsAny(h, "\x00\n/ ") {
		return usage("host name %q: want at most 64 bytes, without slash, space, line break or NUL", h)
	}
	switch p.Cwd {
	case "", CwdReadOnly, CwdReadWrite, CwdOverlay:
	case CwdNone:
		if p.CwdRoot != "" {
			return usage("--cwd none and --cwd-root exclude each other")
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
