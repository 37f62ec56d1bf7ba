package state

import (
	"encoding/json"
	"os"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// Room describes how to enter a room. The record of a sandbox contains it as JSON, without Init.
// Its variables may be secrets.
type Room struct {
	Init    *os.File       `json:"-"`      // pidfd of the room's PID 1
	User    proc.Cred      `json:"user"`   // identity of the room's processes, as seen from outside
	Net     string         `json:"net"`    // network of the room: "none", "host" for the caller's, or "allow" for listed hosts
	Filter  seccomp.Filter `json:"filter"` // for system calls
	Limits  limits.Request `json:"limits"` // of each process: FSize, NoFile, Stack, Nice and OOMScoreAdj; and CPUs, which they see
	Cgroups []string       `json:"-"`      // directories of the room's cgroups, if it has limits
	Env     []string       `json:"-"`      // NAME=VALUE
	Dir     string         `json:"-"`      // default working directory
}

// Cred returns the identity to take on before entering the room; nil if it is this process's own.
func (r *Room) Cred() *proc.Cred {
	if int(r.User.UID) == os.Geteuid() {
		return nil
	}
	cred := r.User
	return &cred
}

// roomJSON is a Room with paths and variables in base64, because they may have any bytes.
type roomJSON struct {
	fields
	Cgroups [][]byte `json:"cgroups,omitempty"`
	Env     [][]byte `json:"env,omitempty"`
	Dir     []byte   `json:"dir"`
}

type fields Room // without methods

// MarshalJSON implements [json.Marshaler].
func (r Room) MarshalJSON() ([]byte, error) {
	return json.Marshal(roomJSON{fields(r), Convert[[]byte](r.Cgroups), Convert[[]byte](r.Env), []byte(r.Dir)})
}

// UnmarshalJSON implements [json.Unmarshaler].
func (r *Room) UnmarshalJSON(text []byte) error {
	var in roomJSON
	err := json.Unmarshal(text, &in)
	*r = Room(in.fields)
	r.Cgroups, r.Env, r.Dir = Convert[string](in.Cgroups), Convert[string](in.Env), string(in.Dir)
	return err
}

// Convert converts strings to bytes, which JSON encodes in base64, or back.
func Convert[To, From string | []byte](list []From) (to []To) {
	for _, s := range list {
		to = append(to, To(s))
	}
	return to
}
