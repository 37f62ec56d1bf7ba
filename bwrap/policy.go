package bwrap

import (
	"cmp"
	"fmt"
	"path"

	"github.com/sbxrun/sbxrun/internal/room"
)

// Policy is what a sandbox shows, and what a command in it may be. The zero value is the
// strictest.
type Policy struct {
	Mounts []Mount // of the host, and more directories in memory
	// TmpSize is the size of /tmp, and of every other part that can be written, in bytes;
	// 0 for 256 MiB. They are in memory.
	TmpSize int64
	Network Network
	// Env is NAME=VALUE for each variable that is added to PATH, HOME and USER of the
	// sandbox. Nothing comes from the environment of this process but PATH, unless it is
	// given here: of that, the directories that the sandbox shows.
	Env      []string
	Dir      string // where the command begins, absolute; "" for the sandbox's home
	User     *User  // who the command is, inside; nil for an ordinary user
	Hostname string // "" for "sandbox"
	// AllSyscalls leaves out the filter for system calls (docs/security.md).
	AllSyscalls bool
}

// Network is what of the network a sandbox has.
type Network string

const (
	NoNetwork   Network = ""     // a network namespace of its own, with loopback only
	HostNetwork Network = "host" // that of this process, abstract unix sockets included
)

// Mount is a file or directory of the host in the sandbox; or, without a Source, an empty
// directory in memory. It cannot be written to unless that is asked for.
type Mount struct {
	Source   string // on the host, absolute; "" for a directory in memory
	Dest     string // in the sandbox, absolute; "" for the same place
	Writable bool   // of a Source
	Optional bool   // it is left out if there is no Source
	Size     int64  // bytes, of a directory in memory; 0 for the policy's TmpSize
}

// User is an identity inside a sandbox. Outside it is the caller's. If that is root, it is this
// user outside as well, whose files it may then read and write; and nobody (65534) in place of root.
type User struct{ UID, GID uint32 }

// plan decides in every detail how bubblewrap will be called. The caller closes it.
func (p *Policy) plan(command []string, captured bool) (*room.Plan, error) {
	in := room.Policy{
		Command: command, Captured: captured, Cwd: room.CwdNone, Workdir: p.Dir, TmpSize: p.TmpSize, Network: room.NetNone, Alone: true, Hostname: p.Hostname, NoFilter: p.AllSyscalls,
	}
	switch p.Network {
	case NoNetwork:
	case HostNetwork:
		in.Network = room.NetHost
	default:
		return nil, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: there is no Network %q", string(p.Network))}
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

// room is the mount as package room has it.
func (m Mount) room() (room.Mount, error) {
	out := room.Mount{Kind: room.ReadOnly, Try: m.Optional, Size: m.Size}
	switch {
	case m.Source == "" && m.Writable, m.Source == "" && m.Optional, m.Source != "" && m.Size != 0:
		return out, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: Mount %q: Writable and Optional are for a Source, Size is for a directory in memory", m.Dest)}
	case m.Source == "":
		out.Kind = room.Tmpfs
	case !path.IsAbs(m.Source):
		return out, &Error{Code: "usage", Message: fmt.Sprintf("bwrap: Mount %q: the Source is not absolute", m.Source)}
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
