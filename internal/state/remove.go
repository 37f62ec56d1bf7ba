package state

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Remove removes what is left of a sandbox that does not live any more.
func (e *Entry) Remove() error {
	return failed(e.dir.alone(func() error {
		f, err := e.dir.root.sub(e.ID)
		if errors.Is(err, unix.ENOENT) {
			return nil // somebody else was quicker
		}
		if err != nil {
			return err
		}
		defer f.close()
		alive, err := f.alive()
		if err != nil {
			return err
		}
		if alive {
			return &result.Error{Code: "still-alive", Message: "the sandbox " + e.ID + " is alive", Hint: "end it first"}
		}
		return result.All(e.dir.remove(e.ID, f), e.dir.release(e.Record.Name, e.ID))
	}))
}

// remove makes a sandbox's directory vanish, and then removes it. As long as it
// holds what cannot be removed, it stays, with its record.
func (d *Dir) remove(id string, f folder) error {
	if err := f.clear(lockName, recordName); err != nil {
		return err
	}
	hidden := "." + id
	if err := d.root.rename(id, hidden); err != nil {
		return err
	}
	if err := f.clear(); err != nil {
		return err // so it is not empty
	}
	return d.root.rmdir(hidden)
}

// Sweep removes what lives no more and has no usable record: whose making or
// removal was interrupted, or what is damaged; and then the names of all that does
// not live. It does not touch a directory in it that is none of ours.
func (d *Dir) Sweep() (warnings []error) {
	if d.root.fd < 0 {
		return nil
	}
	warn := func(err error) {
		if err != nil {
			warnings = append(warnings, failed(err))
		}
	}
	warn(d.alone(func() error {
		left, err := d.list()
		for _, name := range left {
			if d.useless(name) {
				warn(d.root.scrap(name))
			}
		}
		return result.All(err, d.sweepNames())
	}))
	return warnings
}

// useless says whether what has this name in the state directory is of no use. The
// caller is alone.
func (d *Dir) useless(name string) bool {
	if hidden, found := strings.CutPrefix(name, "."); found {
		return validID(hidden)
	}
	if !validID(name) {
		return false
	}
	alive, err := d.alive(name)
	if err != nil || alive {
		return false
	}
	_, err = d.load(name)
	return err == errUnrecorded || isDamaged(err)
}

// sweepNames removes the names of all that does not live. The caller is alone.
func (d *Dir) sweepNames() error {
	names, err := d.names()
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer names.close()
	all, err := names.names()
	for _, name := range all {
		// One that cannot be told is in nobody's way: it is taken over when it can.
		if id, err := owner(names, name); err == nil {
			if alive, err := d.alive(id); err == nil && !alive {
				_ = names.unlink(name)
			}
		}
	}
	return err
}
