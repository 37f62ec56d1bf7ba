package bwrap

import (
	"cmp"
	"fmt"
	"path"

	"github.com/sbxrun/sbxrun/internal/room"
)

// Policy describes what a sandbox shows and how commands run in it. The zero value is the strictest policy.
type Policy struct {
	Mounts []Mount // host files, and more directories in memory
	// TmpSize is the size in bytes of /tmp and of each other writable directory in memory; 0 for 256 MiB.
	TmpSize int64
	Network Network
	// Env adds variables, as NAME=VALUE, to the sandbox's PATH, HOME and USER. Unless Env sets PATH, it
	// contains the directories of this process's PATH that the sandbox shows. Nothing else comes from the
	// environment of this process.
	Env      []string
	Dir      string // working directory, absolute; "" for the sandbox's home
	User     *User  // the command's identity inside; nil for an ordinary user
	Hostname string // "" for "sandbox"
	// AllSyscalls disables the seccomp filter (docs/security.md).
	AllSyscalls bool
}

// Network selects a sandbox's network.
type Network string

const (
	NoNetwork   Network = ""     // a new network namespace, with loopback only
	HostNetwork Network = "host" // the caller's network namespace, including abstract unix sockets
)

// Mount shows a file or directory of the host in the sandbox, read-only unless Writable is set. Without a Source it
// is an empty directory in memory.
type Mount struct {
	Source   string // on the host, absolute; "" for a directory in memory
	Dest     string // in the sandbox, absolute; "" for the path of Source
	Writable bool   // for a Source
	Optional bool   // skip the mount if Source does not exist
	Size     int64  // bytes, for a directory in memory; 0 for the policy's TmpSize
}

// User is an identity inside a sandbox. Outside, the sandbox's processes have the caller's identity. If the caller is
// root, they have this identity outside as well and can access this user's files; if User is root, they run as
// nobody (65534).
type User struct{ UID, GID uint32 }

// plan prepares a sandbox. The caller closes the plan.
func (p *Policy) plan(command []string, captured bool) (*room.Plan, error) {
	in := room.Policy{
		Command: command, Captured: captured, Cwd: room.CwdNone, Workdir: p.Dir, TmpSize: p.TmpSize, Network: room.NetNone, Alone: true, Hostname: p.Hostname, NoFilter: p.AllSyscalls,
	}
	switch p.Network {
	case NoNetwork:
	case HostNetwork:
		in.Network = room.NetHost
	default:
		return nil, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: unknown Network %q", string(p.Network))}
	}
	if p.User != nil {
		in.User = &room.User{UID: p.User.UID, GID: p.User.GID}
	}
	if err := in.Env.PutPairs(p.Env); err != nil {
		return nil, err
	}
	for _, m := range p.Mounts {
		out, err := m.room()
		if err != nil {
			return nil, err
		}
		in.Mounts = append(in.Mounts, out)
	}
	return room.Prepare(in, room.ThisCaller())
}

// room converts m for package room.
func (m Mount) room() (room.Mount, error) {
	out := room.Mount{Kind: room.ReadOnly, Try: m.Optional, Size: m.Size}
	switch {
	case m.Source == "" && m.Writable, m.Source == "" && m.Optional, m.Source != "" && m.Size != 0:
		return out, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: Mount %q: Writable and Optional require a Source, and Size excludes one", m.Dest)}
	case m.Source == "":
		out.Kind = room.Tmpfs
	case !path.IsAbs(m.Source):
		return out, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: Mount %q: Source is not an absolute path", m.Source)}
	case m.Writable:
		out.Kind = room.ReadWrite
	}
	if m.Source != "" {
		out.Source = path.Clean(m.Source)
	}
	var err error
	if out.Dest, err = room.CleanDest(cmp.Or(m.Dest, m.Source)); err != nil {
		return out, &Error{Code: "usage", Message: "bwrap: Mount: " + err.Error()}
	}
	return out, nil
}
