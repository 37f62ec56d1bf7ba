package state

import (
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Access is what one needs to enter a sandbox. It is there from when the payload
// runs, for only then the sandbox is complete, and never changes. It has a file of its own because of the variables,
// which may be secrets and are for nobody to be shown, and because an exec is
// quicker without JSON.
type Access struct {
	Init    proc.Identity
	Cred    *proc.Cred // who the sandbox runs as, if not as sbxrun
	Net     string
	Workdir string
	Filter  string   // for system calls, by its name
	Cgroups []string // the sandbox's own, by their directories
	Env     []string // NAME=VALUE
}

// heldAccessName is the file while the payload is held.
const heldAccessName = ".access"

// accessVersion changes with the fields: nobody may enter by what he does not
// understand, a sandbox that an other version has started.
const accessVersion = "2"

// accessFields are the words before the cgroups, the last being their number. The
// variables follow.
const accessFields = 11

// WriteAccess writes down how the sandbox can be entered, for [Own.GrantAccess]: so
// what a full disk refuses is refused before the payload runs.
func (o *Own) WriteAccess(a Access) error {
	uid, gid := "", ""
	if a.Cred != nil {
		uid, gid = strconv.FormatUint(uint64(a.Cred.UID), 10), strconv.FormatUint(uint64(a.Cred.GID), 10)
	}
	words := []string{accessVersion, strconv.Itoa(a.Init.PID), strconv.FormatUint(a.Init.Start, 10), a.Init.BootID, strconv.FormatUint(a.Init.PIDNS, 10),
		uid, gid, a.Net, a.Workdir, a.Filter, strconv.Itoa(len(a.Cgroups))}
	words = append(words, a.Cgroups...)
	// Each word ends with a NUL, which none can hold; so a file that was cut is known.
	text := strings.Join(append(words, a.Env...), "\x00") + "\x00\n"
	return o.WriteFile(heldAccessName, []byte(text))
}

// GrantAccess makes the sandbox one that can be entered. It takes no space.
func (o *Own) GrantAccess() error { return failed(o.folder.rename(heldAccessName, accessName)) }

// DropAccess ends that, and with it what the variables hold.
func (o *Own) DropAccess() error { return failed(o.folder.unlink(accessName)) }

func parseAccess(text string) (a Access, err error) {
	text, whole := strings.CutSuffix(text, "\x00\n")
	words := strings.Split(text, "\x00")
	if !whole || len(words) < accessFields || words[0] != accessVersion {
		return Access{}, damaged("no access")
	}
	number := func(word string, bits int) uint64 {
		n, numberErr := strconv.ParseUint(word, 10, bits)
		if numberErr != nil {
			err = damaged("number %.80q", word)
		}
		return n
	}
	a.Init = proc.Identity{PID: int(number(words[1], 22)), Start: number(words[2], 64), BootID: words[3], PIDNS: number(words[4], 64)}
	if words[5] != "" {
		a.Cred = &proc.Cred{UID: uint32(number(words[5], 32)), GID: uint32(number(words[6], 32))}
	}
	a.Net, a.Workdir, a.Filter = words[7], words[8], words[9]
	rest := words[accessFields:]
	cgroups := int(number(words[10], 8))
	if cgroups > len(rest) {
		return Access{}, damaged("%d cgroups", cgroups)
	}
	if cgroups > 0 {
		a.Cgroups = rest[:cgroups]
	}
	a.Env = rest[cgroups:]
	if err == nil && a.Init.PID <= 1 {
		err = damaged("pid %d", a.Init.PID)
	}
	if err != nil {
		return Access{}, err
	}
	return a, nil
}

// Access reads how to enter the sandbox of this id, or of the living one of this
// name, without its record, which the entry lacks. ok is false if there is none, or
// it cannot be read, or has no access yet: [Dir.Find] tells.
func (d *Dir) Access(word string) (e *Entry, a Access, ok bool) {
	if d.root.fd < 0 {
		return nil, a, false
	}
	id := word
	if !validID(word) {
		if !validName(word) {
			return nil, a, false
		}
		names, err := d.names()
		if err != nil {
			return nil, a, false
		}
		defer names.close()
		if id, err = owner(names, word); err != nil || id == "" {
			return nil, a, false
		}
	}
	f, err := d.root.sub(id)
	if err != nil {
		return nil, a, false
	}
	defer f.close()
	// One without a supervisor may still have an init, which is about to end.
	if alive, err := f.alive(); err != nil || !alive {
		return nil, a, false
	}
	data, err := f.read(accessName)
	if err != nil {
		return nil, a, false
	}
	if a, err = parseAccess(string(data)); err != nil {
		return nil, a, false
	}
	return &Entry{ID: id, dir: d}, a, true
}
